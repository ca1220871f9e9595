package logs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"vllmtuner/render"
)

// A Reader reads the log of one trial: its beginning, a line that says how many bytes were left out, and its end. It
// may read while the Writer writes, also on another machine. If parts are deleted before a slow Reader reaches them,
// the Reader adds a line that says how many bytes they had.
type Reader struct {
	limits
	trial int
	root  *os.Root
	file  *os.File
	part  int    // number of the file; 0 is the head
	note  []byte // text that Read returns before the rest of the file
	torn  bool   // the last byte that was read is not a line break
	whole bool   // the next part has begun, so this file no longer grows
}

// Open opens the log of a trial in dir/logs, where dir is the study's directory. If there is no log, the error wraps
// fs.ErrNotExist.
func Open(dir string, trial int) (*Reader, error) { return open(dir, trial, ordinaryLimits) }

func open(dir string, trial int, l limits) (*Reader, error) {
	path := filepath.Join(dir, folder)
	info, err := os.Stat(path)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is not a directory: %w", path, ErrNoLog)
	}
	var root *os.Root
	if err == nil {
		root, err = os.OpenRoot(path)
	}
	if err != nil {
		return nil, fmt.Errorf("log of trial %d: %w", trial, err)
	}
	r := &Reader{limits: l, trial: trial, root: root}
	if r.file, err = openLog(root, fileName(trial, 0)); err != nil {
		return nil, errors.Join(fmt.Errorf("log of trial %d in %s: %w", trial, root.Name(), err), root.Close())
	}
	return r, nil
}

// ErrNoLog says that a log is not a regular file, or that the logs' directory is not a directory.
var ErrNoLog = errors.New("the tuner did not write it; move it to another place")

// openLog opens a regular file and refuses anything else: opening a pipe would block.
func openLog(root *os.Root, name string) (*os.File, error) {
	info, err := root.Stat(name)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: %w", name, ErrNoLog)
	}
	if err != nil {
		return nil, err
	}
	return root.Open(name)
}

// Read returns io.EOF at the present end of the log. A later Read may find more.
func (r *Reader) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	for {
		if len(r.note) > 0 {
			n := copy(b, r.note)
			r.note = r.note[n:]
			return n, nil
		}
		n, err := r.file.Read(b)
		if n > 0 {
			r.torn = b[n-1] != '\n'
			return n, nil
		}
		if err != nil && err != io.EOF && !errors.Is(err, syscall.ESTALE) { // ESTALE: another machine deleted the file on NFS
			return 0, fmt.Errorf("log of trial %d: %w", r.trial, err)
		}
		if err := r.advance(); err != nil {
			return 0, err
		}
	}
}

// advance looks for more text to read, in this file or the next one. It returns io.EOF when there is none at present.
func (r *Reader) advance() error {
	parts, err := partNumbers(r.root, r.trial)
	if err != nil {
		return fmt.Errorf("log of trial %d: %w", r.trial, err)
	}
	i, _ := slices.BinarySearch(parts, r.part+1)
	if i < len(parts) && !r.whole {
		r.whole = true // this file may have grown after the last read and before the next part began
		return nil
	}
	for _, next := range parts[i:] {
		f, err := openLog(r.root, fileName(r.trial, next))
		if errors.Is(err, fs.ErrNotExist) {
			continue // the file was deleted meanwhile
		}
		if err != nil {
			return fmt.Errorf("log of trial %d: %w", r.trial, err)
		}
		if skipped := next - r.part - 1; skipped > 0 {
			r.leaveOut(int64(skipped) * r.limits.part)
		}
		return r.use(f, next)
	}
	return io.EOF
}

// leaveOut inserts a line that says that about n bytes in deleted parts were left out. The number is nearly exact,
// because a part ends only when the next line does not fit.
func (r *Reader) leaveOut(n int64) {
	if r.torn {
		r.note = append(r.note, '\n')
	}
	r.note = fmt.Appendf(r.note, "… about %s left out …\n", render.Bytes(n))
	r.torn = false
}

