package report

import (
	"strings"
	"testing"
	"time"
)

// A study may seem to be stored in the future, because the clock of another host is ahead.
func TestAnAgeIsNeverNegative(t *testing.T) {
	list := List{Studies: []Entry{{Name: "s", Updated: time.Now().Add(time.Hour)}}}
	if text := list.Text(80); !strings.Contains(text, " 0 s ago") {
		t.Errorf("want 0 s ago in\n%s", text)
	}
}
