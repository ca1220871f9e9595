package logs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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

// The test binary is the child too: in its role it writes a log without end.
func TestMain(m *testing.M) {
	if dir := os.Getenv("LOGS_ENDLESS"); dir != "" {
		endless(dir)
	}
	os.Exit(m.Run())
}

func endless(dir string) {
	w, err := create(dir, 0, small)
	if err != nil {
		panic(err)
	}
	for i := 0; ; i++ {
		fmt.Fprint(w, line(i))
		if i == 10_000 {
			for parts := []string(nil); len(parts) == 0; time.Sleep(time.Millisecond) {
				parts, _ = filepath.Glob(filepath.Join(dir, folder, "trial-0000.log.*")) // the pattern is right
			}
			fmt.Println("a part is on the disk")
		}
	}
}

func TestALineIsOnTheDiskWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		w, err := Create(dir, 0)
		try(t, err)
		_, err = io.WriteString(w, line(0))
		try(t, err)
		time.Sleep(flushEvery)
		synctest.Wait()
		if got := read(t, dir, 0, ordinary); got != line(0) {
			t.Errorf("after a second %q is on the disk, want the line", got)
		}
		many := strings.Repeat(line(1), flushAt/len(line(1))+1)
		_, err = io.WriteString(w, many)
		try(t, err)
		synctest.Wait()
		if got := read(t, dir, 0, ordinary); len(got) == len(line(0)) {
			t.Error("64 KiB wait for the second to be over")
		}
		_, err = io.WriteString(w, "half a line")
		try(t, err)
		time.Sleep(flushEvery)
		synctest.Wait()
		if got := read(t, dir, 0, ordinary); !strings.HasSuffix(got, line(1)) {
			t.Errorf("the log ends %q, want whole lines while more may come", got[max(0, len(got)-50):])
		}
		try(t, w.Close())
	})
}

// A file in place of the folder stands for a disk that cannot be written. The Writer tries it again after a second, not before.
func TestADiskThatComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		blocked := filepath.Join(dir, folder)
		try(t, os.WriteFile(blocked, nil, 0o644))
		w, err := create(dir, 0, small)
		try(t, err)
		synctest.Wait() // the first attempt has failed
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
			t.Error("the disk was tried again within a second")
		}
		time.Sleep(retryAfter/2 + time.Millisecond)
		write(10, 20)
		if got := runs(t, read(t, dir, 0, small)); len(got) != 2 || !strings.HasPrefix(got[0], "… 175 bytes left out here: ") || got[1] != "10-19" {
			t.Errorf("read %q, want that the first 10 lines are missing, and 10-19", got)
		}
		err = w.Close()
		if err == nil || !strings.Contains(err.Error(), "log of trial 0: 175 bytes of it were left out: ") || !errors.Is(err, syscall.ENOTDIR) && !errors.Is(err, syscall.EEXIST) {
			t.Errorf("Close() = %v, want how much is missing, and why", err)
		}
		if again := w.Close(); again != err {
			t.Errorf("a second Close() = %v, want the same", again)
		}
		if _, err := w.Write([]byte("x")); !errors.Is(err, os.ErrClosed) {
			t.Errorf("Write after Close: %v, want that it is closed", err)
		}
	})
}

// While the disk is full, the Writer takes everything without an error. When there is room again, the log says what is missing.
func TestAFullDisk(t *testing.T) {
	disk := t.TempDir()
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size=2m"); err != nil {
		t.Skipf("a small disk needs the right to mount: %v", err)
	}
	t.Cleanup(func() { try(t, unix.Unmount(disk, unix.MNT_DETACH)) })
	synctest.Test(t, func(t *testing.T) {
		w, err := Create(disk, 0)
		try(t, err)
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
			t.Fatalf("the disk is not full: %v", err)
		}
		write(1000, 9000) // a page of the last file is still free, so a part of them is on the disk
		write(9000, 9100)
		try(t, os.Remove(ballast))
		time.Sleep(2 * retryAfter)
		write(9100, 9200)
		got := strings.Split(read(t, disk, 0, ordinary), "\n")
		i := slices.IndexFunc(got, func(s string) bool { return strings.HasPrefix(s, "… ") })
		if i < 1000 || !strings.HasSuffix(got[i], " kB left out here: no space left on device …") ||
			!strings.HasPrefix(got[i+1], "line 009100 ") || !strings.HasPrefix(got[len(got)-2], "line 009199 ") {
			t.Fatalf("%d lines are read, line %d of them is %q", len(got), i, got[max(0, i)])
		}
		if err := w.Close(); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), " kB of it were left out: ") {
			t.Errorf("Close() = %v, want how much is missing, and why", err)
		}
	})
}

