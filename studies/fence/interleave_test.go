package fence

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/realtime"
)

// A scenario is what its actors do, each by itself, in a world that is prepared.
type scenario struct {
	actors  []string
	crashes int
	prepare func(w *world)
	do      map[string]func(a *actor)
}

// A move is one possible next step: an actor's call is done in one of its ways, an actor crashes, or a call that a crashed actor had sent is
// done late.
type move struct {
	actor *actor
	way   int
	crash bool
	late  int // index of what is pending; -1 is none
}

// explored says how much was tried.
type explored struct{ runs, states, moves int }

// explore tries all orders of a scenario's moves and returns the first that goes wrong. It follows each state that it meets only once.
func explore(s scenario) (wrong string, tried explored) {
	known := map[[sha256.Size]byte]bool{}
	path := []int{} // which of the moves was made at each step
	for {
		w := newWorld(s.actors...)
		w.crashes = s.crashes
		s.prepare(w)
		more := run(w, s, path, known, &tried)
		tried.runs++
		if w.wrong != "" {
			return "\n  " + strings.Join(w.log, "\n  ") + "\n" + w.wrong, tried
		}
		path = path[:0]
		for _, m := range more {
			path = append(path, m.made)
		}
		for len(more) > 0 && more[len(more)-1].made+1 >= more[len(more)-1].of {
			more = more[:len(more)-1]
		}
		if len(more) == 0 {
			return "", tried
		}
		path = path[:len(more)]
		path[len(path)-1]++
	}
}

// A fork is a step at which one of several moves was made.
type fork struct{ made, of int }

// run follows the given path, then always the first move, to the end or to a known state.
func run(w *world, s scenario, path []int, known map[[sha256.Size]byte]bool, tried *explored) (forks []fork) {
	ended := map[*actor]chan struct{}{}
	for _, a := range w.actors {
		end := make(chan struct{})
		ended[a] = end
		go func() {
			defer close(end)
			s.do[a.name](a)
		}()
	}
	defer func() { // whoever is not done is stopped
		for _, a := range w.actors {
			w.crash(a)
			<-ended[a]
		}
	}()
	for {
		for _, a := range w.actors {
			if a.gone || a.waiting != nil {
				continue
			}
			select {
			case c := <-a.calls:
				a.waiting = &c
			case <-ended[a]:
				a.gone = true
			}
		}
		if w.wrong != "" {
			return forks
		}
		moves := w.moves()
		if len(moves) == 0 {
			w.judge()
			return forks
		}
		next := 0
		if len(forks) < len(path) {
			next = path[len(forks)]
		} else {
			state := w.state()
			if known[state] {
				return forks
			}
			known[state] = true
			tried.states++
		}
		forks = append(forks, fork{next, len(moves)})
		tried.moves++
		w.make(moves[next])
	}
}

// moves lists the possible next moves. An actor that crashes before its call is done is the same as one that crashes after the call was sent,
// if the call is never done.
func (w *world) moves() (moves []move) {
	for _, a := range w.actors {
		if a.gone || a.waiting == nil {
			continue
		}
		for way := range a.waiting.ways {
			moves = append(moves, move{actor: a, way: way, late: -1})
		}
		if w.crashes > 0 {
			moves = append(moves, move{actor: a, crash: true, late: -1})
		}
	}
	for i := range w.pending {
		moves = append(moves, move{late: i})
	}
	return moves
}

// make makes a move.
func (w *world) make(m move) {
	switch {
	case m.late >= 0:
		late := w.pending[m.late]
		w.log = append(w.log, late.what+", after its crash")
		w.pending = slices.Delete(w.pending, m.late, m.late+1)
		_ = late.do() // nobody is there to be told
	case m.crash:
		w.log = append(w.log, m.actor.name+" crashes; it "+m.actor.waiting.what)
		w.crashes--
		w.crash(m.actor)
	default:
		w.log = append(w.log, m.actor.waiting.what)
		if m.way > 0 {
			w.log = append(w.log, "    as it was before")
		}
		w.grant(m.actor, m.way)
	}
}

func (w *world) grant(a *actor, way int) {
	c := a.waiting
	a.waiting = nil
	told := c.do(way)
	a.seen = sha256.Sum256(append(a.seen[:], told...))
	close(c.done)
}

func (w *world) crash(a *actor) {
	c := a.waiting
	a.waiting = nil
	a.crashed = true
	if c == nil {
		return
	}
	if c.lasts {
		w.pending = append(w.pending, c.effect)
	}
	c.fails()
	close(c.done)
}

