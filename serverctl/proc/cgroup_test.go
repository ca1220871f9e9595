package proc

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestCgroupDirectoryIsWhereOurCgroupIsMounted(t *testing.T) {
	const (
		pure   = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
		hybrid = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n" +
			"41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
		part    = "41 31 0:38 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
		strange = `41 31 0:38 / /mnt/my\040groups rw - cgroup2 cgroup2 rw` + "\n"
		old     = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
	)
	for _, row := range []struct {
		name, membership, mounts, want, bad string
	}{
		{"a container in its own cgroup namespace", "0::/\n", pure, "/sys/fs/cgroup", ""},
		{"a desktop", "0::/user.slice/a.scope\n", pure, "/sys/fs/cgroup/user.slice/a.scope", ""},
		{"versions 1 and 2 side by side", "4:memory:/x\n0::/y\n", hybrid, "/sys/fs/cgroup/unified/y", ""},
		{"a part of the hierarchy is mounted", "0::/kubepods/pod1/c\n", part, "/sys/fs/cgroup/c", ""},
		{"a mount point with a space", "0::/a\n", strange, "/mnt/my groups/a", ""},
		{"our part is not mounted", "0::/kubepods/pod10\n", part, "", "mounted nowhere"},
		{"version 1 only", "4:memory:/x\n", old, "", "no cgroup v2"},
		{"version 2 without a mount", "0::/x\n", old, "", "mounted nowhere"},
		{"a process outside its namespace", "0::/../x\n", pure, "", "outside our cgroup namespace"},
		{"empty", "", "", "", "no cgroup v2"},
	} {
		got, err := cgroupDirectory(row.membership, row.mounts)
		if got != row.want || (err != nil) != (row.bad != "") || err != nil && !strings.Contains(err.Error(), row.bad) {
			t.Errorf("%s: cgroupDirectory = %q, %v; want %q, error %q", row.name, got, err, row.want, row.bad)
		}
	}
}

// Whatever keeps us from a cgroup, the server starts, and doctor can say why.
func TestAServerStartsWithoutACgroup(t *testing.T) {
	for _, row := range []struct {
		name     string
		newGroup func(t *testing.T) func(token string) (cgroup, error)
		want     string
	}{
		{"none can be made", func(*testing.T) func(string) (cgroup, error) {
			return func(string) (cgroup, error) {
				return "", &os.PathError{Op: "mkdir", Path: "/sys/fs/cgroup/x", Err: syscall.EROFS}
			}
		}, "read-only"},
		{"it cannot be entered", func(t *testing.T) func(string) (cgroup, error) {
			dir := t.TempDir()
			return func(token string) (cgroup, error) {
				group := filepath.Join(dir, cgroupPrefix+token) // an ordinary directory: clone3 refuses it
				return cgroup(group), os.Mkdir(group, 0o755)
			}
		}, "start a process in"},
	} {
		t.Run(row.name, func(t *testing.T) {
			useGroups(t, row.newGroup(t))
			p := start(t, "family", "ready")
			if group := p.Record().Cgroup; group != "" {
				t.Errorf("the record has the cgroup %q", group)
			}
			if err := CgroupSupport(); err == nil || !strings.Contains(err.Error(), row.want) {
				t.Errorf("CgroupSupport() = %v, want %q", err, row.want)
			}
			if err := p.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			nothingLeft(t)
		})
	}
}

func TestAMissingProgramIsNotBlamedOnTheCgroup(t *testing.T) {
	if err := CgroupSupport(); err != nil {
		t.Skipf("there is no cgroup for a server here: %v", err)
	}
	if _, err := Start(Spec{Argv: []string{"/no/such/vllm"}}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("Start() = %v, want the missing file", err)
	}
	if err := CgroupSupport(); err != nil {
		t.Errorf("CgroupSupport() = %v", err)
	}
}

// What forks faster than we can look cannot be killed faster than it forks, but by the kernel.
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
