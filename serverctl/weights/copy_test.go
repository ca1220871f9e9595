package weights

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// If WEIGHTS_WARM or WEIGHTS_COPY is set, the test binary acts as another tuner: it warms the page cache, or it copies.
func TestMain(m *testing.M) {
	if path := os.Getenv("WEIGHTS_WARM"); path != "" {
		warmAsChild(path)
	}
	if model := os.Getenv("WEIGHTS_COPY"); model != "" {
		copyAsChild(model, os.Getenv("WEIGHTS_TO"))
	}
	os.Exit(m.Run())
}

// quickExit keeps the race detector from sleeping for a second at the end of a child.
const quickExit = "atexit_sleep_ms=10"

// copyAsChild copies a model. It prints "copying" when the copy has begun, and goes on after a line from its standard
// input.
func copyAsChild(model, to string) {
	said := false
	path, _, err := Copy(context.Background(), model, to, func(_, _ int64) {
		if !said {
			said = true
			fmt.Println("copying")
			_, _ = bufio.NewReader(os.Stdin).ReadString('\n') // the end of the input counts as a line
		}
	})
	fmt.Println(path, err)
	os.Exit(0)
}

// A neighbour is another tuner that copies.
type neighbour struct {
	*exec.Cmd
	in io.WriteCloser
}

// startNeighbour starts a neighbour, and returns in the middle of its copy.
func startNeighbour(t *testing.T, model, to string) *neighbour {
	t.Helper()
	self, err := os.Executable()
	try(t, err)
	n := &neighbour{Cmd: exec.CommandContext(context.WithoutCancel(t.Context()), self)}
	n.Env = append(os.Environ(), "GORACE="+quickExit, "WEIGHTS_COPY="+model, "WEIGHTS_TO="+to)
	n.in, err = n.StdinPipe()
	try(t, err)
	out, err := n.StdoutPipe()
	try(t, err, n.Start())
	t.Cleanup(func() {
		_ = n.Process.Kill() // an error means that it has ended already
		_ = n.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "copying\n" {
		t.Fatalf("the child says %q, %v", line, err)
	}
	return n
}

// aModel returns a folder with 20 MiB of files, which take some time to copy.
func aModel(t *testing.T) (dir string, files map[string]string) { return aModelOf(t, 12<<20) }

// aSmallModel is like aModel, but with 2 kB of files.
func aSmallModel(t *testing.T) (dir string, files map[string]string) { return aModelOf(t, 1<<10) }

func aModelOf(t *testing.T, shard int) (dir string, files map[string]string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "tiny-llama")
	files = map[string]string{
		"config.json": "{}", "tokenizer/vocab.txt": "a\nb\n", "empty": "",
		"model-00001-of-00002.safetensors": string(random(1, shard)), "model-00002-of-00002.safetensors": string(random(2, shard*2/3+7)),
	}
	write(t, dir, files)
	return dir, files
}

// names returns the names in a folder, without the lock file.
func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	try(t, err)
	for _, e := range entries {
		if e.Name() != lockFile {
			all = append(all, e.Name())
		}
	}
	return all
}

func TestACopyIsMadeOnce(t *testing.T) {
	model, files := aModel(t)
	to := filepath.Join(t.TempDir(), "not", "there", "yet")
	var last int64
	path, report, err := Copy(t.Context(), model, to, func(done, _ int64) { last = done })
	try(t, err)
	sameFiles(t, path, files)
	if filepath.Dir(path) != to || !strings.HasPrefix(filepath.Base(path), "tiny-llama-") || len(filepath.Base(path)) != len("tiny-llama-")+16 {
		t.Errorf("the copy is %s, want one of that name in %s", path, to)
	}
	const total = 20<<20 + 7 + 2 + 4
	if report.Bytes != total || report.Read != total || last != total || report.Skipped != "" || report.Took <= 0 {
		t.Errorf("the report is %+v, and progress ended at %d; want %d bytes", report, last, total)
	}
	info, err := os.Stat(path)
	try(t, err)
	again, report, err := Copy(t.Context(), model, to, func(_, _ int64) { t.Error("something was copied again") })
	try(t, err)
	if again != path || report.Read != 0 || report.Bytes != total || report.Skipped != "a copy was already there" {
		t.Errorf("the second copy is %s with the report %+v, want the first", again, report)
	}
	if now, err := os.Stat(path); err != nil || !os.SameFile(info, now) {
		t.Errorf("the folder is another one: %v", err)
	}
	if got := names(t, to); len(got) != 1 {
		t.Errorf("the folder holds %q, want the copy alone", got)
	}
}

