package host

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rogpeppe/go-internal/txtar"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "rewrite the machines' JSON in testdata")

// roleVariable tells the test binary to act as another process instead of running the tests.
const roleVariable = "HOST_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		if err := play(strings.Fields(role)); err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// segmentSize is the size of the files that processes share in these tests, in bytes.
const segmentSize = 1 << 20

// play holds files until the process is killed. Its arguments are pairs of words. The first word says how to hold a
// file (map, open or leave), and the second word is the file's path.
func play(words []string) error {
	var open []*os.File // the list keeps the files open, because the garbage collector closes a file without references
	for i := 0; i+1 < len(words); i += 2 {
		how, path := words[i], words[i+1]
		path = strings.ReplaceAll(path, "PID", fmt.Sprint(os.Getpid()))
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		if _, err := f.WriteAt(make([]byte, segmentSize), 0); err != nil {
			return err
		}
		if how == "map" {
			if _, err := unix.Mmap(int(f.Fd()), 0, segmentSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
				return err
			}
		}
		if how == "open" {
			open = append(open, f)
		} else if err := f.Close(); err != nil { // a mapping remains valid when its file is closed
			return err
		}
	}
	fmt.Println("ready")
	time.Sleep(time.Minute) // the process ends by itself, so a failing test leaves nothing behind for long
	runtime.KeepAlive(open)
	return nil
}

// start starts a process that holds files, and waits until the process holds them.
func start(t *testing.T, role string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(cmd) })
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the process says %q, %v", line, err)
	}
	return cmd
}

// kill kills a process and waits for its end.
func kill(cmd *exec.Cmd) {
	if cmd.ProcessState == nil {
		cmd.Process.Kill()
		cmd.Wait()
	}
}

// machine reads a recorded machine from a txtar archive. kernel.json has the answers of the machine's kernel; the other
// files are the machine's own.
func machine(t *testing.T, name string) (Machine, *txtar.Archive) {
	t.Helper()
	archive, err := txtar.ParseFile(name)
	if err != nil {
		t.Fatal(err)
	}
	root := fstest.MapFS{}
	for _, f := range archive.Files {
		root[f.Name] = &fstest.MapFile{Data: f.Data}
	}
	var recorded struct {
		CPUs                      int
		Shm                       [2]int64 // total and free bytes of /dev/shm; 0 when there is none
		Files, Memlock, Processes unix.Rlimit
	}
	if err := json.Unmarshal(root["kernel.json"].Data, &recorded); err != nil {
		t.Fatal(err)
	}
	return Reader{root, &kernel{
		cpus: recorded.CPUs,
		rlimit: func(resource int, to *unix.Rlimit) error {
			*to = map[int]unix.Rlimit{
				unix.RLIMIT_NOFILE: recorded.Files, unix.RLIMIT_MEMLOCK: recorded.Memlock, unix.RLIMIT_NPROC: recorded.Processes,
			}[resource]
			return nil
		},
		statfs: func(dir string) (total, free int64, _ error) {
			if recorded.Shm[0] == 0 || dir != DevShm {
				return 0, 0, errors.New("statfs /dev/shm: no such file or directory")
			}
			return recorded.Shm[0], recorded.Shm[1], nil
		},
	}}.Read(), archive
}

