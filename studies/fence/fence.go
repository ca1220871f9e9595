// Package fence gives a study one owner at a time on a disk that several hosts share, trusting neither locks nor clocks.
// It never looks into the study.
//
// What the owner acknowledges goes into numbered slots, files made with O_EXCL: whoever makes slot n+1 after its own slot n knows
// that nobody else has. A successor claims the next slot, after which the owner before it can acknowledge nothing more. It goes on
// with a copy of the study in a directory of its own, an epoch, since writes of that owner may still be on their way. Locks
// only tell how long to wait.
//
// An owner removes slots of its own that are neither the newest two nor the first two of its epoch, and its successor those that it had no time to
// remove, so that each owner leaves no more than four, and a takeover that failed one. That is safe:
//   - The newest slot of all is never removed. So a claim, one above a number that was listed at any time, is either the newest slot
//     when it is made, or lies below the newest, which the list after it shows.
//   - Claims are never removed. So an owner that was superseded, whose next slot is the claim that superseded it, is told so.
package fence

import (
	"errors"
	"io"
	"time"
)

// The files of an epoch.
const (
	Database = "study.db"
	Journal  = Database + "-journal" // SQLite's
)

// Where the slots are, by which a directory is known to hold a study, and the locks of their owners.
const (
	SlotDir  = "fence"
	OwnerDir = "owners"
)

// DefaultTTL is after what time an owner is taken for dead, unless somebody says otherwise. It leaves the owner half a minute to find a server again that
// restarts: starting vLLM once more would take longer.
const DefaultTTL = time.Minute

// ErrOwned says that another tuner owns the study, or was quicker to take it.
var ErrOwned = errors.New("another tuner owns this study")

// ErrSilent says that nothing could be acknowledged for so long that others may take this owner for dead.
var ErrSilent = errors.New("the study's disk does not answer")

// ErrLost says that the disk lost what was acknowledged.
var ErrLost = errors.New("the disk lost what it had stored")

// A DamagedError says that the slots are not as tuners leave them, so that it is not known whose a study is, or which of its copies is the last.
type DamagedError string

func (e DamagedError) Error() string { return string(e) }

// A Disk keeps a study. Names are relative to the study's directory. What is listed, and that a file does not exist, may be news of a
// minute ago, as on NFS, unless this host has changed the same directory since.
type Disk interface {
	// Create makes a file, or returns fs.ErrExist if there is one, whatever this host believes. When it returns nil the
	// content is on the disk. After another error the file may be there, empty or whole.
	Create(name string, content []byte) error
	// Open reads a file as it is on the disk at the time of each Read.
	Open(name string) (io.ReadCloser, error)
	// Write makes or replaces a file. When it returns nil the content is on the disk.
	Write(name string, content io.Reader) error
	// List returns the names in a directory.
	List(dir string) ([]string, error)
	// Make makes a directory, unless it is there.
	Make(dir string) error
	// Remove removes a file, or a directory with all in it, if it is there.
	Remove(name string) error
	// Sync waits until the names in a directory are on the disk.
	Sync(dir string) error
	// Lock makes a file and keeps it locked until it is closed.
	Lock(name string) (io.Closer, error)
	// Locked says whether another process has locked a file.
	Locked(name string) (bool, error)
	// Locks says what locks are worth.
	Locks() Locks
}

// Locks is what the locks of a disk are worth.
type Locks int

// The worths.
const (
	NoLocks      Locks = iota // nothing: another host does not see them
	SharedLocks               // one that is free has no living owner; one that is held may be that of a lost host
	CertainLocks              // one that is held has a living owner too: the disk is this host's own
)
