package fence

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
)

// An Owner is one process that owns a study, or wants to.
type Owner struct {
	ID    string    `json:"id"` // a random text
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Since time.Time `json:"since"`
}

// String describes the owner for people.
func (o Owner) String() string {
	if o.ID == "" {
		return "it has not yet said who it is"
	}
	return fmt.Sprintf("pid %d on %s since %s", o.PID, o.Host, o.Since.Format(time.RFC3339))
}

// lockName is the file that an owner keeps locked while it lives.
func (o Owner) lockName() string { return path.Join(OwnerDir, o.ID) }

// A Kind says why a slot was made.
type Kind string

// The kinds.
const (
	Claim     Kind = "claim"    // a takeover begins: the new epoch has the slot's number
	Opened    Kind = "open"     // the new epoch has the whole study
	Commit    Kind = "commit"   // a commit is acknowledged
	Heartbeat Kind = "beat"     // a heartbeat: the owner lives and has nothing to store
	Released  Kind = "released" // the owner gave the study up
)

// A Slot is one step in the life of a study. The sequence of all slots tells who owned the study when.
type Slot struct {
	Kind    Kind      `json:"kind"`
	Epoch   int64     `json:"epoch"`   // the epoch that has the study, or for a claim the epoch to copy; 0 means that there is no epoch yet
	Commits int64     `json:"commits"` // number of acknowledged commits
	Owner   Owner     `json:"owner"`
	Time    time.Time `json:"time"` // by the owner's clock, for people only
}

// A Position describes where the slots of a study end.
type Position struct {
	Top  int64 // number of the newest slot; 0 means that there is none
	Slot Slot  // newest slot that can be read; slot Top may be empty, because its owner died before writing it
}

func slotName(n int64) string { return path.Join(SlotDir, fmt.Sprintf("%012d", n)) }

// slotOf returns the number of a slot from its file name in SlotDir. It is the inverse of slotName.
func slotOf(name string) (n int64, ok bool) {
	n, err := strconv.ParseInt(name, 10, 64)
	return n, err == nil && len(name) == 12
}

// IsSlot reports whether a file in SlotDir has the name of a slot.
func IsSlot(name string) bool { _, ok := slotOf(name); return ok }

// EpochDir is the directory of an epoch. An epoch has the number of the slot that began it.
func EpochDir(epoch int64) string { return fmt.Sprintf("e%012d", epoch) }

// IsEpoch reports whether a directory in a study's directory has the name of an epoch.
func IsEpoch(name string) bool { _, ok := epochOf(name); return ok }

// epochOf is the inverse of EpochDir.
func epochOf(name string) (epoch int64, ok bool) {
	digits, isEpoch := strings.CutPrefix(name, "e")
	epoch, ok = slotOf(digits)
	return epoch, isEpoch && ok && epoch > 0
}

// ReadPosition returns where the slots end. It lists them once, and the listing may be a minute old.
func ReadPosition(d Disk) (Position, error) {
	numbers, err := slotNumbers(d)
	if err != nil || len(numbers) == 0 {
		return Position{}, err
	}
	p := Position{Top: numbers[0]}
	for i, n := range numbers {
		// An owner whose newest slot is empty still has the slot before it. So if a number is missing here, the slots
		// are damaged.
		if i > 0 && n != numbers[i-1]-1 {
			return p, damaged(numbers[i-1])
		}
		p.Slot, err = readSlot(d, n)
		if !errors.Is(err, errUnwritten) {
			return p, err
		}
	}
	// No slot can be read. Without an epoch, no commit was ever acknowledged. With an epoch, slots were lost.
	epoch, err := newestEpoch(d)
	if epoch > 0 {
		err = DamagedError(fmt.Sprintf("no slot in %s can be read, so the study's newest copy is unknown: %s is one copy", SlotDir, EpochDir(epoch)))
	}
	return p, err
}

// slotNumbers returns the numbers of the listed slots, the newest first.
func slotNumbers(d Disk) ([]int64, error) {
	names, err := d.List(SlotDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the slots: %w", err)
	}
	var numbers []int64
	for _, name := range names {
		if n, ok := slotOf(name); ok {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	slices.Reverse(numbers)
	return numbers, nil
}

// A sealedSlot is a slot as it is stored. Sum is the checksum of its other content. Slots of older tuners have no Sum.
type sealedSlot struct {
	Slot
	Sum string `json:"sum,omitempty"`
}

// seal returns the content of a slot's file.
func (s Slot) seal() ([]byte, error) {
	plain, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	content, err := json.Marshal(sealedSlot{s, fmt.Sprintf("%016x", xxhash.Sum64(plain))})
	return append(content, '\n'), err
}

// unseal reads what seal returns. If the content is complete but was changed, isDamaged is true. Any other error means
// that the content is incomplete.
func unseal(content []byte) (s Slot, isDamaged bool, err error) {
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.DisallowUnknownFields() // an unknown field is damage, such as a changed letter in the field name "sum"
	var is sealedSlot
	if err := decoder.Decode(&is); err != nil {
		return s, bytes.HasSuffix(content, []byte("\n")), err
	}
	if is.Sum == "" {
		if decoder.More() {
			return s, false, errors.New("it is followed by more text")
		}
		return is.Slot, false, nil
	}
	again, err := is.Slot.seal()
	if err == nil && !bytes.Equal(bytes.TrimSpace(again), bytes.TrimSpace(content)) {
		return s, true, errors.New("its checksum does not match")
	}
	return is.Slot, false, err
}

// errUnwritten says that a slot was made but not written.
var errUnwritten = errors.New("the slot is empty")

// These constants limit how often readSlot reads an empty slot. Its owner may be about to write it.
const (
	readAgain = 10
	readPause = 20 * time.Millisecond
)

// readSlot reads a slot. It waits up to 200 ms for an empty slot to be written.
func readSlot(d Disk, n int64) (s Slot, err error) {
	for range readAgain {
		var content []byte
		if content, err = readAll(d, slotName(n)); err != nil {
			return Slot{}, fmt.Errorf("read slot %d: %w", n, err)
		}
		s, isDamaged, err := unseal(content)
		switch {
		case err == nil:
			return s, s.check(n)
		case isDamaged:
			return Slot{}, damaged(n)
		}
		time.Sleep(readPause)
	}
	return Slot{}, errUnwritten
}

// damaged returns the error for a slot with content that no tuner can have written.
func damaged(n int64) error {
	return DamagedError(fmt.Sprintf("slot %d in %s is damaged, so the study's owner is unknown: restore it from a backup, or begin a study under another name "+
		"and import this one (tuner import)", n, SlotDir))
}

// idRule restricts an owner's ID, because it becomes the name of a file that is removed.
var idRule = regexp.MustCompile(`^[A-Za-z0-9]{1,64}$`)

// check refuses a slot that no tuner can have written.
func (s Slot) check(n int64) error {
	known := slices.Contains([]Kind{Claim, Opened, Commit, Heartbeat, Released}, s.Kind)
	if !known || !idRule.MatchString(s.Owner.ID) || s.Epoch < 0 || s.Epoch > n || s.Epoch == 0 && s.Kind != Claim {
		return damaged(n)
	}
	return nil
}

func readAll(d Disk, name string) ([]byte, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	content, err := io.ReadAll(io.LimitReader(f, 64<<10))
	return content, errors.Join(err, f.Close())
}
