// Package fence gives a study one owner at a time on a disk that several hosts share. It trusts neither locks nor
// clocks, and never looks into the study.
//
// An owner acknowledges commits in numbered slots, which are files made with O_EXCL. An owner that makes slot n+1 after
// its own slot n knows that nobody took the study in between. A successor claims the next slot; after that the old
// owner can acknowledge nothing. Writes of the old owner may still arrive late. So the successor works on a copy of the
// study in a directory of its own, an epoch. Locks only tell how long to wait.
//
// An owner removes its own slots, except the newest two and the first two of its epoch. If it is killed before that,
// its successor removes them. So each owner leaves at most four slots, and a failed takeover leaves one. It is safe to
// remove these slots:
//   - The newest slot of all is never removed. A successor's claim has the number after the newest slot that it listed.
//     If that listing was old, the claim is not the newest slot, and the next listing shows that.
//   - Claims are never removed. The next slot of a superseded owner is the claim of its successor, so that the old owner
//     learns of the takeover.
package fence

import (
	"errors"
	"io"
	"time"
)

// These are the files of an epoch.
const (
	Database = "study.db"
	Journal  = Database + "-journal" // SQLite's journal of the database
)

// These are the directories of the slots and of the owners' locks. A directory that has slots holds a study.
const (
	SlotDir  = "fence"
	OwnerDir = "owners"
)

// DefaultTTL is the time without a new slot after which an owner counts as dead. An owner gives up when the disk is
// silent for half of that time. So a file server has half a minute to restart before a run is lost; to start vLLM again
// would take longer.
const DefaultTTL = time.Minute

// ErrOwned says that another tuner owns the study, or took it first.
var ErrOwned = errors.New("another tuner owns this study")

// ErrSilent says that the disk did not answer for half the TTL, so that another tuner may soon take the study over.
var ErrSilent = errors.New("the study's disk does not answer")

// ErrLost says that the disk lost acknowledged commits.
var ErrLost = errors.New("the disk lost what it had stored")

// A DamagedError says that the slots are not as a tuner leaves them. The study's owner, or its newest copy, is then
// unknown.
type DamagedError string

func (e DamagedError) Error() string { return string(e) }

// A Disk keeps a study. Names are relative to the study's directory. As on NFS, a listing may be a minute old, and so
// may the answer that a file does not exist. After this host has changed the directory, its listing and such answers
// are up to date.
type Disk interface {
	// Create makes a file. It returns fs.ErrExist if the disk has a file of this name, even if this host's cache does
	// not know that. When it returns nil, the content is on the disk. After another error the file may be there, empty
	// or whole.
	Create(name string, content []byte) error
	// Open reads a file as it is on the disk at the time of each Read.
	Open(name string) (io.ReadCloser, error)
	// Write makes or replaces a file. When it returns nil, the content is on the disk.
	Write(name string, content io.Reader) error
	// List returns the names in a directory.
	List(dir string) ([]string, error)
	// Make makes a directory, unless it exists.
	Make(dir string) error
	// Remove removes a file, or a directory with its content. It returns nil if there is nothing to remove.
	Remove(name string) error
	// Sync waits until the names in a directory are on the disk.
	Sync(dir string) error
	// Lock makes a file and locks it until the returned Closer is closed.
	Lock(name string) (io.Closer, error)
	// Locked says whether another process has locked a file.
	Locked(name string) (bool, error)
	// Locks says what the locks of this disk prove.
	Locks() Locks
}

// Locks says what the locks of a disk prove about an owner.
type Locks int

// The kinds of locks.
const (
	NoLocks      Locks = iota // locks prove nothing, because other hosts do not see them
	SharedLocks               // a free lock proves that its owner is gone; a held lock may belong to a lost host
	CertainLocks              // a held lock also proves that its owner lives, because only this host uses the disk
)