// judge looks at what is left: all that was acknowledged, for the next owner to find.
func (w *world) judge() {
	last := &actor{w: w, name: "last", listed: map[string][]string{}, missing: map[string]bool{}, calls: make(chan call)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		h, err := last.takeOver(all())
		if w.loses && errors.Is(err, ErrLost) {
			return // which is what it is to be told
		}
		if err != nil {
			w.fail("the study cannot be taken over: %v", err)
			return
		}
		text := strings.Join(w.files[h.Dir()+"/"+Database], "")
		stored, _, _ := strings.Cut(text, "|")
		for _, ack := range w.acks {
			if !slices.Contains(strings.Fields(stored), ack.value) {
				w.fail("%s was acknowledged, and is lost: %q is left", ack.value, stored)
			}
		}
	}()
	w.alone(last, done)
}

// takeOver takes the study over in at most two attempts; more would multiply the orders beyond what can be tried.
func (a *actor) takeOver(steps []step) (*Lease, error) {
	t := &takeover{disk: a, me: Owner{ID: a.name, Host: "host-" + a.name}, ttl: time.Hour, recoverCopy: a.settled}
	err := t.once(context.Background(), steps)
	if errors.Is(err, errAgain) {
		err = t.once(context.Background(), steps)
	}
	if err != nil {
		return nil, err
	}
	if a.prunes {
		_ = t.pruneLast() // one that is stopped here is no owner
	}
	return newLease(t, &pages{}), nil
}

// all returns the steps of a takeover, except waiting, which the order of moves replaces, and except those left out.
func all(without ...string) []step {
	return slices.DeleteFunc(slices.Clone(steps), func(s step) bool { return s.name == "wait" || slices.Contains(without, s.name) })
}

// A way of writing that an actor may have.
type manner struct {
	unacknowledged bool // values count without a slot
	tooEarly       bool // the slot is taken first
	prunesClaim    bool // the first slots of an epoch are removed too
	prunesNewest   bool // so are the newest
	prunesNothing  bool // all slots stay, as of one that is killed
}

// writes stores and acknowledges values until it may no more.
func (a *actor) writes(l *Lease, m manner, values ...string) {
	if m.prunesClaim {
		l.old = append(l.old, l.epoch, l.epoch+1)
	}
	acknowledge := func() error { return l.Acknowledge(l.commits + 1) }
	for _, value := range values {
		var err error
		switch {
		case m.unacknowledged:
			err = a.store(l.Dir(), value)
			l.slot++ // it would have been
		case m.tooEarly:
			if err = acknowledge(); err == nil {
				err = a.store(l.Dir(), value)
			}
		default:
			if err = a.store(l.Dir(), value); err == nil {
				err = acknowledge()
			}
		}
		if err != nil {
			return
		}
		a.w.acknowledged(value, l)
		if m.prunesNothing {
			continue
		}
		if m.prunesNewest {
			l.slot += 2
		}
		l.prune()
		if m.prunesNewest {
			l.slot -= 2
		}
	}
}

// succeeds takes the study over, and writes.
func (a *actor) succeeds(steps []step, m manner, values ...string) {
	l, err := a.takeOver(steps)
	if err != nil {
		return
	}
	var next Slot
	text := strings.Join(a.w.files[slotName(l.epoch+1)], "")
	if json.Unmarshal([]byte(text), &next) == nil && next.Owner.ID != a.name {
		a.w.fail("%s goes to work, although %s took the study from it before", a.name, next.Owner.ID)
	}
	a.writes(l, m, values...)
}

// opened lets an actor own the study before anything else happens.
func (a *actor) opened(values []string) (l *Lease) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		var err error
		if l, err = a.takeOver(all()); err != nil {
			a.w.fail("the first owner: %v", err)
			return
		}
		a.writes(l, manner{prunesNothing: a.prunes}, values...)
	}()
	a.w.alone(a, done)
	a.seen = [sha256.Size]byte{}
	return l
}

// alone lets an actor do all that it wants.
func (w *world) alone(a *actor, done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		case c := <-a.calls:
			c.do(0)
			close(c.done)
		}
	}
}

// A trouble is what is different in a scenario.
type trouble struct {
	coarse       bool
	crashes      int
	before       []string // of a, which owns the study at first, before anything else happens
	values       []string // of a
	more         []string // of b, which takes it over
	third        bool     // c takes it over too
	loses        bool     // the server loses what it said was on the disk
	without      []string // steps of the takeovers
	manner       manner
	long         bool // takes a minute under the race detector
	prunes       bool // whoever comes next removes the slots that stay of one who was killed
	deaf, sloppy bool
}

