package main

import (
	"cmp"
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
)

// A disk on a network that is mounted hard, as it must be, never answers while its server is gone: a call to it then waits in the kernel, and
// nothing but the end of the process ends it.
const (
	storePatience = time.Minute     // that a disk may take to answer
	storeNotice   = 5 * time.Second // after which it is said what is waited for
	askEvery      = 2 * time.Second
)

// errSilentDisk is that of a disk that does not answer.
func errSilentDisk(dir string) error {
	return fmt.Errorf("%s does not answer within %s: see that its server runs and can be reached; nfsstat -m and dmesg say more", dir, storePatience)
}

// examineDisk is studies.ExamineDisk with that patience.
func examineDisk(ctx context.Context, dir string) (studies.Disk, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, storePatience, errSilentDisk(dir))
	defer cancel()
	return answered(ctx, func() (studies.Disk, error) { return studies.ExamineDisk(dir) })
}

// onDisk has a command end where the disk of its studies or of another file that it names does not answer.
func onDisk(action cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		places := []string{c.String("root")}
		for _, path := range append(c.Args().Slice(), c.String("output")) {
			if strings.ContainsRune(path, filepath.Separator) { // else it is a study's name, or in the working directory
				places = append(places, path)
			}
		}
		return withDisks(c.Context, c.App.ErrWriter, places, func() error { return action(c) })
	}
}

// withDisks does what needs the disks that some paths are on, however long it takes as long as they answer, and returns its error; or that one of them
// does not answer, or how the context ended. What was to be done then ends with the process.
func withDisks(ctx context.Context, notes io.Writer, paths []string, do func() error) error {
	return diskWatch{notes: notes, paths: paths, ask: askDisk}.during(ctx, do)
}

// A diskWatch asks disks again and again whether they answer.
type diskWatch struct {
	notes io.Writer
	paths []string
	ask   func(path string)
}

func (w diskWatch) during(ctx context.Context, do func() error) error {
	ctx, end := context.WithCancelCause(ctx)
	over := make(chan struct{})
	go func() {
		defer close(over)
		if err := w.watch(ctx); err != nil {
			end(err)
		}
	}()
	defer func() {
		end(nil)
		<-over
	}()
	_, err := answered(ctx, func() (struct{}, error) { return struct{}{}, do() })
	return err
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
			return errSilentDisk(path)
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
	for errors.Is(unix.Statfs(cmp.Or(path, "."), &s), fs.ErrNotExist) && path != filepath.Dir(path) {
		path = filepath.Dir(path)
	}
}
