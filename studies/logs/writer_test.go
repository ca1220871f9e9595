package logs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// TestMain runs the tests. In a child process that a test has started, it writes an endless log instead.
func TestMain(m *testing.M) {
	if dir := os.Getenv("LOGS_ENDLESS"); dir != "" {
		endless(dir)
	}
	os.Exit(m.Run())
}

func endless(dir string) {
	w := create(dir, 0, small)
	for i := 0; ; i++ {
		fmt.Fprint(w, line(i))
		if i == 10_000 {
			for parts := []string(nil); len(parts) == 0; time.Sleep(time.Millisecond) {
				parts, _ = filepath.Glob(filepath.Join(dir, folder, "trial-0000.log.*")) // the pattern is valid
			}
			fmt.Println("a part is on the disk")
		}
	}
}

// Lines are on the disk within a second, or as soon as 64 KiB wait. An incomplete line waits for its end.
func TestALineIsOnTheDiskWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		w := Create(dir, 0)
		_, err := io.WriteString(w, line(0))
		try(t, err)
		time.Sleep(flushEvery)
		synctest.Wait()
		if got := read(t, dir, 0, ordinaryLimits); got != line(0) {
			t.Errorf("after a second the log is %q, want the line", got)
		}
		many := strings.Repeat(line(1), flushAt/len(line(1))+1)
		_, err = io.WriteString(w, many)
		try(t, err)
		synctest.Wait()
		if got := read(t, dir, 0, ordinaryLimits); len(got) == len(line(0)) {
			t.Error("64 KiB are not on the disk yet, want them there at once")
		}
		_, err = io.WriteString(w, "half a line")
		try(t, err)
		time.Sleep(flushEvery)
		synctest.Wait()
		if got := read(t, dir, 0, ordinaryLimits); !strings.HasSuffix(got, line(1)) {
			t.Errorf("the log ends with %q, want a whole line", got[max(0, len(got)-50):])
		}
		try(t, w.Close())
	})
}

// A file in the place of the logs folder acts as a disk that cannot be written. The Writer tries again after a second,
// and not before.
func TestADiskThatComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		blocked := filepath.Join(dir, folder)
		try(t, os.WriteFile(blocked, nil, 0o644))
		w := create(dir, 0, small)
		synctest.Wait() // after this, the first attempt has failed
		try(t, os.Remove(blocked))
		write := func(from, to int) {
			for i := from; i < to; i++ {
				_, err := io.WriteString(w, line(i))
				try(t, err)
			}
			w.signal()
			synctest.Wait()
		}
		time.Sleep(retryAfter / 2)
		write(0, 10)
		if _, err := os.Stat(blocked); err == nil {
			t.Error("the Writer tried again within a second")
		}
		time.Sleep(retryAfter/2 + time.Millisecond)
		write(10, 20)
		if got := runs(t, read(t, dir, 0, small)); len(got) != 2 || !strings.HasPrefix(got[0], "… 175 B left out here: ") || got[1] != "10-19" {
			t.Errorf("read %q, want a line about the first 10 lines, and 10-19", got)
		}
		err := w.Close()
		if err == nil || !strings.Contains(err.Error(), "log of trial 0: 175 B of the log were left out: ") || !errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.EEXIST) {
			t.Errorf("Close() = %v, want how many bytes are missing, and why", err)
		}
		if again := w.Close(); again != err {
			t.Errorf("a second Close() = %v, want %v", again, err)
		}
		if _, err := w.Write([]byte("x")); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Write after Close = %v, want os.ErrClosed", err)
		}
	})
}

