// Package rights chooses the permissions of a study's files and directories. It creates no file or directory.
package rights

import (
	"io/fs"
	"os"
)

// File returns the mode of a new file in a directory, before the umask. Only the user and the group may read the file,
// because logs and study files tell of a company's models and traffic. A directory with the setgid bit is shared, and
// its subdirectories inherit the bit. In such a directory the group may write too.
func File(dir string) fs.FileMode {
	if shared(dir) {
		return 0o660
	}
	return 0o640
}

// Dir returns the mode of a new directory, by the rules of File.
func Dir(parent string) fs.FileMode {
	if shared(parent) {
		return 0o770
	}
	return 0o750
}

func shared(dir string) bool {
	info, err := os.Stat(dir)
	return err == nil && info.Mode()&fs.ModeSetgid != 0 // if Stat fails, creating the file will fail with the same reason
}
