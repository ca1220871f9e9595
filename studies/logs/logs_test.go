package logs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// small is a set of limits that a test reaches quickly.
var small = limits{
	head: 4000, part: 1000, parts: 4,
	patience: time.Second, closing: time.Minute, follow: 10 * time.Millisecond,
}

// try ends the test if any of the errors is not nil.
func try(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// line returns the i-th line of a test's log. The lines have different lengths.
func line(i int) string { return fmt.Sprintf("line %06d %s\n", i, strings.Repeat("x", i%17)) }

// writeLines writes lines to a log. The first line has the number from, and the last line has the number to-1.
func writeLines(t testing.TB, dir string, trial int, l limits, from, to int) {
	t.Helper()
	w := create(dir, trial, l)
	for i := from; i < to; i++ {
		_, err := io.WriteString(w, line(i))
		try(t, err)
	}
	try(t, w.Close())
}

// read returns a log as a Reader reads it.
func read(t testing.TB, dir string, trial int, l limits) string {
	t.Helper()
	r, err := open(dir, trial, l)
	try(t, err)
	text, err := io.ReadAll(r)
	try(t, err, r.Close())
	return string(text)
}

// files returns the sorted names of a study's log files, and their total size.
func files(t testing.TB, dir string) (names []string, size int64) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, folder))
	try(t, err)
	for _, e := range entries {
		info, err := e.Info()
		try(t, err)
		names, size = append(names, e.Name()), size+info.Size()
	}
	return names, size
}

// runs shortens a text. It returns each series of consecutive test lines as "first-last", and all other lines as they
// are.
func runs(t testing.TB, text string) []string {
	t.Helper()
	var found []string
	first, last := 0, -1
	end := func() {
		if last >= 0 {
			found = append(found, fmt.Sprintf("%d-%d", first, last))
		}
		last = -1
	}
	for text := range strings.Lines(text) {
		var i int
		if _, err := fmt.Sscanf(text, "line %d ", &i); err != nil {
			end()
			found = append(found, strings.TrimSuffix(text, "\n"))
			continue
		}
		if text != line(i) {
			t.Fatalf("line %d is %q, want %q", i, text, line(i))
		}
		if last < 0 || i != last+1 {
			end()
			first = i
		}
		last = i
	}
	end()
	return found
}

func TestAShortLogIsOneFile(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 3, small, 0, 100)
	if names, _ := files(t, dir); !slices.Equal(names, []string{"trial-0003.log"}) {
		t.Errorf("the files are %q, want trial-0003.log alone", names)
	}
	if got := runs(t, read(t, dir, 3, small)); !slices.Equal(got, []string{"0-99"}) {
		t.Errorf("read %q, want lines 0-99", got)
	}
}

func TestALongLogKeepsItsBeginningAndItsEnd(t *testing.T) {
	dir := t.TempDir()
	const lines = 20_000
	writeLines(t, dir, 12345, small, 0, lines)
	total := 0
	for i := range lines {
		total += len(line(i))
	}
	names, size := files(t, dir)
	if size > small.head+int64(small.parts)*small.part || len(names) != 1+small.parts {
		t.Errorf("the files %q have %d bytes, want a head and 4 parts with at most 8000", names, size)
	}
	text := read(t, dir, 12345, small)
	got := runs(t, text)
	if len(got) != 3 || !strings.HasPrefix(got[0], "0-") || !strings.HasSuffix(got[2], fmt.Sprintf("-%d", lines-1)) {
		t.Fatalf("read %q, want the first lines, a line about left-out bytes, and the last lines", got)
	}
	head, err := os.Stat(filepath.Join(dir, folder, "trial-12345.log"))
	try(t, err)
	if head.Size() < small.head-100 {
		t.Errorf("the head has %d bytes, want nearly %d", head.Size(), small.head)
	}
	var said float64
	if _, err := fmt.Sscanf(got[1], "… about %f KiB left out …", &said); err != nil {
		t.Fatalf("%q: %v", got[1], err)
	}
	if left := float64(total-int(size)) / 1024; said < left*0.98 || said > left*1.05 {
		t.Errorf("the log says that %g KiB were left out, want about %g KiB", said, left)
	}
}