// While the disk is full, Write returns no error. When there is room again, the log says how many bytes are missing.
func TestAFullDisk(t *testing.T) {
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("this user may not mount a small disk: %v", err)
	}
	t.Cleanup(func() { try(t, unix.Unmount(disk, unix.MNT_DETACH)) })
	synctest.Test(t, func(t *testing.T) {
		w := Create(disk, 0)
		ballast := filepath.Join(disk, "ballast")
		write := func(from, to int) {
			for i := from; i < to; i++ {
				_, err := io.WriteString(w, line(i))
				try(t, err)
			}
			time.Sleep(flushEvery)
			synctest.Wait()
		}
		write(0, 1000)
		if err := os.WriteFile(ballast, make([]byte, 4<<20), 0o644); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("WriteFile = %v, want a full disk", err)
		}
		write(1000, 9000) // some of these lines still fit into the last page of the file
		write(9000, 9100)
		try(t, os.Remove(ballast))
		time.Sleep(2 * retryAfter)
		write(9100, 9200)
		got := strings.Split(read(t, disk, 0, ordinaryLimits), "\n")
		i := slices.IndexFunc(got, func(s string) bool { return strings.HasPrefix(s, "… ") })
		if i < 1000 || !strings.HasSuffix(got[i], " KiB left out here: no space left on device …") ||
			!strings.HasPrefix(got[i+1], "line 009100 ") || !strings.HasPrefix(got[len(got)-2], "line 009199 ") {
			t.Fatalf("read %d lines, and line %d is %q; want a line about left-out bytes, then lines 9100 to 9199", len(got), i, got[max(0, i)])
		}
		if err := w.Close(); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), " KiB of the log were left out: ") {
			t.Errorf("Close() = %v, want how many bytes are missing, and why", err)
		}
	})
}

// Bytes that a file server accepted and later lost also count as left out.
func TestADiskThatForgets(t *testing.T) {
	dir := t.TempDir()
	d := disk{limits: small, dir: dir}
	lines := line(0) + line(1) + line(2)
	d.write([]byte(lines), 0, false)
	try(t, os.Truncate(filepath.Join(dir, folder, "trial-0000.log"), int64(len(line(0)))))
	d.fail(syscall.EIO) // the error that the next write would get
	d.write([]byte(line(3)), 0, true)
	d.close()
	if got := runs(t, read(t, dir, 0, small)); !slices.Equal(got, []string{"0-0", "… 29 B left out here: input/output error …", "3-3"}) || d.lost != 29 {
		t.Errorf("read %q, and %d bytes are lost; want 29, which are lines 1 and 2", got, d.lost)
	}
}

// A Writer without its goroutine acts as one whose disk hangs. One Write waits for limits.patience, and later ones do
// not wait until the disk has taken some bytes.
func TestOnlyOneWriteWaitsForADiskThatHangs(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := newWriter(dir, 0, ordinaryLimits)
		text := []byte(strings.Repeat(strings.Repeat("y", 999)+"\n", 64))
		write := func() (waits []time.Duration) {
			for range 4 * maxPending / len(text) {
				began := time.Now()
				_, err := w.Write(text)
				try(t, err)
				if took := time.Since(began); took > 0 {
					waits = append(waits, took)
				}
			}
			return waits
		}
		for range 2 {
			if got := write(); !slices.Equal(got, []time.Duration{ordinaryLimits.patience}) {
				t.Errorf("the writes waited for %s, want one wait of %s", got, ordinaryLimits.patience)
			}
			w.take(false) // as if the disk worked for a moment
		}
		go w.run()
		try(t, w.Close())
	})
}

