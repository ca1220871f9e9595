// Package logs keeps the log of each trial's server on disk, bounded in size. It always keeps the beginning and the end
// of a log, and keeps the middle while there is room. It never interprets a line.
package logs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// folder is the name of the directory for logs in a study's directory.
const folder = "logs"

// limits has the size limits of one trial's log, and times to wait.
type limits struct {
	head  int64 // maximum bytes of the first file, which holds the beginning
	part  int64 // maximum bytes of each later file
	parts int   // number of parts to keep; older parts are deleted

	patience time.Duration // how long a Write waits for a slow disk
	closing  time.Duration // how long Close waits for a slow disk
	follow   time.Duration // how often a follower looks for new lines; a Writer writes at least once a second
}

// ordinaryLimits are the limits of every log outside tests: 16 MiB for each trial. The head has room for the longest
// start-up in debug mode, with the server's configuration. The parts hold the end of the log. The oldest part is
// deleted before a new one begins, so the parts have the last 6 to 8 MiB.
var ordinaryLimits = limits{
	head: 8 << 20, part: 2 << 20, parts: 4,
	patience: time.Second, closing: 10 * time.Second, follow: 250 * time.Millisecond,
}

// fileName returns the name of a part; part 0 is the head. Callers open it in an os.Root, so that even a link cannot
// lead out of the folder.
func fileName(trial, part int) string {
	name := fmt.Sprintf("trial-%04d.log", trial)
	if part > 0 {
		name += "." + strconv.Itoa(part)
	}
	return name
}

// partNumbers returns the sorted numbers of the parts of a trial's log that exist now. The first part is number 1, and
// no number is used twice.
func partNumbers(root *os.Root, trial int) ([]int, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(-1)
	if err := errors.Join(err, dir.Close()); err != nil {
		return nil, err
	}
	var parts []int
	for _, name := range names {
		text, ok := strings.CutPrefix(name, fileName(trial, 0)+".")
		if n, err := strconv.Atoi(text); ok && err == nil && n > 0 && name == fileName(trial, n) {
			parts = append(parts, n)
		}
	}
	slices.Sort(parts)
	return parts, nil
}

// Name returns the path of the head of a trial's log, relative to the study's directory. A long log continues in files
// with .1, .2, … after this name.
func Name(trial int) string { return folder + "/" + fileName(trial, 0) }

// reason returns the text of a disk error without the log's path.
func reason(err error) string {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Err.Error()
	}
	return err.Error()
}