func TestALogThatIsJustFullHasNoPart(t *testing.T) {
	dir := t.TempDir()
	w := create(dir, 0, small)
	for range 40 {
		_, err := io.WriteString(w, strings.Repeat("a", 99)+"\n")
		try(t, err)
	}
	try(t, w.Close())
	if names, size := files(t, dir); len(names) != 1 || size != small.head {
		t.Errorf("the files %q have %d bytes, want one file with %d", names, size, small.head)
	}
}

// Lines without a line break, and very long lines, are stored completely.
func TestUnusualLines(t *testing.T) {
	for _, row := range []struct {
		name   string
		limits limits
		pieces []string
	}{
		{"a last line without a break", small, []string{"a\n", "b"}},
		{"a line in pieces", small, []string{"a", "b", "c\nd", "\n"}},
		{"a line longer than a part", small, []string{strings.Repeat("a", 3990) + "\n", strings.Repeat("b", 2500), "\nc\n"}},
		{"a line longer than the head", small, []string{strings.Repeat("b", 5500), "\nc\n"}},
		{"a line longer than maxPending", ordinaryLimits, slices.Repeat([]string{strings.Repeat("z", 1000)}, 3*maxPending/1000)},
		{"nothing", small, nil},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := t.TempDir()
			w := create(dir, 0, row.limits)
			for _, piece := range row.pieces {
				_, err := io.WriteString(w, piece)
				try(t, err)
			}
			try(t, w.Close())
			if got, want := read(t, dir, 0, row.limits), strings.Join(row.pieces, ""); got != want {
				t.Errorf("read %d bytes, want the %d bytes that were written: %.100q", len(got), len(want), got)
			}
		})
	}
}

func TestARepeatedTrialAppendsToItsLog(t *testing.T) {
	again := regexp.MustCompile(`^=== trial 7 is run again: \d{4}-\d\d-\d\dT[\d:]+.* ===$`)
	dir := t.TempDir()
	writeLines(t, dir, 7, small, 0, 10)
	head := filepath.Join(dir, folder, "trial-0007.log")
	text, err := os.ReadFile(head)
	try(t, err, os.WriteFile(head, append(text, "a torn li"...), 0o644)) // as if the writer of this log was killed
	writeLines(t, dir, 7, small, 10, 20)
	got := runs(t, read(t, dir, 7, small))
	if len(got) != 4 || got[0] != "0-9" || got[1] != "a torn li" || !again.MatchString(got[2]) || got[3] != "10-19" {
		t.Errorf("read %q, want 0-9, a torn line, a line about the repetition, and 10-19", got)
	}

	writeLines(t, dir, 7, small, 20, 1000)
	writeLines(t, dir, 7, small, 1000, 1010) // appends to the newest part
	names, size := files(t, dir)
	if size > 8000 || len(names) != 5 {
		t.Errorf("the files %q have %d bytes, want 5 files with at most 8000", names, size)
	}
	got = runs(t, read(t, dir, 7, small))
	n := len(got)
	if !strings.HasSuffix(got[n-3], "-999") || !again.MatchString(got[n-2]) || got[n-1] != "1000-1009" {
		t.Errorf("read %q, want …-999, a line about the repetition, and 1000-1009", got)
	}
}

// An older tuner wrote logs without a size limit. Such a log is kept completely, and new lines go to parts.
func TestALogWithoutBounds(t *testing.T) {
	dir := t.TempDir()
	var old bytes.Buffer
	for i := range 1000 {
		old.WriteString(line(i))
	}
	try(t, os.Mkdir(filepath.Join(dir, folder), 0o755),
		os.WriteFile(filepath.Join(dir, folder, "trial-0000.log"), old.Bytes(), 0o644))
	writeLines(t, dir, 0, small, 1000, 1010)
	got := runs(t, read(t, dir, 0, small))
	if len(got) != 3 || got[0] != "0-999" || got[2] != "1000-1009" {
		t.Errorf("read %q, want 0-999, a line about the repetition, and 1000-1009", got)
	}
}