func TestACopyOfAHubsSnapshotHasNoLinks(t *testing.T) {
	root := t.TempDir()
	hub(t, root)
	snapshot := filepath.Join(root, "models--nvidia--tiny", "snapshots", "aaa")
	write(t, snapshot, map[string]string{".gitattributes": "x", "original/consolidated.00.pth": "x", "1_Dense/original/w": "y", "1_Dense/more": "->../../../blobs/b2"})
	path, _, err := Copy(t.Context(), snapshot, t.TempDir(), nil)
	try(t, err)
	sameFiles(t, path, map[string]string{"config.json": "{}", "model.safetensors": "weights", "1_Dense/more": "other weights", "1_Dense/original/w": "y"})
	if !strings.HasPrefix(filepath.Base(path), "models--nvidia--tiny-") {
		t.Errorf("the copy is %s, want it named for the model", path)
	}
	files, _, err := Files(Model{Name: path})
	try(t, err)
	if len(files) != 1 || files[0].Size != 7 {
		t.Errorf("the copy's weights are %v", files)
	}
}

func TestAChangedModelIsAnotherCopy(t *testing.T) {
	model, files := aSmallModel(t)
	to := t.TempDir()
	old, _, err := Copy(t.Context(), model, to, nil)
	try(t, err)
	config := filepath.Join(model, "config.json")
	for _, row := range []struct {
		name   string
		change func() error
	}{
		{"a later time", func() error { return os.Chtimes(config, time.Time{}, time.Now().Add(time.Hour)) }},
		{"another size", func() error { return os.WriteFile(config, []byte("{ }"), 0o644) }},
		{"another name", func() error { return os.Rename(config, filepath.Join(model, "configs.json")) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			try(t, row.change())
			path, report, err := Copy(t.Context(), model, to, nil)
			try(t, err)
			if path == old || report.Read == 0 {
				t.Errorf("the copy is %s with the report %+v, want another than before", path, report)
			}
			old = path
		})
	}
	if got := names(t, to); len(got) != 4 {
		t.Errorf("the folder holds %q, want four copies", got)
	}
	delete(files, "config.json")
	files["configs.json"] = "{ }"
	sameFiles(t, old, files)
}

func TestADamagedCopyIsMadeAgain(t *testing.T) {
	for _, row := range []struct {
		name   string
		damage func(path string) error
	}{
		{"a file was deleted", func(path string) error { return os.Remove(filepath.Join(path, "tokenizer", "vocab.txt")) }},
		{"a file was cut short", func(path string) error { return os.Truncate(filepath.Join(path, "config.json"), 1) }},
	} {
		t.Run(row.name, func(t *testing.T) {
			model, files := aSmallModel(t)
			to := t.TempDir()
			path, _, err := Copy(t.Context(), model, to, nil)
			try(t, err, row.damage(path))
			again, report, err := Copy(t.Context(), model, to, nil)
			try(t, err)
			if again != path || report.Skipped != "" {
				t.Errorf("the copy is %s with the report %+v, want that it was made again", again, report)
			}
			sameFiles(t, path, files)
		})
	}
}

func TestAnInterruptedCopyLeavesNothing(t *testing.T) {
	model, files := aModel(t)
	to := t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("the study ends")
	path, report, err := Copy(ctx, model, to, func(_, _ int64) { cancel(enough) })
	if !errors.Is(err, enough) || path != "" || report.Read == report.Bytes {
		t.Errorf("Copy = %q, %+v, %v; want the cause in the middle", path, report, err)
	}
	wantError(t, err, "copy the model "+model+" to "+to)
	if got := names(t, to); len(got) != 0 {
		t.Errorf("the folder holds %q, want nothing", got)
	}
	path, _, err = Copy(t.Context(), model, to, nil)
	try(t, err)
	sameFiles(t, path, files)
}

