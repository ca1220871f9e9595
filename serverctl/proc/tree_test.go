package proc

import (
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A foreign process with the name of a server is left alone, because neither Stop nor Reclaim looks at names.
func TestANeighbourIsLeftAlone(t *testing.T) {
	for _, row := range []struct {
		name string
		cmd  *exec.Cmd
	}{
		{"a process that we started by other means", command("polite", inSession)},
		{"a process in its own session", command("polite", leaving)},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.cmd.Args = []string{"vllm", "serve", "model"}
			pid := neighbour(t, row.cmd)
			p := start(t, "family", "ready")
			if got := members(t, p); len(got) != 3 || slices.Contains(got, pid) {
				t.Errorf("members = %v, want three without %d", got, pid)
			}
			if err := p.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			if killed, err := Reclaim(p.Record()); err != nil || len(killed) > 0 {
				t.Errorf("Reclaim() = %v, %v, want nothing", killed, err)
			}
			if !alive(pid) {
				t.Error("the neighbour is dead")
			}
			nothingLeft(t, pid)
		})
	}
}

// An orphan that became our child before the server was started belongs to no server.
func TestAnOlderOrphanIsNotTheServers(t *testing.T) {
	if err := SubreaperSupport(); err != nil {
		t.Fatal(err)
	}
	if err := command("bear-and-exit stubborn", clean).Run(); err != nil {
		t.Fatal(err)
	}
	orphans, err := descendants()
	if err != nil || len(orphans) != 1 {
		t.Fatalf("our children are %+v, %v; want one orphan", orphans, err)
	}
	orphan := orphans[0].pid
	defer func() {
		syscall.Kill(orphan, syscall.SIGKILL)
		eventually(t, "the orphan dies", func() bool { return !alive(orphan) })
		home.scanOnce() // reaps it
		nothingLeft(t)
	}()
	time.Sleep(50 * time.Millisecond) // start times have steps of 10 ms, and the leader must start in a later step than the orphan
	p := start(t, "polite", "ready")
	if got := members(t, p); !slices.Equal(got, []int{p.record.PID}) {
		t.Errorf("members = %v, want the leader alone", got)
	}
	if err := p.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if !alive(orphan) {
		t.Error("the orphan is dead")
	}
}

// With two servers, the owner of an orphan is still known if a scan saw the orphan while its parent was alive.
func TestAnOrphanGoesToTheServerItWasSeenWith(t *testing.T) {
	withoutGroups(t)
	other := start(t, "polite", "ready")
	p := start(t, "nest", "ready")
	seen := members(t, p)
	if len(seen) != 3 {
		t.Fatalf("members = %v, want the leader, its child and its grandchild", seen)
	}
	parent := slices.DeleteFunc(slices.Clone(seen), func(pid int) bool { return pid == p.record.PID || parentOf(t, pid) != p.record.PID })
	if len(parent) != 1 {
		t.Fatalf("of %v children of the leader are %v, want one", seen, parent)
	}
	if err := syscall.Kill(parent[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the child dies", func() bool { return !alive(parent[0]) })
	left := slices.DeleteFunc(seen, func(pid int) bool { return pid == parent[0] })
	if got := members(t, p); !slices.Equal(got, left) {
		t.Errorf("members = %v, want %v", got, left)
	}
	if err := other.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if got := members(t, p); !slices.Equal(got, left) {
		t.Errorf("after the other's Stop members = %v, want %v", got, left)
	}
	if err := p.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	s, err := readStat(pid)
	if err != nil {
		t.Fatal(err)
	}
	return s.parent
}

// The owner of an orphan is unknown if no scan saw it and it has removed its token. Such an orphan is killed when the
// last server that may be its ancestor ends.
func TestAnOrphanThatNobodySaw(t *testing.T) {
	withoutGroups(t)
	for _, row := range []struct {
		name  string
		role  string
		known bool // whether the owner is known while two servers are alive
	}{
		{"a process with a token is known by it", "bear-marked-and-exit stubborn", true},
		{"a process without a token goes to the last server", "bear-and-exit stubborn", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			other := start(t, "polite", "ready")
			p, said := startTalking(t, "daemonise-later "+row.role, "waiting")
			home.mu.Lock() // this lock keeps scans out while the daemon starts
			if err := syscall.Kill(p.record.PID, syscall.SIGUSR1); err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(waitLimit); !strings.Contains(said.String(), "ready") && time.Now().Before(end); {
				time.Sleep(5 * time.Millisecond)
			}
			home.mu.Unlock()
			if got := members(t, p); (len(got) == 2) != row.known {
				t.Errorf("members = %v, want its daemon among them: %v", got, row.known)
			}
			if got := members(t, other); !slices.Equal(got, []int{other.record.PID}) {
				t.Errorf("the other's members = %v, want its leader alone", got)
			}
			if err := other.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			if got := members(t, p); len(got) != 2 {
				t.Errorf("after the other's Stop members = %v, want the leader and its daemon", got)
			}
			if err := p.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t)
		})
	}
}

func BenchmarkScan(b *testing.B) {
	home.mu.Lock()
	defer home.mu.Unlock()
	for b.Loop() {
		if _, err := home.scan(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(home.marks)), "processes")
}
