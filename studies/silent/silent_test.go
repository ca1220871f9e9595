package silent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/studies/fence"
)

// Watch ends when a disk is silent for too long, when the user stops it, or when the command is done.
func TestWatchGivesUpOnASilentDisk(t *testing.T) {
	errDone, errStop, never := errors.New("done"), errors.New("stopped at once"), 24*time.Hour
	for _, tt := range []struct {
		name          string
		silent, takes time.Duration // silent: how long the second disk is silent, from 10 s on; takes: how long the command takes
		signal        time.Duration // when the user stops the command
		want          string        // part of the error
		after         time.Duration
		noted         bool
	}{
		{"the disk answers", 0, 10 * time.Minute, never, "done", 10 * time.Minute, false},
		{"the disk is slow", 3 * time.Second, 10 * time.Minute, never, "done", 10 * time.Minute, false},
		{"the disk answers again", 80 * time.Second, 10 * time.Minute, never, "done", 10 * time.Minute, true},
		{"the disk is silent", never, never, never, "/mnt/b does not answer within 1 min 30 s", 100 * time.Second, true},
		{"the command does not need the silent disk", never, 20 * time.Second, never, "done", 20 * time.Second, true},
		{"the user stops the command", never, never, 12 * time.Second, errStop.Error(), 17 * time.Second, false},
		{"the user stops the command, and it ends a moment later", 0, 14 * time.Second, 12 * time.Second, "done", 14 * time.Second, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				ctx, stop := context.WithCancelCause(t.Context())
				time.AfterFunc(tt.signal, func() { stop(errStop) })
				var notes bytes.Buffer
				ask := func(path string) {
					if at := time.Since(began); path == "/mnt/b" && at >= 10*time.Second && at < 10*time.Second+tt.silent {
						time.Sleep(10*time.Second + tt.silent - at)
					}
				}
				_, err := watch(ctx, watcher{&notes, []string{"/mnt/a", "/mnt/b"}, ask}, func() (int, error) {
					time.Sleep(tt.takes)
					return 0, errDone
				})
				if took := time.Since(began); err == nil || !strings.Contains(err.Error(), tt.want) || took != tt.after {
					t.Errorf("watch = %v after %s, want %q after %s", err, took, tt.want, tt.after)
				}
				if silent := strings.Contains(tt.want, "does not answer"); errors.Is(err, fence.ErrSilent) != silent {
					t.Errorf("%v is fence.ErrSilent: %t, want %t", err, !silent, silent)
				}
				if noted := strings.Count(notes.String(), "the disk of /mnt/b does not answer; waiting"); (noted > 0) != tt.noted || noted > 1 {
					t.Errorf("the notes are %q, want a note: %t", &notes, tt.noted)
				}
				time.Sleep(2 * never) // synctest requires that all goroutines end, also those that still wait
			})
		})
	}
}

// askDisk ends for any path, also for one that does not exist.
func TestAskDiskEnds(t *testing.T) {
	for _, path := range []string{"", ".", "no-study", "no/such/study", t.TempDir() + "/no/such/study", "/no-such-root/study", "no\x00path"} {
		askDisk(path)
	}
}

// Await does not wait for a call that nothing can end, such as one to a disk whose server is gone.
func TestAwait(t *testing.T) {
	if got, err := Await(t.Context(), func() (int, error) { return 1, io.EOF }); got != 1 || !errors.Is(err, io.EOF) {
		t.Errorf("Await = %d, %v; want the result", got, err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrClosedPipe)
	never := make(chan struct{})
	defer close(never)
	got, err := Await(ctx, func() (int, error) { <-never; return 1, nil })
	if got != 0 || !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Await = %d, %v; want the cause of the context's end", got, err)
	}
}
