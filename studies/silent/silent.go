// Package silent gives up on disks that no longer answer. It never looks at what is on them.
//
// Network disks must be mounted with the option hard. Such a disk does not answer while its server is gone. A call to
// the disk then waits in the kernel, and only the end of the process ends the call.
package silent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/render"
	"vllmtuner/studies/fence"
)

const (
	// patience is how long a disk may take to answer. In this time, an NFS client with the default timeo=600 has sent
	// its request twice.
	patience    = 90 * time.Second
	noticeAfter = 5 * time.Second // after this time, the user learns which disk the command waits for
	askInterval = 2 * time.Second
	finishTime  = 5 * time.Second // how long the current step may go on after the user stops the command
)

// A DiskError says that the disk of a path does not answer.
type DiskError string

func (path DiskError) Error() string {
	return fmt.Sprintf("%s does not answer within %s; check that its server runs and can be reached (nfsstat -m and dmesg say more)", string(path), render.Took(patience))
}

// Is matches fence.ErrSilent: nothing is lost, and the next try may succeed.
func (DiskError) Is(target error) bool { return target == fence.ErrSilent }

// Await returns the results of the operation. If ctx ends first, Await returns the cause, and the operation continues
// in the background.
func Await[T any](ctx context.Context, operation func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		value, err := operation()
		answers <- answer{value, err}
	}()
	select {
	case got := <-answers:
		return got.value, got.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

// Within runs the operation. If that takes longer than patience, Within returns a DiskError for path.
func Within[T any](ctx context.Context, path string, operation func() (T, error)) (T, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, DiskError(path))
	defer cancel()
	return Await(ctx, operation)
}

// Watch runs the operation while the disks of the paths answer. It gives up when one of the disks has been silent for
// patience. When ctx ends, the operation gets another five seconds. While a disk is slow, Watch writes messages for the
// user to notes.
func Watch[T any](ctx context.Context, notes io.Writer, paths []string, operation func() (T, error)) (T, error) {
	return watch(ctx, watcher{notes: notes, paths: paths, ask: askDisk}, operation)
}

// A watcher checks, again and again, whether disks answer.
type watcher struct {
	notes io.Writer
	paths []string
	ask   func(path string) // a function that returns when the disk has answered
}

func watch[T any](ctx context.Context, w watcher, operation func() (T, error)) (T, error) {
	watching, stop := context.WithCancel(ctx)
	waiting, giveUp := context.WithCancelCause(context.WithoutCancel(ctx))
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		err := w.run(watching)
		if err == nil && fence.Sleep(waiting, finishTime) == nil { // ctx has ended, and the operation is still running
			err = context.Cause(ctx)
		}
		giveUp(err)
	}()
	defer func() {
		giveUp(nil)
		stop()
		<-gone
	}()
	return Await(waiting, operation)
}

// run returns an error when a disk is silent, and nil when the context ends.
func (w watcher) run(ctx context.Context) error {
	for ctx.Err() == nil {
		for _, path := range w.paths {
			if err := w.await(ctx, path); err != nil {
				return err
			}
		}
		_ = fence.Sleep(ctx, askInterval)
	}
	return nil
}

// await returns nil when the disk of one path has answered, or when the context ends. If neither happens within
// patience, it returns a DiskError.
func (w watcher) await(ctx context.Context, path string) error {
	ctx, answered := context.WithCancel(ctx)
	defer answered()
	go func() { // if the disk never answers, this goroutine runs until the process ends
		defer answered()
		w.ask(path)
	}()
	if fence.Sleep(ctx, noticeAfter) == nil {
		fmt.Fprintf(w.notes, "the disk of %s does not answer; waiting for at most %s\n", path, render.Took(patience))
		if fence.Sleep(ctx, patience-noticeAfter) == nil {
			return DiskError(path)
		}
	}
	return nil
}

// askDisk asks the disk of a path for its size, which this host does not cache. If the path does not exist, it asks for
// the nearest parent that exists. It ignores errors.
func askDisk(path string) {
	var s unix.Statfs_t
	for errors.Is(unix.Statfs(path, &s), fs.ErrNotExist) && path != filepath.Dir(path) {
		path = filepath.Dir(path)
	}
}
