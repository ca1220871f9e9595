package guard

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// once returns a function that acts a single time, that long after its first call.
func once(after time.Duration, act func(*shop)) func(*shop) {
	var begin time.Time
	done := false
	return func(s *shop) {
		if begin.IsZero() {
			begin = time.Now()
		}
		if !done && time.Since(begin) >= after {
			done = true
			act(s)
			s.version++
		}
	}
}

func scaledBy(who string, replicas int32) func(*shop) {
	return func(s *shop) { s.scaleBy(who, replicas) }
}

// suspend does to the study's Job what `kubectl apply -k` does.
func suspend(s *shop) {
	s.job.State = Suspended
	if s.studyPod {
		s.podEnds = time.Now().Add(ends)
	}
}

func TestOthersMayInterfere(t *testing.T) {
	user := []string{"--max-num-seqs", "64"}
	for _, row := range []struct {
		name     string
		people   func(*shop)
		replicas int32
		args     []string
		downs    int
		outcome  string
		says     string // part of the guard's error; "" if it ends without one
	}{
		{"a human scales up", once(30*time.Second, scaledBy("", 2)), 2, ownArgs, 1, Returned, "somebody scaled production to 2"},
		{"a human scales up while the pods end", once(3*time.Second, scaledBy("k9s", 1)), 1, ownArgs, 1, Returned, "k9s scaled production to 1"},
		{"a controller scales up once", once(30*time.Second, scaledBy("argocd-controller", 1)), 1, bestArgs, 2, Applied, ""},
		{"a controller scales up whenever it can", func(s *shop) {
			if s.deployment.Replicas == 0 && time.Now().Second()%4 == 0 {
				s.scaleBy("keda-operator", 1)
			}
		}, 1, ownArgs, 1 + maxResisted, Returned, "keda-operator scaled production up 4 times"},
		{"the args change", once(30*time.Second, func(s *shop) { s.deployment.Args = user; s.deployment.Generation++ }), 1, user, 1, Kept, "changed production's args"},
		{"the args change after they were applied", once(133*time.Second, func(s *shop) { s.deployment.Args = user; s.deployment.Generation++ }), 1, user, 1, Kept, "changed production's args"},
		{"the study's Job is deleted", once(30*time.Second, func(s *shop) { s.job, s.studyPod = Job{State: Missing}, false }), 1, ownArgs, 1, "", ErrNoStudy.Error()},
		{"somebody suspends the study once", once(40*time.Second, suspend), 1, bestArgs, 1, Applied, ""},
		{"somebody suspends the study again and again", func(s *shop) {
			if s.job.State == Running && s.studyPod && s.podEnds.IsZero() && time.Since(s.podBegan) > 10*time.Second {
				suspend(s)
				s.version++
			}
		}, 1, ownArgs, 1, Returned, "somebody suspended the study 4 times"},
		{"somebody suspends the study at once", func(s *shop) {
			if s.job.State == Running {
				suspend(s)
				s.version++
			}
		}, 1, ownArgs, 1, Returned, "somebody suspended the study each time for 5 min"},
		{"the study's pod cannot run", func(s *shop) { s.noStudyPod = true }, 1, ownArgs, 1, Returned, "no pod of the study ran for 5 min"},
		{"the study's pod is gone for a while", func(s *shop) {
			s.noStudyPod = time.Since(s.begin) > 30*time.Second && time.Since(s.begin) < 2*time.Minute
			if s.noStudyPod {
				s.studyPod = false
			}
		}, 1, bestArgs, 1, Applied, ""},
		{"the record is deleted", once(30*time.Second, func(s *shop) { s.record = nil }), 1, bestArgs, 1, Applied, ""},
		{"the record is deleted while the pods end", once(3*time.Second, func(s *shop) { s.record = nil }), 1, bestArgs, 1, Applied, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newShop(t)
			s.people = row.people
			err := s.keep(t.Context(), Guard{Winner: best(bestArgs)})
			s.people = nil
			s.wait(crashes)
			d := s.deployment
			if d.Replicas != row.replicas || !slices.Equal(d.Args, row.args) || s.downs != row.downs || s.record != nil || !s.rollout().Done {
				t.Errorf("%s: production has %d replicas and the args %q, was taken down %d times; record %+v", row.name, d.Replicas, d.Args, s.downs, s.record)
			}
			if row.outcome != "" && !s.job.Outcome.Is(row.outcome) || (err == nil) != (row.says == "") || err != nil && !strings.Contains(err.Error(), row.says) {
				t.Errorf("%s: outcome %q, the guard ends with %v", row.name, s.job.Outcome, err)
			}
		})
	}
}

