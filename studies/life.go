package studies

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"vllmtuner/studies/fence"
)

// ReadLive reads a published study with the given function, and finds out whether the study's owner is alive. If the
// owner of a Running study is gone, the State becomes Stopped, or NotBegun if there are no trials. If the study was
// published as Running, the field Life says what is known of the owner.
func ReadLive(ctx context.Context, dir string, readFrom func(dir string) (Study, error)) (Study, error) {
	before, unknown := snapshots(dir) // if this fails, readFrom returns the reason
	study, err := readFrom(dir)
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
	// The owner may have published the study's end after the first read. A snapshot name is used only once. So if the
	// newest name has not changed since that read, nothing was published.
	after, err := snapshots(dir)
	if errors.Join(unknown, err) != nil || after[0] != before[0] {
		if study, err = readFrom(dir); err != nil || study.State != Running {
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
		err = fmt.Errorf("find the study's owner: %w", err)
	}
	return life, err
}

// openFolder opens a study's directory. The Folder then knows what the locks of its disk prove about an owner.
func openFolder(dir string) (*fence.Folder, error) {
	mount, err := fence.MountOf(dir)
	if err != nil {
		return nil, err
	}
	return fence.OpenFolder(dir, mount.Locks())
}
