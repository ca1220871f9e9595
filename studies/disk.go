package studies

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/render"
	"vllmtuner/studies/fence"
	"vllmtuner/studies/rights"
)

// minFree is the free space, in bytes, that a study needs for new trials. A probe takes 4.4 kB
// (docs/evidence/store.md). So a thousand trials with five probes each take 22 MB. A snapshot of these trials takes 22
// MB more, and so does the next snapshot while it is being written.
const minFree = 64 << 20

// slowCommit is the longest time that a small write takes on a healthy disk, even over a network.
const slowCommit = 200 * time.Millisecond

// prepare makes the study's directory, and checks that its disk can be written, has space, and loses no writes.
func prepare(dir string) (Disk, error) {
	if err := makeDir(dir); err != nil {
		if errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrExist) { // a file, or a link to nothing, is in the way
			if _, why := ExamineDisk(dir); why != nil {
				return Disk{}, why
			}
		}
		return Disk{}, markUnusable(fmt.Errorf("make the study's directory: %w%s", err, ownerHint(err, filepath.Dir(dir))))
	}
	disk, err := ExamineDisk(dir)
	if err == nil {
		err = markUnusable(checkOwn(dir))
	}
	return disk, err
}

// checkOwn refuses a study's directory if a part of it is a link, or if this user cannot read and write a part. It runs
// early, because a run that finds this later has already begun a new epoch.
func checkOwn(dir string) error {
	for _, part := range []struct {
		name string
		dir  bool
		what string
	}{
		{fence.SlotDir, true, "the list of the study's owners"}, {fence.OwnerDir, true, "the locks of the owners"}, {snapshotDir, true, "the published snapshots"},
		{currentFile, false, "the name of the newest snapshot"}, {backupDir, true, "the copies in older schemas"},
	} {
		path := filepath.Join(dir, part.name)
		info, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		kind, rights := "directory", uint32(unix.R_OK|unix.W_OK|unix.X_OK)
		if !part.dir {
			kind, rights = "file", unix.R_OK|unix.W_OK
		}
		switch mode := info.Mode(); {
		case mode.Type() == fs.ModeSymlink:
			return unusablef("%s is a link: %s must be in the study's own directory; replace the link by the %s that it leads to", path, part.what, kind)
		case part.dir && !mode.IsDir(), !part.dir && !mode.IsRegular():
			return unusablef("%s is not a %s, so it cannot hold %s: move it to another place", path, kind, part.what)
		}
		if err := unix.Faccessat(unix.AT_FDCWD, path, rights, unix.AT_EACCESS); err != nil {
			return fmt.Errorf("%s cannot be read and written: %w%s", path, err, ownerHint(err, path))
		}
	}
	return checkDatabases(dir)
}

// checkDatabases refuses an epoch (a directory with one owner's copy of the study) that is a link. It also refuses an
// empty database of the first schema, which had no epochs.
func checkDatabases(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if fence.IsEpoch(e.Name()) && e.Type() == fs.ModeSymlink {
			return unusablef("%s is a link: an epoch must be in the study's own directory; replace the link by the directory that it leads to",
				filepath.Join(dir, e.Name()))
		}
	}
	path := filepath.Join(dir, fence.Database)
	info, err := os.Lstat(path)
	if found, _ := hasStudyFiles(dir); err == nil && info.Mode().IsRegular() && info.Size() == 0 && !found {
		return unusablef("%s is empty: if a study was in it, restore it from a backup; otherwise remove the file", path)
	}
	return nil
}

// ownerHint says who owns a directory that this user may not write to. If this user cannot see the directory, the hint
// is about the nearest visible parent. If err does not say that permission is missing, there is no hint.
func ownerHint(err error, dir string) string {
	info, statErr := os.Stat(dir)
	for statErr != nil && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
		info, statErr = os.Stat(dir)
	}
	if !errors.Is(err, fs.ErrPermission) || statErr != nil {
		return ""
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return ""
	}
	name := func(uid int) string {
		if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
			return fmt.Sprintf("%s (uid %d)", u.Username, uid)
		}
		return fmt.Sprintf("uid %d", uid)
	}
	return fmt.Sprintf("; %s belongs to %s with mode %s, and this is %s: run as that user, or use another --root",
		dir, name(int(stat.Uid)), info.Mode().Perm(), name(os.Geteuid()))
}

