package gpu

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

// testLimit is a time limit that is long enough for a simulated nvidia-smi on two busy cores, even with the race
// detector.
const testLimit = 45 * time.Second

func TestQuery(t *testing.T) {
	t.Parallel()
	n := &NvidiaSMI{Path: stub(t, "fine"), Timeout: testLimit}
	begin := time.Now()
	got, err := n.Query(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got.At.Before(begin) || got.At.After(time.Now()) {
		t.Errorf("the reading is of %v, want a time between %v and now", got.At, begin)
	}
	want := []GPU{
		{
			Index: 0, UUID: "GPU-5ab4ffcb-0000-0000-0000-000000000001", Name: "NVIDIA H200", Driver: "580.173.02",
			TotalMiB: new(143771.0), UsedMiB: new(0.0), FreeMiB: new(143158.0), Utilization: new(0.0),
			PowerW: new(76.12), PowerLimitW: new(700.0), SMClockMHz: new(345.0), MemoryClockMHz: new(3201.0), TemperatureC: new(29.0),
			Throttle: []string{"idle"},
		},
		{
			Index: 1, UUID: "GPU-5ab4ffcb-0000-0000-0000-000000000002", Name: "NVIDIA H200", Driver: "580.173.02",
			TotalMiB: new(143771.0), UsedMiB: new(129000.0), FreeMiB: new(14158.0), Utilization: new(100.0),
			PowerW: new(698.4), PowerLimitW: new(700.0), SMClockMHz: new(1710.0), MemoryClockMHz: new(3201.0), TemperatureC: new(71.0),
			Throttle: []string{"power cap", "hardware thermal slowdown"},
		},
	}
	if !reflect.DeepEqual(got.GPUs, want) {
		t.Errorf("Query() = %s\nwant %s", asJSON(t, got.GPUs), asJSON(t, want))
	}
	allGone(t, n.Path)
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	text, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestQueryWithoutAnAnswer(t *testing.T) {
	for _, row := range []struct {
		name, role string
		none       bool   // whether the error is ErrNone
		want       string // text that the error must contain
	}{
		{"no device is a fact", "none", true, `says "No devices were found"`},
		{"a driver that is not loaded is a fact", "nodriver", true, "couldn't communicate with the NVIDIA driver"},
		{"a driver of two versions needs a reboot", "mismatch", false,
			"exit status 255: Failed to initialize NVML: Driver/library version mismatch; the driver was updated"},
		{"garbage is named", "garbage", false, "has 2 values, want 15"},
		{"nothing at all is no answer", "empty", false, "it listed no GPU"},
		{"a crash is named with its signal", "killed", false, "signal: killed"},
		{"gigabytes of lines are ended", "flood", false, "over 1 MiB, so the tuner ended it"},
		{"a line without an end is ended", "one-long-line", false, "over 1 MiB, so the tuner ended it"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			n := &NvidiaSMI{Path: stub(t, row.role), Timeout: testLimit}
			got, err := n.Query(t.Context())
			if err == nil || !strings.Contains(err.Error(), row.want) {
				t.Fatalf("Query() = %v, %v, want an error with %q", got, err, row.want)
			}
			if errors.Is(err, ErrNone) != row.none {
				t.Errorf("Query() = %v; errors.Is(err, ErrNone) = %v, want %v", err, !row.none, row.none)
			}
			if _, failed := errors.AsType[*Failure](err); failed == row.none {
				t.Errorf("Query() = %v is a *Failure: %v, want %v", err, failed, !row.none)
			}
			allGone(t, n.Path)
		})
	}
}

func TestQueryWithoutAProgram(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := (&NvidiaSMI{Path: filepath.Join(dir, "nvidia-smi")}).Query(t.Context())
	if !errors.Is(err, ErrNone) {
		t.Errorf("Query() without a program = %v, want ErrNone", err)
	}
	path := filepath.Join(dir, "text")
	if err := os.WriteFile(path, []byte("no program\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err = (&NvidiaSMI{Path: path}).Query(t.Context()); err == nil || errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "does not start") {
		t.Errorf("Query() of a text = %v, want that it does not start", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err = (&NvidiaSMI{Path: path}).Query(t.Context()); err == nil || errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "executable") {
		t.Errorf("Query() of a file that is not executable = %v, want that it should be", err)
	}
}

func TestQueryEndsAHangingProgram(t *testing.T) {
	t.Parallel()
	n := &NvidiaSMI{Path: stub(t, "hang"), Timeout: 300 * time.Millisecond}
	_, err := n.Query(t.Context())
	if err == nil || !strings.Contains(err.Error(), "no answer within 300 ms") {
		t.Errorf("Query() of a hanging nvidia-smi = %v, want that there is no answer within 300 ms", err)
	}
	allGone(t, n.Path)
}

func TestQueryEndsWithItsContext(t *testing.T) {
	t.Parallel()
	n := &NvidiaSMI{Path: stub(t, "hang"), Timeout: time.Minute}
	why := errors.New("the study is over")
	if err := interrupt(t, n, why); !errors.Is(err, why) {
		t.Errorf("Query() = %v, want %v", err, why)
	}
	allGone(t, n.Path)
}

// interrupt ends the context of a query while nvidia-smi hangs, and returns the error of the query.
func interrupt(t *testing.T, n *NvidiaSMI, why error) error {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { // this goroutine ends with the query; the select below waits for it
		_, err := n.Query(ctx)
		ended <- err
	}()
	awaitHang(t, n.Path) // from here on, the simulated nvidia-smi ignores SIGTERM
	cancel(why)
	select {
	case err := <-ended:
		return err
	case <-time.After(testLimit):
		t.Fatal("Query did not end with its context")
		return nil
	}
}

// awaitHang waits until a simulated nvidia-smi hangs and ignores SIGTERM.
func awaitHang(t *testing.T, path string) {
	t.Helper()
	eventually(t, "the stub to hang", func() bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(path), "hangs"))
		return err == nil
	})
}

