package proc

import "testing"

// One that lives when /proc is listed and is dead when it is read may have borne another that was not listed.
func TestKillAllGoesOnUntilNobodyIsNewlyDead(t *testing.T) {
	const never = 1 << 30 // no process has such a number (PID_MAX_LIMIT is 4 million)
	one, other, again := stat{pid: never, startTime: 1}, stat{pid: never + 1, startTime: 2}, stat{pid: never, startTime: 3}
	for _, row := range []struct {
		name  string
		dead  [][]stat // look by look, then none
		looks int
	}{
		{"nobody", nil, 2},
		{"one dead all the time, as a zombie that is not ours to reap", [][]stat{{one}, {one}, {one}, {one}}, 3},
		{"one dead at first", [][]stat{{one}}, 3},
		{"one that dies between two looks", [][]stat{nil, {one}}, 4},
		{"one after the other", [][]stat{{one}, {other}, nil, {again}}, 6},
	} {
		looks := 0
		killed, err := killAll(1, "", func() (family, error) {
			looks++
			if looks <= len(row.dead) {
				return family{dead: row.dead[looks-1]}, nil
			}
			return family{}, nil
		})
		if err != nil || len(killed) > 0 || looks != row.looks {
			t.Errorf("%s: killAll = %v, %v after %d looks, want nobody after %d", row.name, killed, err, looks, row.looks)
		}
	}
}