// makeDir makes a directory and its parents, unless they exist. It returns when the new directories are on the disk.
func makeDir(dir string) error {
	above := filepath.Dir(dir)
	if _, err := os.Stat(above); errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(above); err != nil {
			return err
		}
	}
	err := os.Mkdir(dir, rights.Dir(above))
	if info, statErr := os.Stat(dir); errors.Is(err, fs.ErrExist) && statErr == nil && info.IsDir() {
		return nil
	}
	if err != nil {
		return err
	}
	return syncPath(above)
}

// sweepAfter is the age, by the disk's clock, at which a temporary file is removed. No tuner needs a temporary file for
// that long.
const sweepAfter = time.Hour

// leftovers matches the names of files that a killed tuner may leave: files of a disk check, half a snapshot with
// SQLite's journal, locks that nobody holds. Files with other names belong to the user.
var leftovers = []struct {
	dir  string
	name *regexp.Regexp
}{
	{".", regexp.MustCompile(`^write-check-[0-9]+\.tmp$`)},
	{".", regexp.MustCompile(`^server\.json\.[0-9]+\.tmp$`)}, // the record of servers that a run has started
	{".", refreshName},
	{fence.SlotDir, refreshName},
	{fence.OwnerDir, regexp.MustCompile(`^` + ownerID + `$`)},
	{snapshotDir, regexp.MustCompile(`^[0-9]{12}-[0-9]{12}(\.db|-[0-9]{12}\.delta)\.tmp(-journal|\.delta)?$`)},
	{backupDir, regexp.MustCompile(`^schema-[0-9]+\.db\.tmp(-journal)?$`)},
}

// ownerID matches an ID that thisOwner makes: 26 characters of base32.
const ownerID = `[a-z2-7]{26}`

var refreshName = regexp.MustCompile(`^look-` + ownerID + `$`)

