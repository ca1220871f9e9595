package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"vllmtuner/studies"
	"vllmtuner/tuner/studyfile"
)

// A disk on a network that is mounted hard, as it must be, never answers while its server is gone: a call to it then waits in the kernel, and
// nothing but the end of the process ends it.
const (
	storePatience = 90 * time.Second // that a disk may take to answer; after timeo=600, which is usual, its client has asked twice
	storeNotice   = 5 * time.Second  // after which it is said what is waited for
	askEvery      = 2 * time.Second
	lastMoment    = 5 * time.Second // for what is at hand when the user stops it at once
)

// A silentDiskError is that of the disk that a path is on.
type silentDiskError string

func (path silentDiskError) Error() string {
	return fmt.Sprintf("%s does not answer within %s: see that its server runs and can be reached; nfsstat -m and dmesg say more", string(path), storePatience)
}

// Is makes it that of an owner whose disk is silent: nothing is lost, and it may go well the next time.
func (silentDiskError) Is(target error) bool { return target == studies.ErrSilent }

// examineDisk is studies.ExamineDisk with that patience.
func examineDisk(ctx context.Context, dir string) (studies.Disk, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, storePatience, silentDiskError(dir))
	defer cancel()
	return answered(ctx, func() (studies.Disk, error) {
		if err := checkLink(dir); err != nil {
			return studies.Disk{}, err
		}
		return studies.ExamineDisk(dir)
	})
}

// onDisk has a command end where the disk of its study, or of a file that it names, does not answer.
func onDisk(action cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		paths := []string{".", c.String("root")}
		for _, path := range append(c.Args().Slice(), c.String("output")) {
			if !strings.ContainsRune(path, filepath.Separator) { // a study's name, a file in the working directory, a format
				path = filepath.Join(c.String("root"), path)
			}
			paths = append(paths, path)
		}
		_, err := withDisks(c.Context, c.App.ErrWriter, paths, func() (struct{}, error) { return struct{}{}, action(c) })
		return err
	}
}

// readStudyFile is studyfile.Read with patience for its disk.
func readStudyFile(c *cli.Context, path string) (*studyfile.File, error) {
	return withDisks(c.Context, c.App.ErrWriter, []string{path}, func() (*studyfile.File, error) { return studyfile.Read(path) })
}

// withDisks does what needs the disks that some paths are on, however long it takes as long as they answer, and returns what it returns; or that one of them
// does not answer, or, after a last moment for what is at hand, how the context ended. What was to be done then ends with the process.
func withDisks[T any](ctx context.Context, notes io.Writer, paths []string, do func() (T, error)) (T, error) {
	return watched(ctx, diskWatch{notes: notes, paths: paths, ask: askDisk}, do)
}

// A diskWatch asks disks again and again whether they answer.
type diskWatch struct {
	notes io.Writer
	paths []string
	ask   func(path string)
}

func watched[T any](ctx context.Context, w diskWatch, do func() (T, error)) (T, error) {
	watching, enough := context.WithCancel(ctx)
	waiting, end := context.WithCancelCause(context.WithoutCancel(ctx))
	over := make(chan struct{})
	go func() {
		defer close(over)
		err := w.watch(watching)
		if err == nil && sleep(waiting, lastMoment) { // it is not done, so that it was the context that ended
			err = context.Cause(ctx)
		}
		end(err)
	}()
	defer func() {
		end(nil)
		enough()
		<-over
	}()
	return answered(waiting, do)
}

// watch returns when one of the disks does not answer, or when the context ends: then without an error.
func (w diskWatch) watch(ctx context.Context) error {
	for ctx.Err() == nil {
		for _, path := range w.paths {
			if err := w.await(ctx, path); err != nil {
				return err
			}
		}
		sleep(ctx, askEvery)
	}
	return nil
}

// await waits until one disk has answered, or nobody waits for it any more.
func (w diskWatch) await(ctx context.Context, path string) error {
	ctx, answer := context.WithCancel(ctx)
	defer answer()
	go func() { // ends with the process where the disk never answers
		defer answer()
		w.ask(path)
	}()
	if sleep(ctx, storeNotice) {
		fmt.Fprintf(w.notes, "waiting for %s, whose disk does not answer; for %s at most\n", path, storePatience)
		if sleep(ctx, storePatience-storeNotice) {
			return silentDiskError(path)
		}
	}
	return nil
}

// sleep reports whether so much time has passed before the context ended.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// askDisk asks the disk that a path is on, or will be, what no cache of this host can say. What is wrong with the path is for others to find.
func askDisk(path string) {
	var s unix.Statfs_t
	for errors.Is(unix.Statfs(path, &s), fs.ErrNotExist) && path != filepath.Dir(path) {
		path = filepath.Dir(path)
	}
}
