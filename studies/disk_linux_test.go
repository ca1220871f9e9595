package studies

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// smallDisk mounts a disk with the given number of MiB.
func smallDisk(t *testing.T, mib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
		t.Skipf("this user may not mount a small disk: %v", err)
	}
	t.Cleanup(func() { try(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// Open refuses a disk with too little space, before it writes any file.
func TestTooLittleSpace(t *testing.T) {
	disk := smallDisk(t, 8)
	_, _, err := Open(context.Background(), filepath.Join(disk, "llama70b"), llama, Options{})
	wantUnusable(t, err, "open study llama70b", disk, "MiB free", "needs 64 MiB", "--root")
	wantUnusable(t, errorOf(ExamineDisk(filepath.Join(disk, "not", "there", "yet"))), disk+" has only", "needs 64 MiB")
	if isStudy(filepath.Join(disk, "llama70b")) {
		t.Error("the refused Open has begun a study")
	}
}

func TestReadOnlyDisk(t *testing.T) {
	disk := smallDisk(t, 80)
	dir := filepath.Join(disk, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Close(), unix.Mount("", disk, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	study, err := ReadSnapshot(dir)
	try(t, err)
	if len(study.Trials) != 1 {
		t.Errorf("ReadSnapshot has %d trials, want 1", len(study.Trials))
	}
	_, _, err = Open(context.Background(), dir, llama, Options{})
	wantUnusable(t, err, "open study llama70b", "cannot be written", "read-only file system")
	wantUnusable(t, errorOf(ExamineDisk(filepath.Join(disk, "qwen"))), disk+" cannot be written", "read-only file system")
}

// If a disk fills up during a study, the store returns a clear error and is not usable any more. No acknowledged probe
// is lost.
func TestDiskFillsUp(t *testing.T) {
	disk := smallDisk(t, 70)
	dir := filepath.Join(disk, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
	ballast := filepath.Join(disk, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 80<<20), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("WriteFile = %v, want a full disk", err)
	}
	acked := 1
	var err error
	for ; acked < 1000 && err == nil; acked++ {
		err = s.Record(0, aProbe(acked, 2))
	}
	acked-- // the last Record failed
	if err == nil || !strings.Contains(err.Error(), "full") && !strings.Contains(err.Error(), "no space left") {
		t.Fatalf("Record = %v, want that the disk is full", err)
	}
	wantError(t, err, dir)
	wantError(t, s.SetState(Failed, "full"), "set the study's state", "not usable")
	if err = s.Close(); !errors.Is(err, unix.ENOSPC) { // Close writes to the fence, which may fail on a full disk
		try(t, err)
	}
	try(t, os.Remove(ballast))

	s = open(t, dir)
	study, err := s.Study()
	try(t, err)
	if got := len(study.Trials[0].Probes); got < acked || got > acked+1 {
		t.Errorf("%d probes are stored, want the %d acknowledged ones and at most one more", got, acked)
	}
}

// Open copies a study that it resumes. If there is no space for the copy, it returns an error before it writes a file.
func TestNoSpaceForTheCopy(t *testing.T) {
	disk := smallDisk(t, 134)
	dir := filepath.Join(disk, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Close())
	epochs, err := filepath.Glob(filepath.Join(dir, "e*", "study.db"))
	try(t, err, os.Truncate(epochs[0], 100<<20)) // makes a sparse file, which takes no space on the disk
	for _, err := range []error{errorOf(ExamineDisk(dir)), second(Open(context.Background(), dir, llama, Options{}))} {
		wantUnusable(t, err, dir+" has only", "MiB free", "this study, whose database and snapshot are copied when it goes on, needs 164.1 MiB", "--root")
	}
	try(t, errorOf(ExamineDisk(filepath.Join(disk, "qwen"))))
	try(t, os.WriteFile(filepath.Join(disk, "ballast"), make([]byte, 132<<20), 0o644))
	if err := os.WriteFile(filepath.Join(disk, "rest"), make([]byte, 8<<20), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("WriteFile = %v, want a full disk", err)
	}
	wantUnusable(t, errorOf(ExamineDisk(filepath.Join(disk, "qwen"))), disk+" has only", "a study needs 64 MiB")
}

func second(_ *Store, _ bool, err error) error { return err }

// If a directory does not exist, ownerHint names the owner of the nearest parent.
func TestOwnerHint(t *testing.T) {
	root := t.TempDir()
	err := ownerHint(os.ErrPermission, filepath.Join(root, "pp", "llama70b"))
	if want := "; " + root + " belongs to "; !strings.HasPrefix(err, want) {
		t.Errorf("ownerHint = %q, want %q", err, want)
	}
	if text := ownerHint(os.ErrNotExist, root); text != "" {
		t.Errorf("ownerHint = %q for an error that is not about rights, want none", text)
	}
}

// A link to nothing cannot hold a study, and neither can a directory below it.
func TestLinkToNothing(t *testing.T) {
	root := t.TempDir()
	link := filepath.Join(root, "llama70b")
	try(t, os.Symlink("nowhere", link))
	for _, err := range []error{errorOf(ExamineDisk(link)), errorOf(ExamineDisk(filepath.Join(link, "below"))), second(Open(context.Background(), link, llama, Options{}))} {
		wantUnusable(t, err, link+" is a link to nowhere, which does not exist; remove the link, or make that directory")
	}
	try(t, os.Mkdir(filepath.Join(root, "nowhere"), 0o755), errorOf(ExamineDisk(link)))
}

// slowWarning returns a warning only if a small write takes longer than slowCommit.
func TestSlowDisk(t *testing.T) {
	if got := slowWarning(200 * time.Millisecond); got != nil {
		t.Errorf("slowWarning = %q for a fast write, want none", got)
	}
	if got := slowWarning(312 * time.Millisecond); len(got) != 1 || !strings.Contains(got[0], "a small write takes 312 ms") || !strings.Contains(got[0], "at most 200 ms") {
		t.Errorf("slowWarning = %q", got)
	}
}