// sweep removes leftovers.
func (s *Store) sweep() error {
	// This owner has just made a slot in the slots' directory. So the directory's time is the present time by the
	// disk's clock.
	slots, err := os.Stat(filepath.Join(s.dir, fence.SlotDir))
	if err != nil {
		return err
	}
	for _, of := range leftovers {
		names, err := s.folder.List(of.dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		for _, name := range names {
			if of.name.MatchString(name) && err == nil {
				err = s.sweepFile(path.Join(of.dir, name), slots.ModTime())
			}
		}
		if err != nil {
			return fmt.Errorf("remove what a killed tuner has left: %w", err)
		}
	}
	return nil
}

// sweepFile removes a file that is old enough, unless a process has it locked.
func (s *Store) sweepFile(name string, now time.Time) error {
	info, err := os.Lstat(filepath.Join(s.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !info.Mode().IsRegular() || now.Sub(info.ModTime()) < sweepAfter {
		return err
	}
	if held, err := s.folder.Locked(name); held || err != nil {
		return err
	}
	return s.folder.Remove(name)
}

// checkName is the name pattern of the files that checkWrite makes.
const checkName = "write-check-*.tmp"

// A Disk describes the disk of a study.
type Disk struct {
	Mount    fence.Mount
	Commit   time.Duration // median time of five small writes; each ends when its data is on the disk
	Warnings []string      // for the user
}

// Owners tells the user how soon the next run can continue a killed run on this disk.
func (d Disk) Owners() string {
	switch d.Mount.Locks() {
	case fence.CertainLocks:
		return "the next run continues a killed one at once"
	case fence.SharedLocks:
		return "shared: the next run continues a killed one after a second; if the other host was cut off, after --takeover-after"
	}
	return "shared, without locks: the next run continues a killed one after --takeover-after"
}

// ExamineDisk describes the disk of a directory for a study. It returns an error if the disk cannot keep a study. This
// is so if the disk cannot be written and synced, ignores O_EXCL, has less free space than a study needs, or has mount
// options that lose writes. If the directory does not exist yet, ExamineDisk examines the nearest existing parent. It
// leaves no file behind.
func ExamineDisk(dir string) (d Disk, err error) {
	defer func() { err = markUnusable(err) }()
	if dir, err = filepath.Abs(dir); err != nil {
		return d, err
	}
	for {
		info, err := os.Stat(dir)
		if err == nil && !info.IsDir() {
			return d, unusablef("%s is a file, not a directory for studies", dir)
		}
		if err := checkLink(dir); err != nil {
			return d, err
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) || dir == filepath.Dir(dir) {
			break // dir exists, or the write below returns the error
		}
		dir = filepath.Dir(dir)
	}
	if err := checkFree(dir); err != nil { // before the first write, whose error would be less clear
		return d, err
	}
	if d.Commit, err = checkWrite(dir); err != nil {
		return d, fmt.Errorf("%s cannot be written: %w%s", dir, err, ownerHint(err, dir))
	}
	if d.Mount, err = fence.MountOf(dir); err != nil {
		return d, err
	}
	if d.Warnings, err = d.Mount.Check(); err != nil {
		return d, unusable{err}
	}
	d.Warnings = append(d.Warnings, slowWarning(d.Commit)...)
	return d, nil
}

// slowWarning warns of a disk on which a small write takes too long.
func slowWarning(commit time.Duration) []string {
	if commit <= slowCommit {
		return nil
	}
	return []string{fmt.Sprintf("a small write takes %s, but at most %s on a healthy disk; each probe waits for several writes; "+
		"check the disk, or the network to it", render.Took(commit), render.Took(slowCommit))}
}

// checkWrite writes 16 KiB to the disk five times and returns the median time. It finds a full or read-only disk
// before GPU time is spent. It also checks that O_EXCL refuses an existing file, because ownership depends on that.
func checkWrite(dir string) (took time.Duration, err error) {
	f, err := os.CreateTemp(dir, checkName)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	again, err := os.OpenFile(f.Name(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, rights.File(dir))
	if err == nil {
		return 0, errors.Join(unusablef("the disk creates a file that already exists (O_EXCL has no effect): two tuners could both own a study"), again.Close())
	}
	if !errors.Is(err, fs.ErrExist) {
		return 0, err
	}
	var all []time.Duration
	for range 5 {
		began := time.Now()
		if _, err := f.Write(make([]byte, 16<<10)); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		all = append(all, time.Since(began))
	}
	return lowerMedian(all), nil
}

// checkFree returns an error when the disk has too little free space for the study in the directory. If there is no
// study yet, it checks the space for a new one.
func checkFree(dir string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return fmt.Errorf("get the free space of %s: %w", dir, err)
	}
	copied, err := copiedSize(dir)
	if err != nil {
		return fmt.Errorf("get the size of the study in %s: %w", dir, err)
	}
	free, need, what := uint64(s.Bavail)*uint64(s.Bsize), minFree+copied, "a study needs"
	if copied > 0 {
		what = "this study, whose database and snapshot are copied when it goes on, needs"
	}
	if free < need {
		return unusablef("%s has only %s free, but %s %s: make room or use another --root", dir, render.Bytes(int64(free)), what, render.Bytes(int64(need)))
	}
	return nil
}

// copiedSize is the number of bytes that a resume copies. A resume copies the database into the next epoch, and writes
// a base snapshot. copiedSize assumes that the largest file of each kind is the newest whole one.
func copiedSize(dir string) (size uint64, err error) {
	for _, patterns := range [][]string{{fence.Database, "e*/" + fence.Database}, {snapshotDir + "/*.db"}} {
		var largest int64
		for _, pattern := range patterns {
			names, err := fs.Glob(os.DirFS(dir), pattern)
			if err != nil {
				return 0, err
			}
			for _, name := range names {
				if info, err := os.Stat(filepath.Join(dir, name)); err == nil { // after an error the file does not count, because it was removed meanwhile
					largest = max(largest, info.Size())
				}
			}
		}
		size += uint64(largest)
	}
	return size, nil
}

// syncPath waits until a file's data, or a directory's names, are on the disk.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Lock makes a directory and locks it, so that only one process uses it at a time. An example is the directory of a
// sweep's servers. The lock lasts until it is closed or the process is gone. If another process has the lock, Lock
// returns ErrLocked.
func Lock(dir string) (lock io.Closer, err error) {
	if _, err := prepare(dir); err != nil {
		return nil, err
	}
	folder, err := fence.OpenFolder(dir, fence.SharedLocks)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	const name = "lock"
	lock, err = folder.Lock(name)
	if errors.Is(err, unix.EWOULDBLOCK) {
		path := filepath.Join(dir, name)
		text, readErr := os.ReadFile(path)
		owner := cmp.Or(strings.TrimSpace(string(text)), fence.Owner{}.String())
		return nil, errors.Join(fmt.Errorf("%w: %s (%s)", ErrLocked, owner, path), readErr)
	}
	if err != nil {
		return nil, err
	}
	if err := folder.Write(name, strings.NewReader(thisOwner().String()+"\n")); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}
