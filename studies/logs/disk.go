package logs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"vllmtuner/studies/rights"
)

// retryAfter is the pause after a disk error, because each attempt may take long when the file server is lost.
const retryAfter = time.Second

// A disk writes the log of one trial: first a file for the beginning, the head, and then numbered parts. Only one
// goroutine uses it. It never calls fsync, so a power cut loses the last seconds of a log. An NFS client sends all data
// to the server when a file is closed.
type disk struct {
	limits
	dir   string // the study's directory
	trial int

	root  *os.Root // the folder; nil before it is opened, and after an error
	file  *os.File // the newest file; nil before it is opened, and after an error
	part  int      // number of the newest file; 0 is the head
	size  int64    // size of the newest file in bytes
	torn  bool     // the last line of the newest file has no line break
	known bool     // the method open has checked whether an earlier run left files
	again bool     // an earlier run left files, and the log does not yet say so

	cause   error     // error of the last attempt to write; nil when it succeeded
	retry   time.Time // the next attempt
	missing int64     // left-out bytes that the log does not mention yet
	lost    int64     // number of all left-out bytes so far
	first   error     // the first disk error; nil if there was none

	closeErr error // error from closing the last file
}

func (d *disk) path() string { return filepath.Join(d.dir, folder) }

// write writes lines to the disk. Bytes that it cannot write count as left out. The caller has already left out some
// bytes after these lines; dropped is their number. If isLast is true, write tries even during the pause after an
// error.
func (d *disk) write(lines []byte, dropped int64, isLast bool) {
	n := 0
	if isLast || d.cause == nil || !time.Now().Before(d.retry) {
		var err error
		if n, err = d.put(lines); err != nil {
			d.fail(err)
		}
	}
	dropped += int64(len(lines) - n)
	d.missing += dropped
	d.lost += dropped
}

// put opens the log if necessary. It first adds the tuner's own lines, if there are any, and then the server's lines.
// It returns how many bytes of the server's lines it wrote.
func (d *disk) put(lines []byte) (int, error) {
	if err := d.open(); err != nil {
		return 0, err
	}
	if d.again {
		if err := d.note(fmt.Sprintf("=== trial %d is run again: %s ===\n", d.trial, time.Now().Format(time.RFC3339))); err != nil {
			return 0, err
		}
		d.again = false
	}
	if d.missing > 0 {
		if err := d.note(leftOut(d.missing, cmp.Or(d.cause, errSlow))); err != nil {
			return 0, err
		}
		d.missing = 0
	}
	d.cause = nil
	return d.add(lines)
}

// fail delays the next attempt. That attempt opens the files again, because the handles may be stale.
func (d *disk) fail(err error) {
	d.cause, d.retry = err, time.Now().Add(retryAfter)
	if d.first == nil {
		d.first = err
	}
	if d.file != nil {
		_ = d.file.Close() // the error in err says more than the error of Close
		d.file = nil
	}
	d.closeRoot()
}

// open opens the newest file of the log.
func (d *disk) open() error {
	if d.file != nil {
		return nil
	}
	if d.root == nil {
		if err := os.MkdirAll(d.path(), rights.Dir(filepath.Dir(d.path()))); err != nil {
			return err
		}
		root, err := os.OpenRoot(d.path())
		if err != nil {
			return err
		}
		d.root = root
	}
	parts, err := partNumbers(d.root, d.trial)
	if err != nil {
		return err
	}
	newest := 0
	if len(parts) > 0 {
		newest = parts[len(parts)-1]
	}
	part, size := d.part, d.size
	if err := d.openPart(newest); err != nil {
		return err
	}
	if lost := size - d.size; lost > 0 && newest == part { // NFS may lose written bytes and report that only later
		d.missing += lost
		d.lost += lost
	}
	if !d.known {
		d.known, d.again = true, d.size > 0 || d.part > 0
	}
	return nil
}

// openPart opens a file to append to it. It reads the last byte, which shows whether the last line is complete.
func (d *disk) openPart(part int) error {
	f, err := d.root.OpenFile(fileName(d.trial, part), os.O_RDWR|os.O_APPEND|os.O_CREATE, rights.File(d.path()))
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	end := []byte{'\n'}
	if info.Size() > 0 {
		if _, err := f.ReadAt(end, info.Size()-1); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	d.file, d.part, d.size, d.torn = f, part, info.Size(), end[0] != '\n'
	return nil
}

// note adds a line that the tuner itself writes. If the last line is incomplete, it begins a new one first.
func (d *disk) note(line string) error {
	if d.torn {
		line = "\n" + line
	}
	_, err := d.add([]byte(line))
	return err
}

// add appends text to the log. When the current file is full, it continues in a new one. It returns the number of bytes
// written.
func (d *disk) add(text []byte) (n int, err error) {
	for len(text) > 0 {
		fits := d.fits(text)
		if fits == 0 {
			if err := d.next(); err != nil {
				return n, err
			}
			continue
		}
		m, err := d.file.Write(text[:fits])
		if m > 0 {
			d.torn = text[m-1] != '\n'
		}
		n, d.size, text = n+m, d.size+int64(m), text[m:]
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// fits returns how many bytes of the text go into the current file. The bytes are complete lines, unless a line is
// longer than a file.
func (d *disk) fits(text []byte) int {
	room := d.limits.part - d.size
	if d.part == 0 {
		room = d.head - d.size
	}
	switch {
	case int64(len(text)) <= room:
		return len(text)
	case room <= 0: // room is negative if an older tuner wrote the log, without a size limit
		return 0
	}
	whole := bytes.LastIndexByte(text[:room], '\n') + 1
	if whole == 0 && d.size == 0 {
		return int(room)
	}
	return whole
}

// next begins a new part. It deletes the oldest part first, so that the log never exceeds its size limit.
func (d *disk) next() error {
	err := d.file.Close()
	d.file = nil
	if err != nil {
		return err // on NFS, Close may return the error of an earlier write
	}
	if oldest := d.part + 1 - d.parts; oldest > 0 {
		if err := d.root.Remove(fileName(d.trial, oldest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return d.openPart(d.part + 1)
}

// close closes the open file and folder.
func (d *disk) close() {
	if d.file != nil {
		d.closeErr = d.file.Close()
	}
	d.closeRoot()
}

func (d *disk) closeRoot() {
	if d.root != nil {
		_ = d.root.Close() // no data was written through it
		d.root = nil
	}
}