// A pipe without a reader acts as a hanging disk.
func TestADiskThatHangs(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, folder, "trial-0000.log")
	try(t, os.Mkdir(filepath.Dir(pipe), 0o755), unix.Mkfifo(pipe, 0o644))
	hasty := small
	hasty.patience, hasty.closing, hasty.head = 200*time.Millisecond, 200*time.Millisecond, 100<<20
	w := create(dir, 0, hasty)
	text := []byte(strings.Repeat(strings.Repeat("y", 999)+"\n", 64))
	for range 4 * maxPending / len(text) {
		_, err := w.Write(text)
		try(t, err)
	}
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "the end of the log was not written to ") || !strings.Contains(err.Error(), " within 200 ms") {
		t.Errorf("Close() = %v, want that the disk has not taken the end", err)
	}

	// When the disk works again, it gets all waiting lines, and a line that says how many bytes were left out.
	f, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	try(t, err)
	defer f.Close()
	lines, gap := 0, ""
	for in := bufio.NewScanner(f); gap == "" && in.Scan(); lines++ {
		if strings.HasPrefix(in.Text(), "…") {
			gap = in.Text()
		}
	}
	if lines < maxPending/1000 || !strings.HasSuffix(gap, " MiB left out here: the disk did not keep up …") {
		t.Errorf("after %d lines the log says %q, want a line about left-out bytes after at least %d lines", lines, gap, maxPending/1000)
	}
	_, err = io.Copy(io.Discard, f)
	try(t, err)
	<-w.gone
}

// If lines come faster than the disk takes them, Write waits, so that the log keeps its end.
func TestABurst(t *testing.T) {
	dir := t.TempDir()
	w := Create(dir, 0)
	const lines = 30_000
	for i := range lines {
		_, err := fmt.Fprintf(w, "%07d%992d\n", i, i)
		try(t, err)
	}
	try(t, w.Close())
	var gaps []string
	next := 0
	for text := range strings.Lines(read(t, dir, 0, ordinaryLimits)) {
		i, err := strconv.Atoi(text[:min(7, len(text))])
		switch {
		case err != nil:
			gaps = append(gaps, text)
			continue
		case len(gaps) == 0 && i != next || i < next || len(text) != 1000:
			t.Fatalf("%q follows line %d", text, next-1)
		}
		next = i + 1
	}
	if len(gaps) != 1 || !strings.HasPrefix(gaps[0], "… about 1") || next != lines {
		t.Errorf("the log ends with line %d and has the gaps %q; want the last line and one gap of 12 to 14 MiB", next-1, gaps)
	}
	if _, size := files(t, dir); size > 16<<20 || size < 14<<20-2000 {
		t.Errorf("the log has %d bytes, want 14 to 16 MiB", size)
	}
}