func TestACopyWhoseTunerWasKilledIsRemoved(t *testing.T) {
	model, files := aModel(t)
	to := t.TempDir()
	child := startNeighbour(t, model, to)
	try(t, child.Process.Kill())
	_ = child.Wait() // killed
	if got := names(t, to); len(got) != 1 || !strings.HasPrefix(got[0], partialPrefix) {
		t.Fatalf("the folder holds %q, want what was begun", got)
	}
	other := filepath.Join(t.TempDir(), "other")
	write(t, other, map[string]string{"model.safetensors": "small"})
	path, _, err := Copy(t.Context(), other, to, nil)
	try(t, err)
	if got := names(t, to); !slices.Equal(got, []string{filepath.Base(path)}) {
		t.Errorf("the folder holds %q, want the other model's copy alone", got)
	}
	path, _, err = Copy(t.Context(), model, to, nil)
	try(t, err)
	sameFiles(t, path, files)
}

func TestACopyOfAnotherTunerIsShared(t *testing.T) {
	model, files := aModel(t)
	to := t.TempDir()
	child := startNeighbour(t, model, to)
	type result struct {
		path   string
		report Report
		err    error
	}
	ended := make(chan result, 1)
	go func() {
		path, report, err := Copy(t.Context(), model, to, nil)
		ended <- result{path, report, err}
	}()
	select {
	case r := <-ended:
		t.Fatalf("it did not wait: %+v", r)
	case <-time.After(300 * time.Millisecond): // a Copy that does not wait would have ended by then
	}
	_, err := io.WriteString(child.in, "go on\n")
	try(t, err)
	r := <-ended
	try(t, r.err)
	if r.report.Read != 0 || r.report.Skipped != "a copy was already there, made by another tuner meanwhile" {
		t.Errorf("the report is %+v, want that the other's copy is shared", r.report)
	}
	sameFiles(t, r.path, files)
}

func TestACopyThatStandsStillIsNotWaitedFor(t *testing.T) {
	model, _ := aModel(t)
	to := t.TempDir()
	child := startNeighbour(t, model, to)
	_, _, err := copier{stall: 300 * time.Millisecond, free: freeBytes}.copy(t.Context(), model, to, nil)
	wantError(t, err, "another tuner has held "+filepath.Join(to, lockFile)+" for 300 ms without progress",
		fmt.Sprintf("pid %d on ", child.Process.Pid), "bytes of "+model)

	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, _, err = Copy(ctx, model, to, nil)
	wantError(t, err, "wait for another tuner's copy")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Copy ends with %v, want that its time was over", err)
	}
}

func TestACopyThatMovesIsWaitedFor(t *testing.T) {
	model, files := aSmallModel(t)
	to := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		holder, err := copier{stall: time.Second}.lock(t.Context(), filepath.Join(to, lockFile))
		try(t, err)
		const stall = time.Minute
		var holding sync.WaitGroup
		holding.Go(func() {
			for i := range 50 {
				say(holder, model, int64(i), 50)
				time.Sleep(stall / 20)
			}
			if err := holder.Close(); err != nil {
				t.Error(err)
			}
		})
		path, report, err := copier{stall: stall, free: freeBytes}.copy(t.Context(), model, to, nil)
		holding.Wait()
		try(t, err)
		if report.Took < 2*stall {
			t.Errorf("it waited for %s, and the lock was held for %s", report.Took, 5*stall/2)
		}
		sameFiles(t, path, files)
	})
}