// What a file server took and could not keep is missing too.
func TestADiskThatForgets(t *testing.T) {
	dir := t.TempDir()
	d := disk{limits: small, dir: dir}
	lines := line(0) + line(1) + line(2)
	d.write([]byte(lines), false)
	try(t, os.Truncate(filepath.Join(dir, folder, "trial-0000.log"), int64(len(line(0)))))
	d.fail(syscall.EIO) // as the next write would
	d.write([]byte(line(3)), true)
	d.close()
	if got := runs(t, read(t, dir, 0, small)); !slices.Equal(got, []string{"0-0", "… 29 bytes left out here: input/output error …", "3-3"}) || d.lost != 29 {
		t.Errorf("read %q, and %d bytes are counted; want that lines 1 and 2 are missing", got, d.lost)
	}
}

// A pipe that nobody reads stands for a hanging disk. A Write waits for it once, as long as its patience lasts.
func TestADiskThatHangs(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, folder, "trial-0000.log")
	try(t, os.Mkdir(filepath.Dir(pipe), 0o755), unix.Mkfifo(pipe, 0o644))
	hasty := small
	hasty.patience, hasty.closing, hasty.head = 200*time.Millisecond, 200*time.Millisecond, 100<<20
	w, err := create(dir, 0, hasty)
	try(t, err)
	text := []byte(strings.Repeat(strings.Repeat("y", 999)+"\n", 64))
	began := time.Now()
	for range 4 * maxPending / len(text) {
		_, err := w.Write(text)
		try(t, err)
	}
	if took := time.Since(began); took < hasty.patience || took > 10*hasty.patience { // if each had waited: 48 times
		t.Errorf("65 writes took %s, want one of them to wait for %s", took, hasty.patience)
	}
	if err := w.Close(); err == nil || !strings.Contains(err.Error(), "has not taken its end within 200ms") {
		t.Errorf("Close() = %v, want that the disk hangs", err)
	}

	// The disk works again: all that waited for it arrives, with a line for what did not.
	f, err := os.OpenFile(pipe, os.O_RDONLY|unix.O_NONBLOCK, 0)
	try(t, err)
	defer f.Close()
	lines, gap := 0, ""
	for in := bufio.NewScanner(f); gap == "" && in.Scan(); lines++ {
		if strings.HasPrefix(in.Text(), "…") {
			gap = in.Text()
		}
	}
	if lines < maxPending/1000 || !strings.HasSuffix(gap, " MB left out here: the disk did not keep up …") {
		t.Errorf("after %d lines it is said that %q, want so after at least %d", lines, gap, maxPending/1000)
	}
	_, err = io.Copy(io.Discard, f)
	try(t, err)
	<-w.gone
}

// Lines that come faster than the disk takes them wait for it, so that the end is there.
func TestABurstIsNotLost(t *testing.T) {
	dir := t.TempDir()
	w, err := Create(dir, 0)
	try(t, err)
	const lines = 30_000
	for i := range lines {
		_, err := fmt.Fprintf(w, "%07d%992d\n", i, i)
		try(t, err)
	}
	try(t, w.Close())
	var gaps []string
	next := 0
	for text := range strings.Lines(read(t, dir, 0, ordinary)) {
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
		t.Errorf("the log ends with line %d and has the gaps %q; want all lines with one gap of 13 to 15 MB", next-1, gaps)
	}
	if _, size := files(t, dir); size > 16<<20 || size < 14<<20-2000 {
		t.Errorf("%d bytes are kept, want 14 to 16 MiB", size)
	}
}

