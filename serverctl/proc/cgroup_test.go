package proc

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// The server starts without a cgroup, whatever the reason.
func TestAServerStartsWithoutACgroup(t *testing.T) {
	for _, row := range []struct {
		name     string
		newGroup func(t *testing.T) func(token string) (cgroup, error)
	}{
		{"none can be made", func(*testing.T) func(string) (cgroup, error) {
			return func(string) (cgroup, error) {
				return "", &os.PathError{Op: "mkdir", Path: "/sys/fs/cgroup/x", Err: syscall.EROFS}
			}
		}},
		{"it cannot be entered", func(t *testing.T) func(string) (cgroup, error) {
			dir := t.TempDir()
			return func(token string) (cgroup, error) {
				group := filepath.Join(dir, cgroupPrefix+token) // an ordinary directory: clone3 refuses it
				return cgroup(group), os.Mkdir(group, 0o755)
			}
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			useGroups(t, row.newGroup(t))
			p := start(t, "family", "ready")
			if group := p.Record().Cgroup; group != "" {
				t.Errorf("the record has the cgroup %q", group)
			}
			if err := p.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t)
		})
	}
}

func TestAMissingProgramIsNotBlamedOnTheCgroup(t *testing.T) {
	if _, err := Start(Spec{Argv: []string{"/no/such/vllm"}}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("Start() = %v, want the missing file", err)
	}
}

// Processes that fork faster than a scan can only be killed by the kernel.
func TestTheKernelKillsACgroup(t *testing.T) {
	if err := CgroupSupport(); err != nil {
		t.Skipf("there is no cgroup for a server here: %v", err)
	}
	p := start(t, "hoppers", "ready")
	group := p.Record().group()
	if !exists(group.file("cgroup.kill")) {
		t.Skip("this kernel kills no cgroups (Linux 5.14)")
	}
	if err := group.kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group is empty", func() bool {
		pids, err := group.pids()
		return err == nil && len(pids) == 0
	})
	if err := p.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
}
