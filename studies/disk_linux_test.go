package studies

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// small mounts a disk of so many MiB.
func small(t *testing.T, mib int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", mib)); err != nil {
		t.Skipf("a small disk needs the right to mount: %v", err)
	}
	t.Cleanup(func() { try(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func TestTooLittleSpaceIsFoundBeforeAnythingElse(t *testing.T) {
	disk := small(t, 8)
	_, _, err := Open(context.Background(), filepath.Join(disk, "llama70b"), llama, Options{})
	wantError(t, err, "open study llama70b", disk, "MiB) free", "needs 64 MiB", "--root")
	wantError(t, examineError(filepath.Join(disk, "not", "there", "yet")), disk+" has only", "needs 64 MiB")
	if isStudy(filepath.Join(disk, "llama70b")) {
		t.Error("a study was begun")
	}
}

func TestReadOnlyDisk(t *testing.T) {
	disk := small(t, 80)
	dir := filepath.Join(disk, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Close(), unix.Mount("", disk, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	study, err := ReadSnapshot(dir)
	try(t, err)
	if len(study.Trials) != 1 {
		t.Errorf("%d trials, want 1", len(study.Trials))
	}
	_, _, err = Open(context.Background(), dir, llama, Options{})
	wantError(t, err, "open study llama70b", "cannot be written", "read-only file system")
	wantError(t, examineError(filepath.Join(disk, "qwen")), disk+" cannot be written", "read-only file system")
}

// A disk that fills up in mid-study breaks the store with a clear error and loses nothing that was acknowledged.
func TestDiskFillsUp(t *testing.T) {
	disk := small(t, 70)
	dir := filepath.Join(disk, "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
	ballast := filepath.Join(disk, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 80<<20), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	acked := 1
	var err error
	for ; acked < 1000 && err == nil; acked++ {
		err = s.Record(0, aProbe(acked, 2))
	}
	acked-- // the last one failed
	if err == nil || !strings.Contains(err.Error(), "full") && !strings.Contains(err.Error(), "no space left") {
		t.Fatalf("error %v does not say that the disk is full", err)
	}
	wantError(t, err, dir)
	wantError(t, s.SetState(Failed, "full"), "set the study's state", "not usable")
	try(t, s.Close(), os.Remove(ballast))

	s = open(t, dir)
	study, err := s.Study()
	try(t, err)
	if got := len(study.Trials[0].Probes); got < acked || got > acked+1 {
		t.Errorf("%d probes are stored, %d were acknowledged", got, acked)
	}
}
