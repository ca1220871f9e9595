package workload

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// maxRow is the longest row of a file: several times the text of the longest context that models have. A file that is no
// file of rows must not fill the memory.
const maxRow = 16 << 20

var errTooLong = fmt.Errorf("is longer than %d MiB: no model takes so long a prompt", maxRow>>20)

// badRows says what to do with rows that cannot be read: the first is an error, or all are counted and left out.
type badRows struct {
	skip  bool
	n     int
	first error // of the rows that were left out
}

// add takes note of a bad row. It returns the error that ends the reading, or nil when the row is left out.
func (b *badRows) add(err error) error {
	if !b.skip {
		return fmt.Errorf("%w; or skip bad rows (skip_bad_rows, --skip-bad-rows)", err)
	}
	if b.n++; b.first == nil {
		b.first = err
	}
	return nil
}

// note is what a source's name says of its bad rows.
func (b *badRows) note() string {
	if b.n == 0 {
		return ""
	}
	return fmt.Sprintf("%d bad rows skipped", b.n)
}

// none is the error of a file without a usable row.
func (b *badRows) none() error {
	if b.n == 0 {
		return errEmpty
	}
	return fmt.Errorf("all %d rows are bad, the first: %w", b.n, b.first)
}

// Skipped returns how many rows of the source's file could not be read and were left out, and what was wrong with the first.
func Skipped(source Source) (n int, first error) {
	switch s := source.(type) {
	case *finite:
		return s.bad.n, s.bad.first
	case *live:
		return s.bad.n, s.bad.first
	}
	return 0, nil
}

var errEmpty = errors.New("the file is empty")

// A lineReader reads a file of one row a line.
type lineReader struct {
	in     *bufio.Reader
	number int // of the line that was read last, from 1 on
	long   []byte
}

func newLineReader(in io.Reader) *lineReader { return &lineReader{in: bufio.NewReaderSize(in, 1<<16)} }

// next returns the next line that is not blank, without white space around it, until the next call. The error is io.EOF at
// the end, and errTooLong for a line that it has passed over.
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

// each gives every line to read, whose errors are bad rows. Lines count from 1.
func (l *lineReader) each(bad *badRows, read func(text []byte) error) error {
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
		if err != nil {
			if err := bad.add(fmt.Errorf("line %d: %w", l.number, err)); err != nil {
				return err
			}
		}
	}
}

// A bounded hands on what it reads up to a number of bytes that is set anew in front of each row.
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
