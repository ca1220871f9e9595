// Package rights says with which rights the files of a study are made. It makes none.
package rights

import (
	"io/fs"
	"os"
)

// File is for a file in a directory, less what the umask takes: the user and his group may read it, for logs and study files
// tell of a company's models and traffic. A directory with the setgid bit, which those made in it inherit, is shared: its
// group may write too.
func File(dir string) fs.FileMode {
	if shared(dir) {
		return 0o660
	}
	return 0o640
}

// Dir is likewise for a directory that is made in another one.
func Dir(parent string) fs.FileMode {
	if shared(parent) {
		return 0o770
	}
	return 0o750
}

func shared(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&fs.ModeSetgid != 0 // what is wrong with it is said by whoever makes something there
}
