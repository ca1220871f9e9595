package host

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// shmDir returns an empty directory in shared memory. If there is no shared memory, it returns an ordinary directory.
func shmDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(DevShm, "tuner-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func watch(t *testing.T, dir string) *ShmWatch {
	t.Helper()
	w, err := WatchShm(dir)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func observe(t *testing.T, w *ShmWatch, members ...*exec.Cmd) {
	t.Helper()
	var pids []int
	for _, cmd := range members {
		pids = append(pids, cmd.Process.Pid)
	}
	if err := w.Observe(pids); err != nil {
		t.Fatal(err)
	}
}

// sweep calls Sweep, and fails the test unless Sweep removes exactly these files.
func sweep(t *testing.T, w *ShmWatch, want ...string) {
	t.Helper()
	names, err := w.Sweep()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if _, err := os.Lstat(filepath.Join(w.dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s is still there, %v", name, err)
		}
	}
	slices.Sort(want)
	if !slices.Equal(names, want) {
		t.Errorf("Sweep() removed %q, want %q", names, want)
	}
}

// wantFiles fails the test unless exactly these files exist.
func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	slices.Sort(want)
	if !slices.Equal(names, want) {
		t.Errorf("%q are left, want %q", names, want)
	}
}

func TestSweepTakesWhatTheServerLeftAndNothingElse(t *testing.T) {
	t.Parallel()
	dir := shmDir(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	older := start(t, "map "+in("psm_older"))
	w := watch(t, dir)
	member := start(t, "map "+in("psm_mine")+" open "+in("sem.mp-mine")+" map "+in("psm_shared")+
		" open "+in("psm_older")+" leave "+in("torch_PID_77_0")+" leave "+in("psm_unseen"))
	neighbour := start(t, "map "+in("psm_other")+" map "+in("psm_shared")+" leave "+in("torch_PID_77_0"))
	ofMember, ofNeighbour := fmt.Sprintf("torch_%d_77_0", member.Process.Pid), fmt.Sprintf("torch_%d_77_0", neighbour.Process.Pid)
	observe(t, w, member)
	kill(member)

	sweep(t, w, "psm_mine", "sem.mp-mine", ofMember)
	wantFiles(t, dir, "psm_older", "psm_other", "psm_shared", "psm_unseen", ofNeighbour)

	kill(older)
	kill(neighbour) // now nobody holds psm_shared
	sweep(t, w, "psm_shared")
	sweep(t, w)
	wantFiles(t, dir, "psm_older", "psm_other", "psm_unseen", ofNeighbour)
}

func TestSweepKeepsWhatTheServerStillHolds(t *testing.T) {
	t.Parallel()
	dir := shmDir(t)
	w := watch(t, dir)
	member := start(t, "map "+filepath.Join(dir, "psm_mapped")+" open "+filepath.Join(dir, "psm_open"))
	observe(t, w, member)
	sweep(t, w)
	kill(member)
	sweep(t, w, "psm_mapped", "psm_open")
}

func TestSweepKeepsAFileThatTookOverAName(t *testing.T) {
	t.Parallel()
	dir := shmDir(t)
	w := watch(t, dir)
	path := filepath.Join(dir, "psm_a")
	member := start(t, "map "+path)
	observe(t, w, member)
	kill(member)
	if err := os.WriteFile(path+".new", []byte("a neighbour's"), 0o600); err != nil { // the new file is written beside the old file, so that it gets another inode
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	sweep(t, w)
	wantFiles(t, dir, "psm_a")
}

func TestSweepWithoutLeases(t *testing.T) {
	t.Parallel()
	dir := shmDir(t)
	w := watch(t, dir)
	w.lease = func(int) error { return unix.EINVAL }
	member := start(t, "map "+filepath.Join(dir, "psm_a"))
	observe(t, w, member)
	kill(member)
	sweep(t, w)
	wantFiles(t, dir, "psm_a")
}

func TestSweepKeepsAnotherUsersFile(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file away")
	}
	dir := shmDir(t)
	w := watch(t, dir)
	member := start(t, "map "+filepath.Join(dir, "psm_a"))
	observe(t, w, member)
	kill(member)
	if err := os.Chown(filepath.Join(dir, "psm_a"), 65534, -1); err != nil {
		t.Fatal(err)
	}
	sweep(t, w)
	wantFiles(t, dir, "psm_a")
}

func TestObservePassesOverTheDead(t *testing.T) {
	t.Parallel()
	dir := shmDir(t)
	w := watch(t, dir)
	member := start(t, "map "+filepath.Join(dir, "psm_a"))
	dead := start(t, "map "+filepath.Join(dir, "psm_b"))
	kill(dead)
	observe(t, w, dead, member)
	kill(member)
	sweep(t, w, "psm_a")
	wantFiles(t, dir, "psm_b") // no call of Observe saw a process that held psm_b
}

func TestListShm(t *testing.T) {
	t.Parallel()
	dir := shmDir(t)
	if err := os.WriteFile(filepath.Join(dir, "psm_a"), make([]byte, 5000), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("psm_a", filepath.Join(dir, "psm_link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "psm_dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	all, err := listShm(dir)
	if err != nil || len(all) != 1 {
		t.Fatalf("listShm() = %+v, %v, want one file", all, err)
	}
	for k := range all {
		if k.name != "psm_a" || k.inode == 0 {
			t.Errorf("listShm() = %+v", all)
		}
	}
	if all, err := listShm(filepath.Join(dir, "nowhere")); err != nil || len(all) > 0 {
		t.Errorf("listShm() of nothing = %v, %v", all, err)
	}
}

func TestMapped(t *testing.T) {
	for _, row := range []struct {
		name, line string
		want       key
		ok         bool
	}{
		{"shared memory", "7f1429a16000-7f1429a6d000 rw-s 00000000 00:1b 316526                     /dev/shm/psm_0123abcd", key{"psm_0123abcd", 316526}, true},
		{"a removed file", "7f1429a16000-7f1429a6d000 rw-s 00000000 00:1b 12    /dev/shm/psm_x (deleted)", key{"psm_x", 12}, true},
		{"a name with spaces", "7f1429a16000-7f1429a6d000 r--p 00000000 fe:00 9 /opt/my files/a b", key{"a b", 9}, true},
		{"the heap", "55f2-55f3 rw-p 00000000 00:00 0                          [heap]", key{}, false},
		{"nothing", "55f2-55f3 rw-p 00000000 00:00 0", key{}, false},
		{"garbage", "a b c d e /x", key{}, false},
	} {
		if got, ok := mappedFile(row.line); ok != row.ok || !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: mappedFile(%q) = %v, %v, want %v, %v", row.name, row.line, got, ok, row.want, row.ok)
		}
	}
}
