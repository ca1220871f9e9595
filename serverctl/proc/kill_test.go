package proc

import "testing"

// A process may be alive when /proc is listed, and dead when the scan reads it. Meanwhile it may have forked another
// process that is not in the list.
func TestKillAllGoesOnUntilNobodyIsNewlyDead(t *testing.T) {
	const never = 1 << 30 // no process has this PID (PID_MAX_LIMIT is 4 million)
	one, other, again := stat{pid: never, startTime: 1}, stat{pid: never + 1, startTime: 2}, stat{pid: never, startTime: 3}
	for _, row := range []struct {
		name  string
		dead  [][]stat // what each scan finds; later scans find nobody
		scans int
	}{
		{"nobody", nil, 2},
		{"one dead all the time, as a zombie that is not ours to reap", [][]stat{{one}, {one}, {one}, {one}}, 3},
		{"one dead at first", [][]stat{{one}}, 3},
		{"one that dies between two scans", [][]stat{nil, {one}}, 4},
		{"one after the other", [][]stat{{one}, {other}, nil, {again}}, 6},
	} {
		scans := 0
		killed, err := killAll(1, "", func() (treeState, error) {
			scans++
			if scans <= len(row.dead) {
				return treeState{dead: row.dead[scans-1]}, nil
			}
			return treeState{}, nil
		})
		if err != nil || len(killed) > 0 || scans != row.scans {
			t.Errorf("%s: killAll = %v, %v after %d scans, want nobody after %d", row.name, killed, err, scans, row.scans)
		}
	}
}
