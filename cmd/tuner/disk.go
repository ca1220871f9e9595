package main

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/silent"
	"vllmtuner/trial/live"
	"vllmtuner/tuner/studyfile"
)

// examineDisk examines the disk that holds dir, and gives up when the disk does not answer.
func examineDisk(ctx context.Context, dir string) (studies.Disk, error) {
	return silent.Within(ctx, dir, func() (studies.Disk, error) { return studies.ExamineDisk(dir) })
}

// checkStudy returns an error if a run could not begin or continue its study in dir. It only reads.
func checkStudy(ctx context.Context, dir string, begun studies.New) (studies.Disk, error) {
	return silent.Within(ctx, dir, func() (studies.Disk, error) {
		if err := cmp.Or(studies.CheckDir(dir), live.CheckRecord(dir)); err != nil {
			return studies.Disk{}, err
		}
		disk, err := studies.CheckOpen(dir, begun)
		if err != nil {
			return disk, err
		}
		life, err := studies.LifeOf(ctx, dir)
		if err == nil && life.Alive {
			err = fmt.Errorf("%w: %s", studies.ErrOwned, life.Owner)
		}
		return disk, err
	})
}

// onDisk makes an action give up when a disk does not answer. It watches the disks of all paths that the command line
// names.
func onDisk(action cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		paths := []string{".", c.String("root")}
		for _, path := range append(c.Args().Slice(), c.String("output")) {
			if !strings.ContainsRune(path, filepath.Separator) { // the argument may be a study's name; if it is a path, watching one more path does no harm
				path = filepath.Join(c.String("root"), path)
			}
			paths = append(paths, path)
		}
		_, err := silent.Watch(c.Context, c.App.ErrWriter, paths, func() (struct{}, error) { return struct{}{}, action(c) })
		return err
	}
}

// readStudyFile reads a study file, and gives up when its disk does not answer.
func readStudyFile(c *cli.Context, path string) (*studyfile.File, error) {
	return silent.Watch(c.Context, c.App.ErrWriter, []string{path}, func() (*studyfile.File, error) { return studyfile.Read(path) })
}
