package fence

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A pipe or directory in place of a file is an error. No call waits for it.
func TestAFolderOpensOnlyFiles(t *testing.T) {
	dir := t.TempDir()
	f, err := OpenFolder(dir, CertainLocks)
	try(t, err)
	for name, make := range map[string]func(path string) error{
		"pipe":      func(path string) error { return unix.Mkfifo(path, 0o644) },
		"directory": func(path string) error { return os.Mkdir(path, 0o755) },
	} {
		try(t, make(filepath.Join(dir, name)))
		for call, do := range map[string]func() error{
			"Open": func() error {
				file, err := f.Open(name)
				if err == nil {
					err = file.Close()
				}
				return err
			},
			"Write": func() error { return f.Write(name, strings.NewReader("text")) },
			"Locked": func() error { // a pipe or a directory counts as not locked
				held, err := f.Locked(name)
				if !held && err == nil {
					err = fs.ErrNotExist
				}
				return err
			},
			"Lock": func() error {
				lock, err := f.Lock(name)
				if err == nil {
					err = lock.Close()
				}
				return err
			},
		} {
			failsSoon(t, call+" of a "+name, func() bool { return do() != nil })
		}
	}
	failsSoon(t, "List of a pipe", func() bool { _, err := f.List("pipe"); return err != nil })
	failsSoon(t, "Sync of a pipe", func() bool { return f.Sync("pipe") != nil })
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

// failsSoon checks that a call fails, and does not hang.
func failsSoon(t *testing.T, what string, fails func() bool) {
	t.Helper()
	done := make(chan bool, 1)
	go func() { done <- fails() }()
	select {
	case failed := <-done:
		if !failed {
			t.Errorf("%s succeeds, want an error", what)
		}
	case <-time.After(45 * time.Second):
		t.Fatalf("%s does not return within 45 s", what)
	}
}
