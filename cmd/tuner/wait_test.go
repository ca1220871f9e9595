package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/studies"
)

// A run waits for another owner no longer than it was told, and takes the study soon after that owner has ended.
func TestARunWaitsForTheOwner(t *testing.T) {
	const endless = time.Hour
	broken := errors.New("the disk is full")
	for _, row := range []struct {
		name         string
		wait, owned  time.Duration // how long the run waits, and the other owner lives
		then         error         // what Open returns after that
		least, most  time.Duration // when whenFree returns
		want         error
		saysItWaited bool
	}{
		{"nobody owns it", time.Minute, 0, nil, 0, 0, nil, false},
		{"it does not wait", 0, endless, nil, 0, 0, studies.ErrOwned, false},
		{"the owner ends", 15 * time.Minute, 7 * time.Minute, nil, 7 * time.Minute, 7*time.Minute + ownerPause, nil, false},
		{"the owner does not end", time.Minute, endless, nil, time.Minute, time.Minute, studies.ErrOwned, true},
		{"the wait is shorter than a pause", time.Second, endless, nil, time.Second, time.Second, studies.ErrOwned, true},
		{"then the disk is full", time.Minute, 20 * time.Second, broken, 20 * time.Second, 20*time.Second + ownerPause, broken, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			begin, said := time.Now(), new(strings.Builder)
			_, err := whenFree(t.Context(), row.wait, said, func() (*studies.Store, error) {
				if time.Since(begin) < row.owned {
					return nil, fmt.Errorf("%w: pid 7", studies.ErrOwned)
				}
				return nil, row.then
			})
			if took := time.Since(begin); !errors.Is(err, row.want) || took < row.least || took > row.most {
				t.Errorf("%s: %v after %s, want %v after %s to %s", row.name, err, took, row.want, row.least, row.most)
			}
			if waited := err != nil && strings.HasSuffix(err.Error(), "for its end"); waited != row.saysItWaited {
				t.Errorf("%s: %v", row.name, err)
			}
			if told := strings.Count(said.String(), "pid 7; waiting up to"); told != min(1, int(row.wait*row.owned)) {
				t.Errorf("%s: the user reads %q", row.name, said)
			}
		})
	}
}

func TestTheWaitForTheOwnerCanBeInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
		defer cancel()
		begin := time.Now()
		_, err := whenFree(ctx, time.Hour, new(strings.Builder), func() (*studies.Store, error) { return nil, studies.ErrOwned })
		if took := time.Since(begin); !errors.Is(err, context.DeadlineExceeded) || took != 8*time.Second {
			t.Errorf("after %s: %v", took, err)
		}
	})
}

// A run that waits takes the study when the owner has finished its probe, and goes on with it.
func TestARunFollowsAnOwnerThatEnds(t *testing.T) {
	t.Parallel()
	first := startLongOwner(t, 3)
	first.await(t, moments[3])
	second := launch(t, tunerCommand(context.WithoutCancel(t.Context()), t, "run", first.study, "--root", first.root, "--wait-for-owner", "5m"))
	second.waitFor(t, "; waiting up to 5 min for its end\n")
	must(t, first.cmd.Process.Signal(syscall.SIGTERM))
	if text, code := first.end(t); code != exitInterrupted {
		t.Errorf("the first run ends with %d: %s", code, text)
	}
	if text, code := second.end(t); code != 0 {
		t.Errorf("the second run ends with %d: %s", code, text)
	}
	if s := snapshot(t, first.dir); s.State != studies.Done {
		t.Errorf("the study is %s", s.State)
	}
}
