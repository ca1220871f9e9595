// Package logs keeps the full log of each trial's server on disk, bounded in size: its beginning and its end always, and
// what lies between as long as there is room. It never understands what a line says.
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

// folder holds the logs in a study's directory.
const folder = "logs"

// limits bound one trial's log on disk, and the waits for it.
type limits struct {
	head  int64 // bytes of the first file, which holds the beginning
	part  int64 // bytes of each file after it
	parts int   // so many of them are kept, the newest

	patience time.Duration // that a Write has with a disk that does not keep up, once in each of its halts
	closing  time.Duration // that Close has with it
	follow   time.Duration // between two looks of a follower; a Writer writes at least each second
}

// ordinary is 16 MiB a trial. The head holds the start with its configuration, whose log in debug mode is the longest that
// is read as a whole; the parts hold the last words. The oldest part is deleted before a new one is begun, so between 6
// and 8 MiB of the end are there.
var ordinary = limits{
	head: 8 << 20, part: 2 << 20, parts: 4,
	patience: time.Second, closing: 10 * time.Second, follow: 250 * time.Millisecond,
}

// fileName is the head's for part 0. Names are made of numbers alone and used through an os.Root, so nothing outside the
// folder can be reached, also not by a link in it.
func fileName(trial, part int) string {
	name := fmt.Sprintf("trial-%04d.log", trial)
	if part > 0 {
		name += "." + strconv.Itoa(part)
	}
	return name
}

// partNumbers returns the numbers of the parts that a trial's log has, sorted. They count up from 1 and are never used again.
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

// Name is where the head of a trial's log is, in the study's directory. The newest parts of a long one lie beside it, as Name.1 and so on.
func Name(trial int) string { return folder + "/" + fileName(trial, 0) }

func checkNumber(trial int) error {
	if trial < 0 {
		return fmt.Errorf("log of trial %d: trials count from 0", trial)
	}
	return nil
}

// bytesText writes a number of bytes as people say it, such as 1.2 GB.
func bytesText(n int64) string {
	if n < 1000 {
		return fmt.Sprintf("%d bytes", n)
	}
	v, units := float64(n)/1e3, "kMGTPE"
	for ; v >= 999.5; v /= 1e3 {
		units = units[1:]
	}
	digits := 0
	if v < 9.95 {
		digits = 1
	}
	return fmt.Sprintf("%.*f %cB", digits, v, units[0])
}

// reason is the heart of an error of the disk: the path is that of the file which the reason is written to.
func reason(err error) string {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Err.Error()
	}
	return err.Error()
}