// use closes the old file and continues in the file f, which has the part with the given number.
func (r *Reader) use(f *os.File, part int) error {
	old := r.file
	r.file, r.part, r.whole = f, part, false
	return old.Close()
}

// Tail skips everything before the last n lines that the log has now. Lines about left-out parts do not count.
func (r *Reader) Tail(n int) error {
	parts, err := partNumbers(r.root, r.trial)
	if err != nil {
		return fmt.Errorf("log of trial %d: %w", r.trial, err)
	}
	for _, part := range slices.Backward(append([]int{0}, parts...)) {
		found, err := r.tailOf(part, n)
		if errors.Is(err, fs.ErrNotExist) && part > 0 {
			continue // this part was deleted meanwhile, and so are all parts before it
		}
		if err != nil {
			return fmt.Errorf("log of trial %d: %w", r.trial, err)
		}
		if n -= found; n == 0 {
			return nil
		}
	}
	return nil
}

// tailOf opens a part, seeks to its last n lines, and returns n. If the part has fewer lines, it seeks to the beginning
// and returns their number.
func (r *Reader) tailOf(part, n int) (int, error) {
	f, err := openLog(r.root, fileName(r.trial, part))
	if err != nil {
		return 0, err
	}
	if err := r.use(f, part); err != nil {
		return 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	offset, found, err := lastLines(f, info.Size(), n)
	if err != nil {
		return 0, err
	}
	_, err = f.Seek(offset, io.SeekStart)
	return found, err
}

// lastLines returns the offset at which the last n lines of a text begin, and n. If the text has fewer lines, it
// returns 0 and their number.
func lastLines(text io.ReaderAt, size int64, n int) (offset int64, found int, err error) {
	if n == 0 {
		return size, 0, nil
	}
	buffer := make([]byte, 64<<10)
	for end := size; end > 0; {
		begin := max(0, end-int64(len(buffer)))
		block := buffer[:end-begin]
		if _, err := text.ReadAt(block, begin); err != nil {
			return 0, 0, err
		}
		for i := len(block) - 1; i >= 0; i-- {
			after := begin + int64(i) + 1
			if block[i] != '\n' || after == size {
				continue
			}
			if found++; found == n {
				return after, n, nil
			}
		}
		end = begin
	}
	if size > 0 {
		found++ // the first line has no line break before it
	}
	return 0, found, nil
}

// Follow copies the unread log to w, and continues as the log grows. It returns nil when the channel done is closed and
// the whole log is copied. When ctx ends, it returns the cause. If w returns an error, Follow returns that error at
// once.
func (r *Reader) Follow(ctx context.Context, w io.Writer, done <-chan struct{}) error {
	buffer := make([]byte, 64<<10)
	for ended := false; ; {
		n, err := r.Read(buffer)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err == nil:
			if _, err := w.Write(buffer[:n]); err != nil {
				return err
			}
			continue
		case err != io.EOF:
			return err
		case ended:
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-done:
			ended = true // the next round reads the last lines
		case <-time.After(r.follow):
		}
		if err := r.renew(); err != nil {
			return fmt.Errorf("log of trial %d: %w", r.trial, err)
		}
	}
}

// renew reopens the file at the same offset. An NFS client asks the server for a file's size when it opens the file.
// Without a new open, a line from another machine would be seen up to a minute late (nfs(5), close-to-open cache
// consistency, acregmax).
func (r *Reader) renew() error {
	offset, err := r.file.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	f, err := openLog(r.root, fileName(r.trial, r.part))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the file was deleted; the open one can still be read
	}
	if err != nil {
		return err
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		return errors.Join(err, f.Close())
	}
	old := r.file
	r.file = f
	return old.Close()
}

// Close closes the files.
func (r *Reader) Close() error { return errors.Join(r.file.Close(), r.root.Close()) }