// Production gets its GPU back if its pods do not end, and its own args if it is not ready with the best ones in time.
func TestTheGuardDoesNotWaitForever(t *testing.T) {
	for _, row := range []struct {
		name    string
		change  func(*shop)
		outcome string
		says    string
		within  time.Duration
	}{
		{"the pods do not end", func(s *shop) { s.drains = time.Hour }, Returned, "production's pods did not end within 1 min", 2 * time.Minute},
		{"production is not ready", func(s *shop) { s.loads = time.Hour }, RolledBack, "was not ready with the best args within 10 min", 15 * time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			s, begin := newShop(t), time.Now()
			row.change(s)
			err := s.keep(t.Context(), Guard{Winner: best(bestArgs)})
			if took := time.Since(begin); took > row.within || err == nil || !strings.Contains(err.Error(), row.says) {
				t.Errorf("%s: after %s the guard ends with %v", row.name, took, err)
			}
			if s.deployment.Replicas != 1 || !slices.Equal(s.deployment.Args, ownArgs) || s.record != nil || !s.job.Outcome.Is(row.outcome) {
				t.Errorf("%s: production %+v, record %+v, outcome %q", row.name, s.deployment, s.record, s.job.Outcome)
			}
		})
	}
}

// The study goes on without its Deployment. A new Deployment of the same name is not touched.
func TestADeletedDeploymentIsOwedNothing(t *testing.T) {
	for name, next := range map[string]*Deployment{"deleted": nil, "made anew": {UID: "d2", Replicas: 3, Args: ownArgs}} {
		synctest.Test(t, func(t *testing.T) {
			s := newShop(t)
			s.people = once(30*time.Second, func(s *shop) { s.deployment, s.record = next, nil })
			if err := s.keep(t.Context(), Guard{Winner: best(bestArgs)}); err != nil {
				t.Errorf("%s: the guard ends with %v", name, err)
			}
			if s.record != nil || s.job.State != Complete || s.downs != 1 || next != nil && (next.Replicas != 3 || !slices.Equal(next.Args, ownArgs)) {
				t.Errorf("%s: record %+v, study %s, Deployment %+v", name, s.record, s.job.State, next)
			}
		})
	}
}

func TestTheGuardTouchesNothingOfOthers(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*shop)
		want   error
	}{
		{"another study has borrowed", func(s *shop) { s.record = &Record{Study: "tune-s2", Deployment: "d1"} }, ErrHeld},
		{"there is no Deployment", func(s *shop) { s.deployment = nil }, ErrNoDeployment},
		{"the Deployment has no such container", func(s *shop) { s.deployment.Serves = false }, ErrNoContainer},
		{"the Deployment has no replicas", func(s *shop) { s.deployment.Replicas = 0 }, ErrNothingToBorrow},
		{"there is no study", func(s *shop) { s.job.State = Missing }, ErrNoStudy},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newShop(t)
			row.change(s)
			before := s.version
			err := s.keep(t.Context(), Guard{})
			if s.version != before || !errors.Is(err, row.want) {
				t.Errorf("%s: the guard ends with %v, and has changed %d objects", row.name, err, s.version-before)
			}
		})
	}
}