func TestQueryDoesNotWaitForWhatItsProgramLeavesBehind(t *testing.T) {
	t.Parallel()
	n := &NvidiaSMI{Path: stub(t, "leaves-a-child"), Timeout: testLimit}
	got, err := n.Query(t.Context()) // the child lives longer than the time limit
	if err != nil || len(got.GPUs) != 2 {
		t.Errorf("Query() = %v, %v, want two GPUs", got, err)
	}
	awaitHang(t, n.Path)
	pids := runs(t, n.Path)
	if err := syscall.Kill(pids[len(pids)-1], syscall.SIGKILL); err != nil {
		t.Errorf("the child has ended before the test: %v", err)
	}
	allGone(t, n.Path)
}

// A process that waits inside the driver cannot be killed. The test simulates this with a kill function that does
// nothing.
func TestQueryLeavesOneBehindThatCannotBeKilledAndStartsNoOther(t *testing.T) {
	t.Parallel()
	n := &NvidiaSMI{Path: stub(t, "hang"), Timeout: time.Minute, kill: func(int) error { return nil }}
	if err := interrupt(t, n, nil); err == nil || !strings.Contains(err.Error(), "survives SIGKILL") {
		t.Fatalf("Query() = %v, want that a process survives SIGKILL", err)
	}
	if _, err := n.Query(t.Context()); err == nil || !strings.Contains(err.Error(), "survives SIGKILL") {
		t.Errorf("a second Query() = %v, want that a process survives SIGKILL", err)
	}
	pids := runs(t, n.Path)
	if len(pids) != 1 {
		t.Fatalf("%d processes were started, want one", len(pids))
	}
	syscall.Kill(pids[0], syscall.SIGKILL)
	eventually(t, "the process to be reaped", func() bool { return n.checkStuck() == nil })
}

func TestQueryOfFiguresThatAreNotTold(t *testing.T) {
	for _, row := range []struct {
		name, role, words string
		mig               string
	}{
		{"[N/A] is not zero", "not-told", "[N/A]", ""},
		{"MIG hides figures from a container", "mig", "[Insufficient Permissions]", "enabled"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			n := &NvidiaSMI{Path: stub(t, row.role), Timeout: testLimit}
			got, err := n.Query(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			g := got.GPUs[0]
			if g.TotalMiB != nil || g.UsedMiB != nil || g.Utilization != nil || g.PowerW != nil || g.Throttle != nil {
				t.Errorf("Query() = %s, want no figure", asJSON(t, g))
			}
			if g.Unsaid["memory.used"] != row.words || g.Unsaid["clocks_event_reasons.active"] != row.words {
				t.Errorf("Unsaid = %q, want %s for each", g.Unsaid, row.words)
			}
			if g.MIG != row.mig {
				t.Errorf("MIG = %q, want %q", g.MIG, row.mig)
			}
			if text := asJSON(t, g); !strings.Contains(text, `"used_mib": null`) || !strings.Contains(text, `"throttle": null`) {
				t.Errorf("as JSON: %s, want null", text)
			}
			if _, err := n.Processes(t.Context()); err != nil {
				t.Errorf("Processes() = %v", err)
			}
		})
	}
}