// scenario is an owner who writes while another, which has listed the directories when they were new, takes the study over.
func (tr trouble) scenario() scenario {
	holds := map[*world]*Lease{}
	s := scenario{actors: []string{"a", "b"}, crashes: tr.crashes, do: map[string]func(a *actor){
		"a": func(a *actor) { a.writes(holds[a.w], tr.manner, tr.values...) },
		"b": func(a *actor) { a.succeeds(all(tr.without...), tr.manner, tr.more...) },
		"c": func(a *actor) { a.succeeds(all(tr.without...), tr.manner, "c1") },
		"server": func(a *actor) {
			a.change("loses the newest value", func() error {
				db := holds[a.w].Dir() + "/" + Database
				first, _, _ := strings.Cut(strings.Join(a.w.files[db], ""), "|")
				first = first[:max(0, strings.LastIndex(first, " "))]
				a.w.files[db] = content{first + "|", first}
				return nil
			})
		},
	}}
	if tr.third {
		s.actors = append(s.actors, "c")
	}
	if tr.loses {
		s.actors = append(s.actors, "server")
	}
	s.prepare = func(w *world) {
		clear(holds)
		w.coarse = tr.coarse
		w.loses = tr.loses
		a, b := w.actors[0], w.actors[1]
		for _, one := range w.actors {
			one.prunes = tr.prunes
		}
		h := a.opened(tr.before)
		holds[w] = h
		for _, other := range w.actors[1:] {
			other.listed[SlotDir] = w.names(SlotDir)
			other.deaf, other.sloppy = tr.deaf, tr.sloppy
		}
		a.sloppy = tr.sloppy
		b.missing[h.Dir()+"/"+Journal] = true
	}
	return s
}

func TestNothingAcknowledgedIsLost(t *testing.T) {
	troubles := map[string]trouble{
		"two owners, page by page":             {long: true, values: []string{"a1", "a2"}, more: []string{"b1"}},
		"two owners, more slots":               {long: true, coarse: true, values: []string{"a1", "a2", "a3", "a4"}, more: []string{"b1", "b2"}},
		"two owners and a crash, page by page": {long: true, values: []string{"a1"}, more: []string{"b1"}, crashes: 1},
		"three owners":                         {long: true, coarse: true, third: true},
		"two owners, many slots":               {long: true, coarse: true, values: []string{"a1", "a2", "a3"}, more: []string{"b1"}},
		"two owners, few slots":                {coarse: true, values: []string{"a1", "a2"}, more: []string{"b1"}},
		"two owners and a crash":               {coarse: true, values: []string{"a1"}, more: []string{"b1"}, crashes: 1},
		"slots of one who was killed":          {coarse: true, before: []string{"a1", "a2"}, values: []string{"a3"}, more: []string{"b1"}, prunes: true},
		"a server that loses what it had":      {coarse: true, before: []string{"a1"}, more: []string{"b1"}, loses: true},
	}
	for name, tr := range troubles {
		t.Run(name, func(t *testing.T) {
			if tr.long {
				realtime.Only(t, "a minute each")
			}
			synctest.Test(t, func(t *testing.T) {
				wrong, tried := explore(tr.scenario())
				if wrong != "" {
					t.Fatal(wrong)
				}
				t.Logf("%+v", tried)
			})
		})
	}
}

// Whatever part of the protocol is left out, something is lost, or two owners are at work.
func TestNothingCanBeLeftOut(t *testing.T) {
	few := []string{"a1", "a2"}
	more := []string{"b1", "b2"}
	for name, tr := range map[string]trouble{
		"claim":                       {values: few, more: more[:1], without: []string{"claim"}},
		"list again":                  {long: true, coarse: true, values: []string{"a1", "a2", "a3", "a4", "a5"}, more: more[:1], without: []string{"list again"}},
		"copy again":                  {values: few, more: more[:1], without: []string{"copy again"}},
		"second look for the journal": {values: few[:1], deaf: true},
		"recover":                     {values: few[:1], more: more[:1], without: []string{"recover"}},
		"check":                       {coarse: true, before: few, more: more[:1], loses: true, without: []string{"check"}},
		"open":                        {coarse: true, more: more[:1], third: true, without: []string{"open"}},
		"O_EXCL":                      {coarse: true, values: few, more: more[:1], sloppy: true},
		"acknowledgement by a slot":   {coarse: true, values: few[:1], manner: manner{unacknowledged: true}},
		"slot after the commit":       {coarse: true, values: few[:1], manner: manner{tooEarly: true}},
		"claims that stay":            {coarse: true, values: few[:1], more: more, manner: manner{prunesClaim: true}},
		"newest slot that stays":      {coarse: true, values: few, more: more[:1], manner: manner{prunesNewest: true}},
	} {
		t.Run(name, func(t *testing.T) {
			if tr.long {
				realtime.Only(t, "a minute each")
			}
			synctest.Test(t, func(t *testing.T) {
				wrong, tried := explore(tr.scenario())
				if wrong == "" {
					t.Fatalf("nothing goes wrong: %+v", tried)
				}
				t.Logf("%+v: %s", tried, wrong)
			})
		})
	}
}
