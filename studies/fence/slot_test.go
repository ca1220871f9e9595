package fence

import (
	"encoding/json"
	"testing"
	"time"
)

// If one byte of a slot is changed, the slot is damaged. If its end is missing, the slot is incomplete. A slot of an
// older tuner has no checksum, and can still be read.
func TestEachByteOfASlotCounts(t *testing.T) {
	slot := Slot{Commit, 12, 30, Owner{"abc123", "node-a", 77, time.Unix(1770000000, 0).UTC()}, time.Unix(1770000009, 5).UTC()}
	whole, err := slot.seal()
	try(t, err)
	for i := range whole {
		for _, change := range []byte{1, 6, 0x20, 0x80} {
			changed := append([]byte{}, whole...)
			changed[i] ^= change
			if got, isDamaged, err := unseal(changed); err == nil && got != slot || err != nil && !isDamaged {
				t.Errorf("unseal(%q) = %+v, damaged %t, %v; want damaged", changed, got, isDamaged, err)
			}
		}
		if i < len(whole)-1 { // the last byte only ends the line
			if _, isDamaged, err := unseal(whole[:i]); err == nil || isDamaged {
				t.Errorf("unseal(%q) = damaged %t, %v; want incomplete", whole[:i], isDamaged, err)
			}
		}
	}
	old, err := json.Marshal(slot)
	try(t, err)
	if got, _, err := unseal(append(old, '\n')); err != nil || got != slot {
		t.Errorf("unseal of a slot without a checksum = %+v, %v", got, err)
	}
}