func TestQueryAsksOnlyForWhatTheProgramKnows(t *testing.T) {
	for _, row := range []struct {
		name, role string
		runs       int // how often the first query must start nvidia-smi
		throttle   []string
		limit      bool
	}{
		{"an older driver has another name for the reasons", "old", 2, []string{"idle"}, true},
		{"fields of no name are left out, one after the other", "ancient", 5, nil, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			n := &NvidiaSMI{Path: stub(t, row.role), Timeout: testLimit}
			for i, want := range []int{row.runs, row.runs + 1} {
				got, err := n.Query(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				g := got.GPUs[0]
				if !reflect.DeepEqual(g.Throttle, row.throttle) || (g.PowerLimitW != nil) != row.limit || g.Name != "NVIDIA H200" || *g.TotalMiB != 143771 {
					t.Errorf("Query() = %s, want throttle %q and the other figures", asJSON(t, g), row.throttle)
				}
				if have := len(runs(t, n.Path)); have != want {
					t.Errorf("after query %d nvidia-smi ran %d times, want %d", i+1, have, want)
				}
			}
		})
	}
}

func TestQueryPassesOverAWarning(t *testing.T) {
	t.Parallel()
	got, err := (&NvidiaSMI{Path: stub(t, "infoROM"), Timeout: testLimit}).Query(t.Context())
	if err != nil || len(got.GPUs) != 2 {
		t.Errorf("Query() = %v, %v, want two GPUs", got, err)
	}
}

func TestProcesses(t *testing.T) {
	const second = "GPU-5ab4ffcb-0000-0000-0000-000000000002"
	for _, row := range []struct {
		name, role string
		want       []Process
	}{
		{"two, and one shows no memory", "fine", []Process{{4711, second, new(128990.0)}, {4712, second, nil}}},
		{"an older driver has another name for the memory", "old", []Process{{4711, second, new(128990.0)}, {4712, second, nil}}},
		{"none is no error", "empty", nil},
		{"a container may not see the numbers", "mig", []Process{{0, second, nil}, {0, second, nil}}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			got, err := (&NvidiaSMI{Path: stub(t, row.role), Timeout: testLimit}).Processes(t.Context())
			if err != nil || !reflect.DeepEqual(got, row.want) {
				t.Errorf("Processes() = %s, %v\nwant %s", asJSON(t, got), err, asJSON(t, row.want))
			}
		})
	}
}

func TestThrottleNamesEveryBit(t *testing.T) {
	for _, row := range []struct {
		mask uint64
		want []string
	}{
		{0, []string{}},
		{0x8 | 0x40, []string{"hardware slowdown", "hardware thermal slowdown"}},
		{0x20 | 0x80 | 0x100, []string{"software thermal slowdown", "power brake", "display clock"}},
		{0x4 | 1<<40, []string{"power cap", "reason 0x10000000000"}},
	} {
		if got := throttle(row.mask); !reflect.DeepEqual(got, row.want) {
			t.Errorf("throttle(%#x) = %q, want %q", row.mask, got, row.want)
		}
	}
}

func FuzzParseTable(f *testing.F) {
	const maxMessage = 3000 // bytes: the error quotes two clipped texts, and quoting may escape every letter
	f.Add("0, GPU-1, 580.1, 143771, 0, 143158, 0, 76.12, 700.00, 345, 3201, 29, 0x1, Disabled, NVIDIA H200\n")
	f.Add("0, GPU-1, 580.1, [N/A], ERR!, -1, nan, inf, 1e400, , [GPU is lost], 29, 0xffffffffffffffff, Enabled, a, b\n")
	f.Add("WARNING: x\n\n\x00\xff,,,,,,,,,,,,,,,,\n")
	f.Add("Field \"index\" is not a valid field to query.\n")
	f.Fuzz(func(t *testing.T, text string) {
		n := &NvidiaSMI{}
		names := n.names(gpuColumns())
		gpus, err := parseTable(text, names, newGPU)
		if err != nil && len(err.Error()) > maxMessage {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		if _, err := json.Marshal(gpus); err != nil {
			t.Error(err)
		}
		for _, g := range gpus {
			if g.Index < 0 || g.TotalMiB != nil && *g.TotalMiB < 0 || g.PowerW != nil && *g.PowerW < 0 {
				t.Errorf("a negative value in %+v", g)
			}
		}
		if _, err := parseTable(text, n.names(processColumns), newProcess); err != nil && len(err.Error()) > maxMessage {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		for range len(names) + 1 {
			if !n.reject(n.names(gpuColumns()), text) {
				return
			}
		}
		t.Errorf("%q would be rejected for ever", text)
	})
}
