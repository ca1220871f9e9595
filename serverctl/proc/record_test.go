package proc

import (
	"slices"
	"strings"
	"syscall"
	"testing"
)

// If the watchdog was killed before its owner, the next run ends what the owner left behind.
func TestReclaimAfterTheOwnerWasKilled(t *testing.T) {
	inBothWays(t, func(t *testing.T) {
		o := startOwner(t, "own family")
		if len(o.Members) != 3 {
			t.Fatalf("members = %v; want the leader and two children", o.Members)
		}
		record := o.Records[0]
		o.end(t, o.Watchdog, syscall.SIGKILL)
		o.kill(t)
		eventually(t, "the leader dies with its owner", func() bool { return !alive(record.PID) })

		stranger := start(t, "polite", "ready")
		left := slices.DeleteFunc(o.Members, func(pid int) bool { return pid == record.PID })
		killed, err := Reclaim(record)
		if err != nil || !slices.Equal(killed, left) {
			t.Errorf("Reclaim() = %v, %v; want %v", killed, err, left)
		}
		if !alive(stranger.record.PID) {
			t.Error("Reclaim killed a stranger")
		}
		if exists(record.Cgroup) {
			t.Errorf("the cgroup %s is left", record.Cgroup)
		}
		if killed, err := Reclaim(record); err != nil || len(killed) > 0 {
			t.Errorf("a second Reclaim() = %v, %v; want nothing to do", killed, err)
		}
	})
}

func TestReclaimSparesWhatIsNotTheRecordedServer(t *testing.T) {
	stranger := start(t, "polite", "ready")
	mine := stranger.Record()
	for _, row := range []struct {
		name   string
		change func(*Record)
	}{
		{"another process got the PID", func(r *Record) { r.StartTime--; r.Token, r.Cgroup = "other", "" }},
		{"the machine was booted since", func(r *Record) { r.BootID = "earlier" }},
		{"the PID is one of another container", func(r *Record) { r.PIDNamespace, r.Token, r.Cgroup = "pid:[1]", "other", "" }},
		{"the cgroup is not named for the token", func(r *Record) { r.StartTime--; r.Token = "other" }},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := mine
			row.change(&r)
			if killed, err := Reclaim(r); err != nil || len(killed) > 0 || !alive(mine.PID) {
				t.Errorf("Reclaim() = %v, %v, alive %v; want it spared", killed, err, alive(mine.PID))
			}
		})
	}
	if _, err := Reclaim(Record{Token: "other"}); err == nil || !strings.Contains(err.Error(), "names no process") {
		t.Errorf("Reclaim(no number) = %v, want an error", err)
	}
	if _, err := Reclaim(Record{PID: mine.PID, BootID: mine.BootID}); err == nil || !strings.Contains(err.Error(), "no token") {
		t.Errorf("Reclaim(no token) = %v, want an error: most processes have none", err)
	}
	killed, err := Reclaim(Record{PID: mine.PID, StartTime: mine.StartTime, BootID: mine.BootID, Token: "lost"})
	if err != nil || !slices.Equal(killed, []int{mine.PID}) {
		t.Errorf("Reclaim by session = %v, %v; want %d killed", killed, err, mine.PID)
	}
}