func TestSeveralWriteWholeLines(t *testing.T) {
	dir := t.TempDir()
	w := create(dir, 0, ordinaryLimits)
	const each = 5000
	var writers sync.WaitGroup
	for k := range 4 {
		writers.Go(func() {
			for i := range each {
				if _, err := io.WriteString(w, line(k*each+i)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	try(t, w.Close())
	got := strings.SplitAfter(read(t, dir, 0, ordinaryLimits), "\n")
	slices.Sort(got)
	for i, text := range got[1:] { // the first text is empty: it follows the last line break
		if text != line(i) {
			t.Fatalf("line %d is %q", i, text)
		}
	}
	if len(got) != 4*each+1 {
		t.Errorf("read %d lines, want %d", len(got)-1, 4*each)
	}
}

// A killed Writer leaves complete lines; only the last line may be incomplete. Another Writer can append to its log.
func TestKilledAndRunAgain(t *testing.T) {
	dir := t.TempDir()
	self, err := os.Executable()
	try(t, err)
	child := exec.CommandContext(context.WithoutCancel(t.Context()), self)
	child.Env = append(os.Environ(), "LOGS_ENDLESS="+dir)
	out, err := child.StdoutPipe()
	try(t, err, child.Start())
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Errorf("the child printed no line: %v", err)
	}
	try(t, child.Process.Kill())
	_ = child.Wait() // killed
	writeLines(t, dir, 0, small, 0, 10)

	torn := 0
	text := read(t, dir, 0, small)
	for text := range strings.Lines(text) {
		var i int
		_, err := fmt.Sscanf(text, "line %d ", &i)
		if (err != nil || text != line(i)) && !strings.HasPrefix(text, "… about") && !strings.HasPrefix(text, "===") {
			torn++
		}
	}
	if torn > 1 || !strings.Contains(text, "=== trial 0 is run again") || !strings.HasSuffix(text, line(9)) {
		t.Errorf("%d lines are torn, want at most 1; the log ends with %q", torn, text[max(0, len(text)-200):])
	}
	if _, size := files(t, dir); size > 8000 {
		t.Errorf("the log has %d bytes, want at most 8000", size)
	}
}

// A follower that keeps up gets every line once, from all files. It ends when the trial is done.
func TestFollowingOverSeveralFiles(t *testing.T) {
	dir := t.TempDir()
	l := small
	l.head, l.part, l.parts = 100_000, 100_000, 2
	w := create(dir, 0, l)
	_, err := io.WriteString(w, line(0))
	try(t, err)
	r, err := open(dir, 0, l)
	for ; errors.Is(err, fs.ErrNotExist); r, err = open(dir, 0, l) {
		time.Sleep(10 * time.Millisecond) // the Writer's goroutine makes the file soon
	}
	try(t, err)
	got, done, ended := new(output), make(chan struct{}), make(chan error, 1)
	go func() { ended <- r.Follow(t.Context(), got, done) }()
	const step, steps = 4000, 6 // 84 kB each
	for n := 1; n <= steps*step; n += step {
		for i := n; i < n+step; i++ {
			_, err := io.WriteString(w, line(i))
			try(t, err)
		}
		w.signal()
		got.wait(t, line(n+step-1))
	}
	try(t, w.Close())
	close(done)
	try(t, <-ended, r.Close())
	if got := runs(t, got.String()); !slices.Equal(got, []string{fmt.Sprintf("0-%d", steps*step)}) {
		t.Errorf("followed %q, want all lines once", got)
	}
	if names, _ := files(t, dir); slices.Contains(names, "trial-0000.log.1") || len(names) != 3 {
		t.Errorf("the files are %q, want 3 without part 1, which was deleted", names)
	}
}

// After a Reader has read the end of a file, the file may grow and get a successor. The Reader must read the new end
// first.
func TestAFileGrowsBeforeItsSuccessor(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 150)
	r, err := open(dir, 0, small)
	try(t, err)
	begin, err := io.ReadAll(r)
	try(t, err)
	writeLines(t, dir, 0, small, 150, 300)
	try(t, r.advance()) // as if the end of the head had just been read
	end, err := io.ReadAll(r)
	try(t, err, r.Close())
	if got := runs(t, string(begin)+string(end)); len(got) != 3 || got[0] != "0-149" || got[2] != "150-299" {
		t.Errorf("read %q, want all lines", got)
	}
}

// A follower that is too slow gets a line about the deleted parts.
func TestASlowFollower(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 150)
	r, err := open(dir, 0, small)
	try(t, err)
	first := make([]byte, 1000)
	_, err = io.ReadFull(r, first)
	try(t, err)
	writeLines(t, dir, 0, small, 150, 20_000) // deletes parts that the Reader has not read
	done := make(chan struct{})
	close(done)
	var rest bytes.Buffer
	try(t, r.Follow(t.Context(), &rest, done), r.Close())
	got := runs(t, string(first)+rest.String())
	if n := len(got); !strings.HasPrefix(got[n-2], "… about ") || !strings.HasSuffix(got[n-1], "-19999") {
		t.Errorf("followed %q, want a line about the gap, and the end", got)
	}
}

func TestFollowingEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 10)
	r, err := open(dir, 0, small)
	try(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("seen enough")
	got, ended := new(output), make(chan error, 1)
	go func() { ended <- r.Follow(ctx, got, nil) }()
	got.wait(t, line(9))
	cancel(enough)
	if err := <-ended; err != enough {
		t.Errorf("Follow ends with %v, want the cause", err)
	}
	try(t, r.Close())
}

// An output keeps all that was written to it. A test can wait for a text in it.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

func (o *output) wait(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(45 * time.Second); !strings.Contains(o.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%q was not written within 45 s", text)
		}
	}
}
