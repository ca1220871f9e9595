package proc

import (
	"os"
	"path/filepath"
	"testing"
)

// A server that cannot enter its cgroup starts without it.
func TestAServerStartsWithoutACgroup(t *testing.T) {
	dir := t.TempDir()
	useGroups(t, func(token string) (cgroup, error) {
		group := filepath.Join(dir, cgroupPrefix+token) // an ordinary directory, which clone3 refuses as a cgroup
		return cgroup(group), os.Mkdir(group, 0o755)
	})
	p := start(t, "family", "ready")
	if group := p.Record().Cgroup; group != "" {
		t.Errorf("the record has the cgroup %q", group)
	}
	if err := p.Stop(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	nothingLeft(t)
}

// If processes fork faster than a scan, only the kernel can kill them.
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
