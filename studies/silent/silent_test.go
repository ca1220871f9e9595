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

// A command waits for its disks only while they answer.
func TestWatchGivesUpOnASilentDisk(t *testing.T) {
	errDone, errStop, never := errors.New("done"), errors.New("stopped at once"), 24*time.Hour
	for _, tt := range []struct {
		name          string
		silent, takes time.Duration // the second disk is silent for so long, from 10 s on; the command takes so long
		signal        time.Duration // when the user stops it at once
		want          string        // part of the error
		after         time.Duration
		noted         bool
	}{
		{"it answers", 0, 10 * time.Minute, never, "done", 10 * time.Minute, false},
		{"it is slow", 3 * time.Second, 10 * time.Minute, never, "done", 10 * time.Minute, false},
		{"it answers again", 80 * time.Second, 10 * time.Minute, never, "done", 10 * time.Minute, true},
		{"it is silent", never, never, never, "/mnt/b does not answer within 1m30s", 100 * time.Second, true},
		{"the command needs nothing of it", never, 20 * time.Second, never, "done", 20 * time.Second, true},
		{"the user stops it", never, never, 12 * time.Second, errStop.Error(), 17 * time.Second, false},
		{"the user stops it, and it ends well a moment later", 0, 14 * time.Second, 12 * time.Second, "done", 14 * time.Second, false},
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
					t.Errorf("it ends after %s with %v, want %s and %q", took, err, tt.after, tt.want)
				}
				if silent := strings.Contains(tt.want, "does not answer"); errors.Is(err, fence.ErrSilent) != silent {
					t.Errorf("%v is fence.ErrSilent: %v, want %v", err, !silent, silent)
				}
				if noted := strings.Count(notes.String(), "waiting for /mnt/b, whose disk does not answer"); (noted > 0) != tt.noted || noted > 1 {
					t.Errorf("it says %q, want a note: %v", &notes, tt.noted)
				}
				time.Sleep(2 * never) // the goroutines that were left end in this bubble
			})
		})
	}
}

// A path that does not exist is on the disk of the directory above it.
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
