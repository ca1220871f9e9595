package weights

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// makeColdFiles makes files of the given sizes that are on disk but not in the page cache.
func makeColdFiles(t *testing.T, sizes ...int) []File {
	t.Helper()
	dir := t.TempDir()
	if kind := Filesystem(dir); kind == "tmpfs" || kind == "ramfs" {
		t.Skipf("%s is on %s, which is always in memory; set TMPDIR to a disk", dir, kind)
	}
	var files []File
	for i, size := range sizes {
		path := filepath.Join(dir, fmt.Sprintf("model-%d.safetensors", i))
		try(t, os.WriteFile(path, random(byte(i), size), 0o644))
		files = append(files, File{path, int64(size)})
	}
	forget(t, files)
	return files
}

// forget drops files from the page cache.
func forget(t *testing.T, files []File) {
	t.Helper()
	for _, file := range files {
		f, err := os.Open(file.Path)
		try(t, err)
		try(t, f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
	}
}

// despiteEviction runs a check that returns what is wrong, or "". A check has five attempts, because the kernel may drop
// any page at any time.
func despiteEviction(t *testing.T, check func() string) {
	t.Helper()
	problem := ""
	for range 5 {
		if problem = check(); problem == "" {
			return
		}
	}
	t.Error(problem)
}

func TestWarmReadsWhatIsNotInThePageCache(t *testing.T) {
	files := makeColdFiles(t, 30<<20+5, 0, 5<<20)
	const total = 35<<20 + 5
	for range 2 { // asking changes nothing
		if n, err := resident(files); err != nil || n != 0 {
			t.Fatalf("%d bytes are in the page cache, %v; want none", n, err)
		}
	}
	// wantReport wants that Warm gives the report after some files were forgotten.
	wantReport := func(forgotten []File, want Report) {
		t.Helper()
		despiteEviction(t, func() string {
			forget(t, forgotten)
			var told, last int64
			report, err := Warm(t.Context(), files, 1<<30, func(done, of int64) {
				if done <= last || of != total {
					t.Errorf("told %d of %d after %d", done, of, last)
				}
				told, last = told+1, done
			})
			try(t, err)
			if report.Read > 0 && (last != total || report.Took <= 0) || report.Read == total && told < 4 {
				t.Errorf("progress was told %d times, last of %d bytes, in %s", told, last, report.Took)
			}
			if report.Took = 0; report != want {
				return fmt.Sprintf("the report is %+v, want %+v", report, want)
			}
			return ""
		})
	}
	wantReport(files, Report{Bytes: total, Read: total, NowResident: total})
	wantReport(nil, Report{Bytes: total, WasResident: total, NowResident: total, Skipped: "all of the weights were in the page cache"})
	wantReport(files[2:], Report{Bytes: total, Read: 5 << 20, WasResident: total - 5<<20, NowResident: total})
}

func TestPartOfAFileIsInThePageCache(t *testing.T) {
	files := makeColdFiles(t, 16<<20)
	f, err := os.Open(files[0].Path)
	try(t, err, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM)) // the kernel shall not read ahead
	despiteEviction(t, func() string {
		_, err := f.ReadAt(make([]byte, 4<<20), 0)
		try(t, err)
		if n, err := resident(files); err != nil || n < 4<<20 || n > 5<<20 {
			return fmt.Sprintf("%d bytes are in the page cache, %v; want the 4 MiB that were read", n, err)
		}
		return ""
	})
	try(t, f.Close())
}

func TestWarmLeavesMemoryToOthers(t *testing.T) {
	files := makeColdFiles(t, 1<<20)
	report, err := Warm(t.Context(), files, 1<<20, nil)
	try(t, err)
	if report.Read != 0 || report.Skipped != "the weights take 1 MiB, more than 70 % of the 1 MiB of memory that may be used" {
		t.Errorf("the report is %+v, want that nothing was read, and why", report)
	}
	if n, err := resident(files); err != nil || n != 0 {
		t.Errorf("%d bytes are in the page cache, %v; want none", n, err)
	}
}

func TestWarmEndsWithItsContext(t *testing.T) {
	files := makeColdFiles(t, 40<<20, 40<<20)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("the study ends")
	report, err := Warm(ctx, files, 1<<30, func(done, _ int64) { cancel(enough) })
	if !errors.Is(err, enough) || report.Read == 0 || report.Read > workers*blockSize {
		t.Errorf("Warm ends with %v and the report %+v, want the cause after one block a worker", err, report)
	}
}

func TestWarmSaysWhichFileItCannotRead(t *testing.T) {
	files := makeColdFiles(t, 1<<20)
	gone := File{filepath.Join(t.TempDir(), "gone.safetensors"), 5}
	_, err := Warm(t.Context(), append(files, gone), 1<<30, nil)
	wantError(t, err, "warm the page cache", gone.Path, "no such file")
	short := File{files[0].Path, 2 << 20}
	_, err = Warm(t.Context(), []File{short}, 1<<30, nil)
	wantError(t, err, "warm the page cache", short.Path, "was shortened while it was read")
}

// The kernel reports another user's file as fully cached. Warm must not believe it.
func TestWhatTheKernelHidesIsNotBelieved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("to be somebody else needs root")
	}
	files := makeColdFiles(t, 10<<20)
	for dir := filepath.Dir(files[0].Path); dir != "/"; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err != nil || info.Mode()&0o005 != 0o005 {
			t.Logf("making %s readable for others: %v", dir, err)
			try(t, os.Chmod(dir, 0o755))
		}
	}
	self := filepath.Join(filepath.Dir(files[0].Path), "self") // the child runs as the user "nobody", who may start the program in this folder
	program, err := os.ReadFile("/proc/self/exe")
	try(t, err, os.WriteFile(self, program, 0o755))
	child := exec.CommandContext(t.Context(), self)
	child.Env = append(os.Environ(), "GORACE="+quickExit, "WEIGHTS_WARM="+files[0].Path)
	child.Dir = "/"
	child.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := child.CombinedOutput()
	if want := "{Bytes:10485760 WasResident:-1 NowResident:-1 Read:10485760 "; err != nil || !strings.HasPrefix(string(out), want) {
		t.Errorf("as nobody: %v, %s; want %s…", err, out, want)
	}
}

// warmAsChild is what the test binary does when the test runs it as a child process of another user.
func warmAsChild(path string) {
	files := []File{{path, 10 << 20}}
	if _, err := resident(files); !errors.Is(err, errHidden) {
		fmt.Printf("resident ends with %v, want errHidden", err)
		os.Exit(1)
	}
	report, err := Warm(context.Background(), files, 1<<30, nil)
	if err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
	fmt.Printf("%+v", report)
	os.Exit(0)
}