func TestTooLittleSpaceForACopy(t *testing.T) {
	model, _ := aModel(t)
	t.Run("as it is told", func(t *testing.T) {
		to := t.TempDir()
		write(t, to, map[string]string{"tiny-llama-old/config.json": "{}", ".hidden/x": ""})
		_, _, err := copier{stall: time.Second, free: func(string) (int64, error) { return 90 << 20, nil }}.copy(t.Context(), model, to, nil)
		if err != nil {
			t.Errorf("with just enough space: %v", err)
		}
		other := filepath.Join(t.TempDir(), "other")
		write(t, other, map[string]string{"model.safetensors": string(random(3, 1<<20))})
		_, _, err = copier{stall: time.Second, free: func(string) (int64, error) { return 64 << 20, nil }}.copy(t.Context(), other, to, nil)
		wantError(t, err, "the copy takes 1 MiB and must leave 64 MiB free, but only 64 MiB are free", "remove copies that you no longer need (tiny-llama-", ", tiny-llama-old), or choose another folder")
	})
	t.Run("on a small disk", func(t *testing.T) {
		to := mount(t, "size=16m")
		_, _, err := Copy(t.Context(), model, to, nil)
		wantError(t, err, "copy the model "+model, "the copy takes 20 MiB and must leave 64 MiB free, but only 16 MiB are free; make room, or choose another folder")
		if got := names(t, to); len(got) != 0 {
			t.Errorf("the folder holds %q, want nothing", got)
		}
	})
	t.Run("on a disk that others fill", func(t *testing.T) {
		to := mount(t, "size=16m")
		_, _, err := copier{stall: time.Second, free: func(string) (int64, error) { return 1 << 40, nil }}.copy(t.Context(), model, to, nil)
		wantError(t, err, "no space left on device")
		if got := names(t, to); len(got) != 0 {
			t.Errorf("the folder holds %q, want nothing", got)
		}
	})
}

// The check does not complain of too little room beside an incomplete copy, because Copy will free that space. The
// brackets in the folder's name are not read as a pattern.
func TestACheckLeavesAnIncompleteCopyOutOfAccount(t *testing.T) {
	model, _ := aSmallModel(t)
	to := filepath.Join(t.TempDir(), "copies [1]")
	full := copier{free: func(string) (int64, error) { return 0, nil }}
	wantError(t, full.check(model, to), "make room, or choose another folder")
	try(t, os.Mkdir(filepath.Join(to, partialPrefix+"tiny"), 0o755), full.check(model, to))
}

func TestAModelThatChangesWhileItIsCopied(t *testing.T) {
	for _, row := range []struct {
		name, want string
		change     func(dir string) error
	}{
		{"a file is written on", "the model changed during the copy; run again when its files are complete",
			func(dir string) error { return os.WriteFile(filepath.Join(dir, "config.json"), []byte("{ }"), 0o644) }},
		{"a file comes", "the model changed during the copy",
			func(dir string) error { return os.WriteFile(filepath.Join(dir, "more.json"), nil, 0o644) }},
		{"it is removed", "no such file", os.RemoveAll},
	} {
		t.Run(row.name, func(t *testing.T) {
			model, _ := aSmallModel(t)
			to := t.TempDir()
			changed := false
			_, _, err := Copy(t.Context(), model, to, func(_, _ int64) {
				if !changed {
					changed = true
					if err := row.change(model); err != nil {
						t.Error(err)
					}
				}
			})
			wantError(t, err, row.want)
			if got := names(t, to); len(got) != 0 {
				t.Errorf("the folder holds %q, want nothing", got)
			}
		})
	}
}

func TestWhatCannotBeCopied(t *testing.T) {
	model, _ := aSmallModel(t)
	for _, row := range []struct {
		name      string
		model, to string
		more      map[string]string
		want      string
	}{
		{"a model that is not there", filepath.Join(model, "nowhere"), t.TempDir(), nil, "no such file"},
		{"a folder within the model's", model, filepath.Join(model, "copies"), nil, "would be inside the model's own folder"},
		{"the model's folder itself", model, model, nil, "would be inside the model's own folder"},
		{"an empty folder", t.TempDir(), t.TempDir(), nil, "the folder holds no files"},
		{"a link that leads nowhere", t.TempDir(), t.TempDir(), map[string]string{"model.safetensors": "->../blobs/gone"}, "model.safetensors: no such file"},
		{"links in a circle", t.TempDir(), t.TempDir(), map[string]string{"a/b": "->."}, "links form a circle"},
	} {
		t.Run(row.name, func(t *testing.T) {
			write(t, row.model, row.more)
			_, _, err := Copy(t.Context(), row.model, row.to, nil)
			wantError(t, err, row.want)
		})
	}
}
