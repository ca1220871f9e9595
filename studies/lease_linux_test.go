package studies

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/studies/fence"
)

// Another process may hold a lease on a file (fcntl F_SETLEASE), as an NFS server does for its clients. Opening the
// file then waits until that process releases the lease.
func TestALeaseIsWaitedFor(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	try(t, os.WriteFile(path, []byte("content"), 0o644))
	folder, err := fence.OpenFolder(dir, fence.CertainLocks)
	try(t, err)
	for name, open := range map[string]func() error{
		"a snapshot": func() error {
			f, err := openRegular(path)
			if err == nil {
				err = f.Close()
			}
			return err
		},
		"a slot": func() error {
			f, err := folder.Open("a")
			if err == nil {
				err = f.Close()
			}
			return err
		},
	} {
		holder, err := os.OpenFile(path, os.O_RDWR, 0)
		try(t, err)
		if _, err := unix.FcntlInt(holder.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
			t.Skipf("this file system has no leases: %v", err)
		}
		released := make(chan error)
		go func() {
			// The kernel breaks the lease when another open wants the file (F_GETLEASE in fcntl(2)).
			for begin := time.Now(); time.Since(begin) < 45*time.Second; time.Sleep(5 * time.Millisecond) {
				if kind, err := unix.FcntlInt(holder.Fd(), unix.F_GETLEASE, 0); err != nil || kind != unix.F_WRLCK {
					break
				}
			}
			_, err := unix.FcntlInt(holder.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
			released <- err
		}()
		if err := open(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		try(t, <-released, holder.Close())
	}
	try(t, folder.Close())
}
