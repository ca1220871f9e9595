package gpu

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// stubName is a prefix. A test binary whose file name begins with it acts as nvidia-smi; the rest of the name is its
// role.
const stubName = "nvidia-smi."

func TestMain(m *testing.M) {
	if role, ok := strings.CutPrefix(filepath.Base(os.Args[0]), stubName); ok {
		os.Exit(play(role, os.Args[1:]))
	}
	os.Setenv("GORACE", "atexit_sleep_ms=0") // otherwise the race detector would make each stub sleep for a second at its end
	os.Exit(m.Run())
}

// stub makes a simulated nvidia-smi for a role, in a new directory, and returns its path.
func stub(t *testing.T, role string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), stubName+role)
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// runs returns the PIDs of all processes that were started from a stub so far.
func runs(t *testing.T, path string) []int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(filepath.Dir(path), "pids"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var pids []int
	for word := range strings.FieldsSeq(string(text)) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// allGone waits until all processes of a stub have ended. It fails the test if one is still alive after testLimit.
func allGone(t *testing.T, path string) {
	t.Helper()
	for _, pid := range runs(t, path) {
		// PID 1 of this machine reaps a grandchild, which may take a while.
		eventually(t, fmt.Sprintf("process %d of %s to end", pid, filepath.Base(path)), func() bool {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil {
				return true
			}
			after := string(text[strings.LastIndexByte(string(text), ')')+1:])
			return strings.Contains("ZX", strings.Fields(after)[0])
		})
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(testLimit); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for %s", testLimit, what)
		}
	}
}

// twoGPUs is the output for two H200 GPUs with driver 580.173.02: one idle, one under load.
var twoGPUs = []map[string]string{
	{
		"index": "0", "uuid": "GPU-5ab4ffcb-0000-0000-0000-000000000001", "name": "NVIDIA H200", "driver_version": "580.173.02",
		"memory.total": "143771", "memory.used": "0", "memory.free": "143158", "utilization.gpu": "0",
		"power.draw": "76.12", "power.limit": "700.00", "clocks.sm": "345", "clocks.mem": "3201", "temperature.gpu": "29",
		"clocks_event_reasons.active": "0x0000000000000001", "clocks_throttle_reasons.active": "0x0000000000000001",
		"mig.mode.current": "Disabled",
	},
	{
		"index": "1", "uuid": "GPU-5ab4ffcb-0000-0000-0000-000000000002", "name": "NVIDIA H200", "driver_version": "580.173.02",
		"memory.total": "143771", "memory.used": "129000", "memory.free": "14158", "utilization.gpu": "100",
		"power.draw": "698.40", "power.limit": "700.00", "clocks.sm": "1710", "clocks.mem": "3201", "temperature.gpu": "71",
		"clocks_event_reasons.active": "0x0000000000000044", "clocks_throttle_reasons.active": "0x0000000000000044",
		"mig.mode.current": "Disabled",
	},
}

var twoProcesses = []map[string]string{
	{"pid": "4711", "gpu_uuid": "GPU-5ab4ffcb-0000-0000-0000-000000000002", "used_memory": "128990"},
	{"pid": "4712", "gpu_uuid": "GPU-5ab4ffcb-0000-0000-0000-000000000002", "used_memory": "[N/A]"},
}