func TestTailIsTheLastLines(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 100)   // one file
	writeLines(t, dir, 1, small, 0, 20000) // a head and several parts
	try(t, os.WriteFile(filepath.Join(dir, folder, "trial-0002.log"), nil, 0o644),
		os.WriteFile(filepath.Join(dir, folder, "trial-0003.log"), []byte("a\n\nlast without end"), 0o644))
	long := runs(t, read(t, dir, 1, small))
	var kept int // number of lines in the parts
	{
		var first, last int
		_, err := fmt.Sscanf(long[2], "%d-%d", &first, &last)
		try(t, err)
		kept = last - first + 1
	}
	for _, row := range []struct {
		name  string
		trial int
		lines int
		want  []string
	}{
		{"the last lines of a short log", 0, 3, []string{"97-99"}},
		{"no line", 0, 0, nil},
		{"more lines than the log has", 0, 1000, []string{"0-99"}},
		{"all lines", 0, 100, []string{"0-99"}},
		{"the last lines of the newest part", 1, 5, []string{"19995-19999"}},
		{"lines of several parts", 1, kept - 1, []string{fmt.Sprintf("%d-19999", 20000-kept+1)}},
		{"all lines of the parts, without a line about left-out bytes", 1, kept, []string{fmt.Sprintf("%d-19999", 20000-kept)}},
		{"a line of the head too: the line about left-out bytes does not count", 1, kept + 1, []string{strings.TrimPrefix(long[0], "0-") + "-" + strings.TrimPrefix(long[0], "0-"), long[1], long[2]}},
		{"an empty log", 2, 5, nil},
		{"a last line without a break counts", 3, 2, []string{"", "last without end"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			r, err := open(dir, row.trial, small)
			try(t, err)
			try(t, r.Tail(row.lines))
			text, err := io.ReadAll(r)
			try(t, err, r.Close())
			if got := runs(t, string(text)); !slices.Equal(got, row.want) {
				t.Errorf("Tail(%d) leaves %q, want %q", row.lines, got, row.want)
			}
		})
	}
}

func TestLastLinesOfLongTexts(t *testing.T) {
	var text strings.Builder
	starts := []int64{}
	for i := 0; text.Len() < 300_000; i++ {
		starts = append(starts, int64(text.Len()))
		text.WriteString(strings.Repeat("y", (i*7919)%50_000) + "\n")
	}
	for n := 1; n <= len(starts); n++ {
		offset, found, err := lastLines(strings.NewReader(text.String()), int64(text.Len()), n)
		if want := starts[len(starts)-n]; err != nil || offset != want || found != n {
			t.Errorf("lastLines(%d) = %d, %d, %v; want %d, %d", n, offset, found, err, want, n)
		}
	}
}

// Open refuses a log that does not exist, and a link out of the folder.
func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(dir, 0); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open without a folder = %v, want fs.ErrNotExist", err)
	}
	writeLines(t, dir, 0, small, 0, 1)
	if _, err := Open(dir, 1); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "log of trial 1 in "+dir) {
		t.Errorf("Open without a file = %v, want fs.ErrNotExist and the directory", err)
	}
	outside := filepath.Join(t.TempDir(), "outside")
	try(t, os.WriteFile(outside, []byte("secret"), 0o644), os.Symlink(outside, filepath.Join(dir, folder, "trial-0002.log")))
	if _, err := Open(dir, 2); err == nil {
		t.Error("Open follows a link out of the folder")
	}
}

// Tail and Follow return ErrNoLog for a pipe in the place of a log, and do not wait for it.
func TestAPipeIsNoLog(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 1)
	r, err := Open(dir, 0)
	try(t, err)
	defer r.Close()
	head := filepath.Join(dir, Name(0))
	try(t, os.Remove(head), syscall.Mkfifo(head, 0o644))
	ended := make(chan error, 2)
	go func() {
		ended <- r.Follow(t.Context(), io.Discard, nil)
		ended <- r.Tail(1)
	}()
	for _, what := range []string{"Follow", "Tail"} {
		select {
		case err := <-ended:
			if !errors.Is(err, ErrNoLog) {
				t.Errorf("%s = %v, want ErrNoLog", what, err)
			}
		case <-time.After(45 * time.Second):
			t.Fatalf("%s still waits for the pipe after 45 s", what)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	w := Create(b.TempDir(), 0)
	text := []byte("(EngineCore_DP0 pid=17325) INFO 11-20 21:23:37 [core.py:97] Initializing a V1 LLM engine (v0.14.1) with config\n")
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		if _, err := w.Write(text); err != nil {
			b.Fatal(err)
		}
	}
	try(b, w.Close())
}