func TestReadOfRecordedMachines(t *testing.T) {
	names, err := filepath.Glob("testdata/machines/*.txtar")
	if err != nil || len(names) < 7 {
		t.Fatalf("%d recorded machines, %v; want seven", len(names), err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			m, archive := machine(t, name)
			got, err := json.MarshalIndent(m, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			last := &archive.Files[len(archive.Files)-1]
			if last.Name != "want.json" {
				t.Fatal("the last file is not want.json")
			}
			if *update {
				last.Data = got
				if err := os.WriteFile(name, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if string(got) != string(last.Data) {
				t.Errorf("Read() = %s\nwant %s", got, last.Data)
			}
		})
	}
}

func TestReadOfThisMachine(t *testing.T) {
	m := Reader{}.Read()
	if m.Cores.Usable <= 0 || m.Cores.Affinity <= 0 || m.Memory.Total <= 0 || m.Memory.Free <= 0 || m.Memory.Free > m.Memory.Total {
		t.Errorf("Read() = %+v", m)
	}
	if m.Limits.OpenFiles == nil || m.Limits.LockedMemory == nil || m.Limits.Processes == nil {
		t.Errorf("Limits = %+v", m.Limits)
	}
	if _, err := os.Stat(DevShm); err == nil && m.Shm.Total <= 0 {
		t.Errorf("Shm = %+v, unknown %q", m.Shm, m.Unknown)
	}
}

func TestTextOfAFinding(t *testing.T) {
	for _, row := range []struct {
		finding             Finding
		text, textAndRemedy string
	}{
		{Finding{What: "GPUs", Have: "1"}, "GPUs: 1", "GPUs: 1"},
		{Finding{What: "GPUs", Have: "1", Need: "2"}, "GPUs: 1; wanted 2", "GPUs: 1; wanted 2"},
		{Finding{What: "GPUs", Have: "1", Remedy: "add one"}, "GPUs: 1", "GPUs: 1; add one"},
		{Finding{What: "GPUs", Have: "1", Need: "2", Remedy: "add one"}, "GPUs: 1; wanted 2", "GPUs: 1; wanted 2; add one"},
	} {
		if text, textAndRemedy := row.finding.Text(), row.finding.TextWithRemedy(); text != row.text || textAndRemedy != row.textAndRemedy {
			t.Errorf("%+v: Text %q and TextWithRemedy %q, want %q and %q", row.finding, text, textAndRemedy, row.text, row.textAndRemedy)
		}
	}
}

func TestCheck(t *testing.T) {
	cores := func(affinity int, limit float64) Cores {
		if limit == 0 {
			return Cores{Usable: float64(affinity), Affinity: affinity}
		}
		return Cores{Usable: min(float64(affinity), limit), Affinity: affinity, Limit: &limit, LimitAt: "/sys/fs/cgroup/cpu.max"}
	}
	files := func(soft int64) *Limit { return &Limit{Soft: &soft, Hard: &soft} }
	const gib = 1 << 30
	fine := Machine{
		Cores: cores(16, 0), Shm: Shm{DevShm, 16 * gib, 16 * gib}, Limits: Limits{OpenFiles: files(1048575)},
	}
	one := Need{GPUs: 1, GeneratorCores: 1, Streams: 1024}
	certain := Need{GPUs: 1, GeneratorCores: 1, Streams: 1024, Certain: true}
	two := Need{GPUs: 2, GeneratorCores: 1, Streams: 1024}
	for _, row := range []struct {
		name   string
		change func(*Machine)
		need   Need
		want   []string // Severity and What of each finding
		text   string   // text that the first finding must contain
	}{
		{"a good machine has no finding", func(*Machine) {}, two, nil, ""},
		{"a limit of 4 carries one GPU", func(m *Machine) { m.Cores = cores(64, 4) }, one, nil, ""},
		{"a limit of 4 throttles two GPUs", func(m *Machine) { m.Cores = cores(64, 4) }, two, []string{"error CPU limit"},
			"resources.limits.cpu of the container to 5 or more"},
		{"a limit of 3.5 is less than 4", func(m *Machine) { m.Cores = cores(64, 3.5) }, one, []string{"error CPU limit"}, "3.5 cores, by /sys/fs/cgroup/cpu.max"},
		{"a small machine is slow, but no error", func(m *Machine) { m.Cores = cores(2, 0) }, one, []string{"warning cores"}, "lacks CPU time"},
		{"a limit hurts a server without a GPU less", func(m *Machine) { m.Cores = cores(8, 2) }, Need{GeneratorCores: 1}, []string{"warning CPU limit"}, ""},
		{"a small cpuset below a generous limit is no limit", func(m *Machine) { m.Cores = cores(2, 8) }, one, []string{"warning cores"}, ""},
		{"127 files are too few for any run", func(m *Machine) { m.Limits.OpenFiles = files(127) }, one, []string{"error open files"}, "ulimit -Hn 2304"},
		{"1,024 streams for certain want 1,152 files", func(m *Machine) { m.Limits.OpenFiles = files(1151) }, certain, []string{"error open files"}, "ulimit -Hn 2304"},
		{"with which some may fail", func(m *Machine) { m.Limits.OpenFiles = files(1152) }, certain, []string{"warning open files"}, "ulimit -Hn 2304"},
		{"1,024 streams want 2,304 files", func(m *Machine) { m.Limits.OpenFiles = files(2303) }, one, []string{"warning open files"}, "ulimit -Hn 2304"},
		{"2,304 files are enough", func(m *Machine) { m.Limits.OpenFiles = files(2304) }, one, nil, ""},
		{"unlimited files are enough", func(m *Machine) { m.Limits.OpenFiles = &Limit{} }, one, nil, ""},
		{"a container's 64 MiB are enough for one GPU", func(m *Machine) { m.Shm = Shm{DevShm, 64 << 20, 64 << 20} }, one, nil, ""},
		{"not for two", func(m *Machine) { m.Shm = Shm{DevShm, 64 << 20, 64 << 20} }, two, []string{"warning /dev/shm"}, "emptyDir {medium: Memory} at /dev/shm"},
		{"a full one is for none", func(m *Machine) { m.Shm = Shm{DevShm, 64 << 20, 1 << 20} }, one, []string{"warning /dev/shm"}, "1 MiB of 64 MiB free"},
		{"what is not known is a fact, and comes last", func(m *Machine) {
			m.Unknown, m.Cores, m.Shm, m.Limits = []string{"cores: no /proc"}, cores(64, 1), Shm{Dir: DevShm}, Limits{}
		}, one, []string{"error CPU limit", "fact not known"}, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			m := fine
			row.change(&m)
			var got []string
			findings := Check(m, row.need)
			for _, f := range findings {
				got = append(got, string(f.Severity)+" "+f.What)
			}
			if !reflect.DeepEqual(got, row.want) {
				t.Fatalf("Check() = %q, want %q", got, row.want)
			}
			if len(findings) > 0 && !strings.Contains(fmt.Sprintf("%+v", findings[0]), row.text) {
				t.Errorf("Check() = %+v, want %q in it", findings[0], row.text)
			}
		})
	}
}
