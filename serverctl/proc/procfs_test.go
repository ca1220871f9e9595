package proc

import (
	"slices"
	"testing"
)

func TestParseStat(t *testing.T) {
	const rest = " S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 3 0 987654321 1000 200"
	for _, row := range []struct {
		name, line string
		want       stat
		bad        bool
	}{
		{"an ordinary line", "42 (vllm)" + rest, stat{42, 'S', 1, 7, 3, 987654321}, false},
		{"a command with spaces and parentheses", "42 (a) R (b ))" + rest, stat{42, 'S', 1, 7, 3, 987654321}, false},
		{"a line cut short", "42 (vllm) S 1 7", stat{}, true},
		{"no command", "42 S 1 7 7", stat{}, true},
		{"empty", "", stat{}, true},
	} {
		got, err := parseStat(row.line)
		if (err != nil) != row.bad || !row.bad && got != row.want {
			t.Errorf("%s: parseStat = %+v, %v, want %+v, error %v", row.name, got, err, row.want, row.bad)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add("42 (a) R (b ) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654321 1000 200")
	f.Add(")(")
	f.Fuzz(func(t *testing.T, line string) {
		if s, err := parseStat(line); err == nil && s.state == 0 {
			t.Errorf("parseStat(%q) succeeds without a state", line)
		}
	})
}

func TestListenersAreThoseInListenState(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 31337 1 0 100 0 0 10 0
   1: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 31338 1 0 20 4 30 10 -1
   2: 00000000:1F41 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 31339 1 0 100 0 0 10 0
`
	if got := listeners(table, 8000); !slices.Equal(got, []string{"31337"}) {
		t.Errorf("listeners(8000) = %v, want 31337 alone", got)
	}
	if got := listeners("garbage\n0A", 8000); len(got) != 0 {
		t.Errorf("listeners of garbage = %v", got)
	}
}
