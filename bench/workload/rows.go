package workload

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"vllmtuner/render"
)

// maxRow is the limit on a row of a file, in bytes. It is several times the text of the longest context of any model.
// Without a limit, a file without line breaks would fill the memory.
const maxRow = 16 << 20

var errTooLong = fmt.Errorf("is longer than %s: no model takes such a long prompt", render.Bytes(maxRow))

// badRows counts the rows that cannot be read and are left out. Unless skip is set, the first bad row is an error.
type badRows struct {
	skip  bool
	n     int
	first error // error of the first row that was left out
}

// add counts a bad row. If bad rows are not skipped, it returns an error that ends the reading.
func (b *badRows) add(err error) error {
	if !b.skip {
		return fmt.Errorf("%w; or skip bad rows (skip_bad_rows, --skip-bad-rows)", err)
	}
	if b.n++; b.first == nil {
		b.first = err
	}
	return nil
}

// note returns a note for a source's name that counts the skipped rows, or "" if there are none.
func (b *badRows) note() string {
	if b.n == 0 {
		return ""
	}
	return render.Count(b.n, "bad row") + " skipped"
}

// noUsableRow returns the error for a file without a usable row.
func (b *badRows) noUsableRow() error {
	if b.n == 0 {
		return errEmpty
	}
	if b.n == 1 {
		return fmt.Errorf("the only row is bad: %w", b.first)
	}
	return fmt.Errorf("all %d rows are bad; the first one: %w", b.n, b.first)
}

// Skipped returns how many unreadable rows of the source's file were left out, and the error of the first such row.
func Skipped(source Source) (n int, first error) {
	bad := populationOf(source).bad
	return bad.n, bad.first
}

var errEmpty = errors.New("the file is empty")

// A lineReader reads a file with one row on each line.
type lineReader struct {
	in     *bufio.Reader
	number int // number of the line that was read last, from 1
	long   []byte
}

func newLineReader(in io.Reader) *lineReader { return &lineReader{in: bufio.NewReaderSize(in, 1<<16)} }

// next returns the next line that is not blank, without white space around it. The line is valid until the next call.
// At the end of the file the error is io.EOF. If a line is too long, this method skips it and returns errTooLong.
func (l *lineReader) next() ([]byte, error) {
	for {
		l.number++
		text, err := l.line()
		if l.number == 1 {
			text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) // the byte order mark of files from Windows
		}
		if text = bytes.TrimSpace(text); len(text) > 0 || err != nil {
			return text, err
		}
	}
}

// line returns one line with its end.
func (l *lineReader) line() ([]byte, error) {
	l.long = l.long[:0]
	for tooLong := false; ; {
		part, err := l.in.ReadSlice('\n')
		if err == nil && len(l.long) == 0 && !tooLong {
			return part, nil
		}
		if tooLong = tooLong || len(l.long)+len(part) > maxRow; !tooLong {
			l.long = append(l.long, part...)
		}
		switch {
		case err == bufio.ErrBufferFull:
		case err != nil && err != io.EOF:
			return nil, err
		case tooLong:
			return nil, errTooLong
		case err == io.EOF && len(bytes.TrimSpace(l.long)) == 0:
			return nil, io.EOF
		default:
			return l.long, nil
		}
	}
}

// forEach calls read with every line. If read returns an error for a line, this line is a bad row.
func (l *lineReader) forEach(bad *badRows, read func(text []byte) error) error {
	for {
		text, err := l.next()
		switch {
		case err == io.EOF:
			return nil
		case err == nil:
			err = read(text)
		case err != errTooLong:
			return fmt.Errorf("line %d: %w", l.number, err)
		}
		if err := l.check(bad, err); err != nil {
			return err
		}
	}
}

// check counts the line that was read last as a bad row if err is an error.
func (l *lineReader) check(bad *badRows, err error) error {
	if err == nil {
		return nil
	}
	return bad.add(fmt.Errorf("line %d: %w", l.number, err))
}

// readLines parses every line of a file. A file without a usable line is an error.
func readLines[T any](from io.Reader, bad *badRows, parse func(text []byte) (T, error)) ([]T, error) {
	var all []T
	err := newLineReader(from).forEach(bad, func(text []byte) error {
		one, err := parse(text)
		if err == nil {
			all = append(all, one)
		}
		return err
	})
	if err == nil && len(all) == 0 {
		err = bad.noUsableRow()
	}
	if err != nil {
		return nil, err
	}
	return all, nil
}

// A bounded reader passes on bytes until a limit is reached. The caller sets the limit (the field left) again before
// each row.
type bounded struct {
	in   io.Reader
	left int
}

func (b *bounded) Read(to []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLong
	}
	n, err := b.in.Read(to[:min(len(to), b.left)])
	b.left -= n
	return n, err
}
