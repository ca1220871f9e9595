package report

import (
	"strings"
	"testing"
	"time"
)

// The clock of another host may be ahead of ours.
func TestListStoresNothingInTheFuture(t *testing.T) {
	list := List{Studies: []Entry{{Name: "s", Updated: time.Now().Add(time.Hour)}}}
	if text := list.Text(80); !strings.Contains(text, " 0 s ago") {
		t.Errorf("a study that was stored by a clock ahead of ours is listed as\n%s", text)
	}
}
