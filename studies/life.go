package studies

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"vllmtuner/studies/fence"
)

// ReadLive calls read for a published study and adds whether its owner lives. A study published as Running becomes
// Stopped, or NotBegun, if its owner is known to be gone. Otherwise Life has what is known of the owner.
func ReadLive(ctx context.Context, dir string, read func(dir string) (Study, error)) (Study, error) {
	before, unknown := snapshots(dir) // if the snapshots cannot be listed, read returns the reason
	study, err := read(dir)
	if err != nil || study.State != Running {
		return study, err
	}
	life, err := LifeOf(ctx, dir)
	if err != nil {
		study.Unseen = err.Error()
		return study, ctx.Err()
	}
	study.Life = life
	if !life.Gone {
		return study, nil
	}
	// The owner may have published the study's end after the first read. A snapshot name is used once, so if the newest
	// name is the same as before that read, nothing was published since.
	after, err := snapshots(dir)
	if errors.Join(unknown, err) != nil || after[0] != before[0] {
		if study, err = read(dir); err != nil || study.State != Running {
			return study, err
		}
	}
	study.State, study.Life = Stopped, life
	if len(study.Trials) == 0 {
		study.State = NotBegun
	}
	return study, nil
}

// LifeOf says whether the owner of the study in a directory lives. It never delays the owner.
func LifeOf(ctx context.Context, dir string) (life fence.Life, err error) {
	folder, err := openFolder(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fence.Life{Gone: true}, nil
	}
	if err == nil {
		life, err = fence.LifeOf(ctx, folder)
		err = errors.Join(err, folder.Close())
	}
	if err != nil {
		err = fmt.Errorf("look for the study's owner: %w", err)
	}
	return life, err
}

// openFolder opens a study's directory with the kind of locks of its disk.
func openFolder(dir string) (*fence.Folder, error) {
	mount, err := fence.MountOf(dir)
	if err != nil {
		return nil, err
	}
	return fence.OpenFolder(dir, mount.Locks())
}