// play acts as nvidia-smi. Every role writes its PID to a file, so that the test can check that the process is gone.
func play(role string, args []string) int {
	if err := leavePID(); err != nil {
		fmt.Println(err)
		return 1
	}
	loop := slices.Contains(args, "-lms")
	option, names, _ := strings.Cut(args[0], "=")
	fields := strings.Split(names, ",")
	rows := twoGPUs
	if option == "--query-compute-apps" {
		rows = twoProcesses
	}
	switch {
	case role == "hang", role == "stalls" && loop:
		if loop {
			say(rows, fields)
		}
		signal.Ignore(syscall.SIGTERM)
		if err := os.WriteFile(filepath.Join(filepath.Dir(os.Args[0]), "hangs"), nil, 0o644); err != nil {
			return 1
		}
		time.Sleep(2 * testLimit) // longer than any query waits
	case role == "garbage":
		fmt.Print("\x00\xff\x1b[31mbanana, banana\n,,,,,\n\n")
	case role == "empty":
	case role == "killed":
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		time.Sleep(time.Minute)
	case role == "none":
		fmt.Println("No devices were found")
		return 9
	case role == "nodriver":
		fmt.Println("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.")
		return 9
	case role == "mismatch":
		fmt.Println("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173")
		return 255
	case role == "flood", role == "babbles" && loop:
		for line := strings.Repeat("x", 1000); ; {
			if _, err := fmt.Println(line); err != nil {
				return 1
			}
		}
	case role == "one-long-line":
		for line := strings.Repeat("x", 64<<10); ; {
			if _, err := io.WriteString(os.Stdout, line); err != nil {
				return 1
			}
		}
	case role == "leaves-a-child":
		if err := leaveChild(); err != nil {
			fmt.Println(err)
			return 1
		}
		say(rows, fields)
	case role == "old":
		return sayKnown(rows, fields, "clocks_event_reasons.active", "used_memory")
	case role == "ancient":
		return sayKnown(rows, fields, "clocks_event_reasons.active", "clocks_throttle_reasons.active", "mig.mode.current", "power.limit")
	case role == "infoROM":
		fmt.Println("WARNING: infoROM is corrupted at gpu 0000:3B:00.0")
		say(rows, fields)
		return 14
	case role == "not-told":
		say(untold("[N/A]", rows), fields)
	case role == "mig":
		rows = untold("[Insufficient Permissions]", rows)
		rows[0]["mig.mode.current"] = "Enabled"
		say(rows, fields)
	case role == "dies" && loop:
		say(rows, fields)
		fmt.Println("Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.")
		return 15
	case role == "loses-one" && loop:
		say(rows, fields)
		for {
			say(rows[:1], fields)
			time.Sleep(20 * time.Millisecond)
		}
	case loop:
		for {
			say(rows, fields)
			time.Sleep(20 * time.Millisecond)
		}
	default:
		say(rows, fields)
	}
	return 0
}

func leavePID() error {
	f, err := os.OpenFile(filepath.Join(filepath.Dir(os.Args[0]), "pids"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	fmt.Fprintln(f, os.Getpid())
	return f.Close()
}

// leaveChild starts a child that outlives the stub and holds the stub's output open.
func leaveChild() error {
	child := filepath.Join(filepath.Dir(os.Args[0]), stubName+"hang")
	if err := os.Symlink(os.Args[0], child); err != nil {
		return err
	}
	_, err := os.StartProcess(child, []string{child, "--query-gpu=index"}, &os.ProcAttr{Files: []*os.File{nil, os.Stdout, os.Stderr}})
	return err
}

func say(rows []map[string]string, fields []string) {
	for _, row := range rows {
		texts := make([]string, len(fields))
		for i, name := range fields {
			texts[i] = row[name]
		}
		fmt.Println(strings.Join(texts, ", "))
	}
}

// sayKnown prints the rows, or nvidia-smi's error about the first unknown field. It returns the exit code.
func sayKnown(rows []map[string]string, fields []string, unknown ...string) int {
	for _, name := range fields {
		if slices.Contains(unknown, name) {
			fmt.Printf("Field \"%s\" is not a valid field to query.\n\n", name)
			return 2
		}
	}
	for _, row := range rows {
		if row["used_gpu_memory"] == "" {
			row["used_gpu_memory"] = row["used_memory"]
		}
	}
	say(rows, fields)
	return 0
}

// untold replaces all figures of the rows with words such as [N/A], as nvidia-smi does when it cannot tell a figure.
func untold(words string, rows []map[string]string) []map[string]string {
	for _, row := range rows {
		for name := range row {
			if !slices.Contains([]string{"index", "uuid", "gpu_uuid", "name", "driver_version"}, name) {
				row[name] = words
			}
		}
	}
	return rows
}