func TestSeveralWriteWholeLines(t *testing.T) {
	dir := t.TempDir()
	w, err := create(dir, 0, ordinary)
	try(t, err)
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
	got := strings.SplitAfter(read(t, dir, 0, ordinary), "\n")
	slices.Sort(got)
	for i, text := range got[1:] { // the first is what follows the last break
		if text != line(i) {
			t.Fatalf("line %d is %q", i, text)
		}
	}
	if len(got) != 4*each+1 {
		t.Errorf("%d lines are read, want %d", len(got)-1, 4*each)
	}
}

// A Writer that is killed leaves whole lines, but for the last, and a log that goes on.
func TestKilledAndRunAgain(t *testing.T) {
	dir := t.TempDir()
	self, err := os.Executable()
	try(t, err)
	child := exec.CommandContext(context.WithoutCancel(t.Context()), self)
	child.Env = append(os.Environ(), "LOGS_ENDLESS="+dir)
	out, err := child.StdoutPipe()
	try(t, err, child.Start())
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Errorf("the child says nothing: %v", err)
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
		t.Errorf("%d lines are torn, and the log ends %q", torn, text[max(0, len(text)-200):])
	}
	if _, size := files(t, dir); size > 8000 {
		t.Errorf("%d bytes are on the disk, want at most 8000", size)
	}
}

// A follower that keeps up sees every line once, over all files. It ends when the trial is done.
func TestFollowingOverSeveralFiles(t *testing.T) {
	dir := t.TempDir()
	l := small
	l.head, l.part, l.parts = 100_000, 100_000, 2
	w, err := create(dir, 0, l)
	try(t, err)
	_, err = io.WriteString(w, line(0))
	try(t, err)
	r := openSoon(t, dir, l)
	got, done, ended := new(heard), make(chan struct{}), make(chan error, 1)
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
		t.Errorf("the files are %q: nothing was deleted while it was followed", names)
	}
}

// Between the end of a file and the look at its successor, the file may grow and the successor appear.
func TestWhatComesLastInAFileIsRead(t *testing.T) {
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

func TestAFollowerThatIsTooSlowIsToldWhatItMissed(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 150)
	r, err := open(dir, 0, small)
	try(t, err)
	first := make([]byte, 1000)
	_, err = io.ReadFull(r, first)
	try(t, err)
	writeLines(t, dir, 0, small, 150, 20_000) // meanwhile
	done := make(chan struct{})
	close(done)
	var rest bytes.Buffer
	try(t, r.Follow(t.Context(), &rest, done), r.Close())
	got := runs(t, string(first)+rest.String())
	if n := len(got); !strings.HasPrefix(got[n-2], "… about ") || !strings.HasSuffix(got[n-1], "-19999") {
		t.Errorf("followed %q, want a gap that is said, and the end", got)
	}
}

func TestFollowingEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	writeLines(t, dir, 0, small, 0, 10)
	r, err := open(dir, 0, small)
	try(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("seen enough")
	got, ended := new(heard), make(chan error, 1)
	go func() { ended <- r.Follow(ctx, got, nil) }()
	got.wait(t, line(9))
	cancel(enough)
	if err := <-ended; err != enough {
		t.Errorf("Follow ends with %v, want the cause", err)
	}
	try(t, r.Close())
}

// openSoon opens a log as soon as there is one.
func openSoon(t *testing.T, dir string, l limits) *Reader {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		r, err := open(dir, 0, l)
		if err == nil {
			return r
		}
		if time.Now().After(deadline) {
			t.Fatalf("there is no log after 10 s: %v", err)
		}
	}
}

// heard keeps what was written to it, and lets others wait for a text.
type heard struct {
	mu   sync.Mutex
	text strings.Builder
}

func (h *heard) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.Write(b)
}

func (h *heard) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.text.String()
}

func (h *heard) wait(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(h.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%q was not heard within 20 s", text)
		}
	}
}
