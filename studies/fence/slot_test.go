package fence

import (
	"encoding/json"
	"testing"
	"time"
)

// A change of any byte damages a slot. An incomplete slot counts as none. A slot of an older tuner has no checksum.
func TestEachByteOfASlotCounts(t *testing.T) {
	slot := Slot{Commit, 12, 30, Owner{"abc123", "node-a", 77, time.Unix(1770000000, 0).UTC()}, time.Unix(1770000009, 5).UTC()}
	whole, err := slot.seal()
	if err != nil {
		t.Fatal(err)
	}
	for i := range whole {
		for _, change := range []byte{1, 6, 0x20, 0x80} {
			harmed := append([]byte{}, whole...)
			harmed[i] ^= change
			if got, isDamaged, err := unseal(harmed); err == nil && got != slot || err != nil && !isDamaged {
				t.Errorf("%q is %+v, damaged %t, %v", harmed, got, isDamaged, err)
			}
		}
		if i < len(whole)-1 { // the last is the end of the line
			if _, isDamaged, err := unseal(whole[:i]); err == nil || isDamaged {
				t.Errorf("the beginning %q is damaged %t, %v; want that it was not written to its end", whole[:i], isDamaged, err)
			}
		}
	}
	old, err := json.Marshal(slot)
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := unseal(append(old, '\n')); err != nil || got != slot {
		t.Errorf("a slot of an older tuner is %+v, %v", got, err)
	}
}
