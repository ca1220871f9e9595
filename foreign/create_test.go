package foreign

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// A new file has the given rights, less the rights that the umask takes away.
func TestCreateHonoursTheUmask(t *testing.T) {
	path := filepath.Join(t.TempDir(), "one.csv")
	was := unix.Umask(0o077)
	err := Create(path, 0o640, false, func(temp string) error { return os.WriteFile(temp, []byte("text"), 0o644) })
	unix.Umask(was)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 || info.Size() != 4 {
		t.Errorf("the file is %v, %v; want -rw------- with 4 bytes", info, err)
	}
}

// On a file system without links, rename works too and replaces no file.
func TestRenameWithoutLinks(t *testing.T) {
	for _, errno := range []error{unix.EPERM, unix.ENOTSUP, unix.ENOSYS, nil} {
		dir := t.TempDir()
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		link := func(from, to string) error {
			if errno == nil {
				return os.Link(from, to)
			}
			return &os.LinkError{Op: "link", Old: from, New: to, Err: errno}
		}
		for _, text := range []string{"first", "second"} {
			if err := os.WriteFile(from, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := rename(from, to, 0o640, link); (text == "second") != errors.Is(err, fs.ErrExist) {
				t.Errorf("%v: the %s file: %v", errno, text, err)
			}
			if err := os.Remove(from); err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
		}
		if content, err := os.ReadFile(to); err != nil || string(content) != "first" {
			t.Errorf("%v: the file has %q, %v", errno, content, err)
		}
	}
}
