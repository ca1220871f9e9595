// Package rights chooses the rights of a study's files. It makes no files.
package rights

import (
	"io/fs"
	"os"
)

// File returns the mode of a new file in a directory, before the umask. User and group may read it, because logs and
// study files tell of a company's models and traffic. A directory with the setgid bit is shared, and its subdirectories
// inherit the bit: its group may write too.
func File(dir string) fs.FileMode {
	if shared(dir) {
		return 0o660
	}
	return 0o640
}

// Dir is File for a new directory.
func Dir(parent string) fs.FileMode {
	if shared(parent) {
		return 0o770
	}
	return 0o750
}

func shared(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&fs.ModeSetgid != 0 // if it cannot be read, making something in it will say why
}