// A guard without a right ends while it owes nothing. While it does, it tries again, until somebody grants the right.
func TestAMissingRight(t *testing.T) {
	forbidden := fmt.Errorf("%w: add update on deployments/scale", ErrForbidden)
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t)
		s.people = func(*shop) {}
		err := (&Guard{Cluster: noRecord{s, forbidden}, Settings: Settings{Study: "tune-s1"}}).Run(t.Context())
		if !errors.Is(err, forbidden) || s.version != 0 {
			t.Errorf("the guard ends with %v, and has changed %d objects", err, s.version)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		s, until := newShop(t), time.Now().Add(20*time.Minute)
		guard := Guard{Cluster: noScale{s, forbidden, until}, Settings: Settings{Study: "tune-s1", DrainTimeout: time.Minute, StudyTimeout: time.Hour}}
		if err := guard.Run(t.Context()); err != nil || time.Now().Before(until) {
			t.Errorf("the guard ends with %v", err)
		}
		if wrong := s.settled(loans[0]); wrong != "" {
			t.Error(wrong)
		}
	})
}

// A scale-down that takes effect after the loan has ended is undone: its guard was stopped between its look and its call.
func TestALateScaleDownIsUndone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, stop := newShop(t), make(chan struct{})
		s.fault = func(_ int, name string) fault {
			if name == "scale to 0" {
				return refused
			}
			return none
		}
		time.AfterFunc(5*time.Second, func() { close(stop) })
		if err := s.keep(t.Context(), Guard{Stop: stop}); err == nil || s.record != nil {
			t.Fatalf("the loan ends with %v, record %+v", err, s.record)
		}
		s.scaleBy("", 0)
		s.fault = nil
		_ = s.keep(t.Context(), Guard{})
		s.wait(crashes)
		if s.deployment.Replicas != 1 || s.record != nil || !s.rollout().Done {
			t.Errorf("production %+v, record %+v", s.deployment, s.record)
		}
	})
}

// Whatever people, controllers and faults do, production ends with the replicas that it had or that somebody wished, with
// args that run, and without a record.
func TestProductionSurvivesEverything(t *testing.T) {
	seeds := uint64(1500)
	if testing.Short() {
		seeds = 300
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			s, stop := newShop(t), make(chan struct{})
			s.fails = rng.IntN(4) == 0
			chance := rng.Float64() * 0.15
			s.fault = func(int, string) fault {
				if rng.Float64() < chance && time.Since(s.podBegan) < time.Hour {
					return 1 + fault(rng.IntN(int(killedToo)))
				}
				return none
			}
			var log []string
			wished, acts := map[int32]bool{1: true}, rng.IntN(4)
			act := func(name string, do func()) { do(); s.version++; log = append(log, name) }
			s.people = func(s *shop) {
				if acts == 0 || rng.Float64() > 0.02 {
					return
				}
				acts--
				switch rng.IntN(5) {
				case 0:
					act("human", func() { n := 1 + rng.Int32N(2); wished[n] = true; s.scaleBy("kubectl", n) })
				case 1:
					act("controller", func() { s.scaleBy("argocd", 1) })
				case 2:
					act("no record", func() { s.record = nil })
				case 3:
					act("stop", func() {
						select {
						case <-stop:
						default:
							close(stop)
						}
					})
				case 4:
					act("args", func() {
						s.deployment.Args = []string{"--max-num-seqs", fmt.Sprint(64 + rng.IntN(9))}
						s.deployment.Generation++
					})
				}
			}
			winner := best([][]string{bestArgs, badArgs, ownArgs}[rng.IntN(3)])
			err := s.keep(t.Context(), Guard{Winner: winner, Stop: stop})
			s.people, s.fault = nil, nil
			again := s.keep(t.Context(), Guard{Winner: winner}) // as the Job controller does after an error
			s.wait(crashes)
			if d := s.deployment; s.record != nil || !wished[d.Replicas] || !s.rollout().Done {
				t.Errorf("seed %d, %v: production has %d replicas, args %q, runs %v; record %+v, study %+v; the guards end with %v, %v",
					seed, log, d.Replicas, d.Args, s.rollout(), s.record, s.job, err, again)
			}
		})
	}
}
