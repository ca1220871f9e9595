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

// A scenario has a prepared world, which is a simulated file server with its clients. It says what each actor does in
// that world.
type scenario struct {
	actors  []string
	crashes int
	prepare func(w *world)
	do      map[string]func(a *actor)
}

// A move is one possible next step. There are three kinds: an actor's call is done in one of its ways, an actor
// crashes, or a late call is done. A late call is one that an actor sent before its crash.
type move struct {
	actor *actor
	way   int
	crash bool
	late  int // index of the late call in world.pending; -1 for other moves
}

// An effort counts what the function explore has tried.
type effort struct{ runs, states, moves int }

// explore tries all orders of a scenario's moves. It returns the moves and the error of the first order that goes
// wrong. When two orders lead to the same state, it goes on from there only once.
func explore(s scenario) (wrong string, tried effort) {
	known := map[[sha256.Size]byte]bool{}
	path := []int{} // for each step, the index of the move that was made
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
		for len(more) > 0 && more[len(more)-1].made+1 >= more[len(more)-1].possible {
			more = more[:len(more)-1]
		}
		if len(more) == 0 {
			return "", tried
		}
		path = path[:len(more)]
		path[len(path)-1]++
	}
}

// A fork is one step of a run. The field made is the index of the move that was made, and possible is the number of
// possible moves.
type fork struct{ made, possible int }

// run follows the given path, and then always makes the first move. It stops at the end, or at a state that is already
// in the map known.
func run(w *world, s scenario, path []int, known map[[sha256.Size]byte]bool, tried *effort) (forks []fork) {
	ended := map[*actor]chan struct{}{}
	for _, a := range w.actors {
		end := make(chan struct{})
		ended[a] = end
		go func() {
			defer close(end)
			s.do[a.name](a)
		}()
	}
	defer func() { // stop the actors that are not done
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
			w.checkEnd()
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
		w.perform(moves[next])
	}
}

// moves lists the possible next moves. It does not list a crash before a call was sent. Such a crash has the same
// effect as a crash after which the sent call is never done.
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

// perform makes a move.
func (w *world) perform(m move) {
	switch {
	case m.late >= 0:
		late := w.pending[m.late]
		w.log = append(w.log, late.what+", after its crash")
		w.pending = slices.Delete(w.pending, m.late, m.late+1)
		_ = late.do() // nobody sees this error, because the sender has crashed
	case m.crash:
		w.log = append(w.log, m.actor.name+" crashes instead of this: "+m.actor.waiting.what)
		w.crashes--
		w.crash(m.actor)
	default:
		w.log = append(w.log, m.actor.waiting.what)
		if m.way > 0 {
			w.log = append(w.log, "    and gets the cached answer")
		}
		w.execute(m.actor, m.way)
	}
}

// execute does the call that an actor waits for.
func (w *world) execute(a *actor, way int) {
	c := a.waiting
	a.waiting = nil
	answer := c.do(way)
	a.heard = sha256.Sum256(append(a.heard[:], answer...))
	close(c.done)
}

// crash ends an actor. Its waiting call may still be done later, if the server may have received it.
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

// checkEnd lets one more owner take the study over. This owner must find every acknowledged value.
func (w *world) checkEnd() {
	last := &actor{w: w, name: "last", listed: map[string][]string{}, missing: map[string]bool{}, calls: make(chan call)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		lease, err := last.takeOver(stepsWithout())
		if w.loses && errors.Is(err, ErrLost) {
			return // data was lost, and the takeover reports that, as it must
		}
		if err != nil {
			w.fail("the study cannot be taken over: %v", err)
			return
		}
		text := strings.Join(w.files[lease.Dir()+"/"+Database], "")
		stored, _, _ := strings.Cut(text, "|")
		for _, ack := range w.acks {
			if !slices.Contains(strings.Fields(stored), ack.value) {
				w.fail("%s was acknowledged and is lost; the study has %q", ack.value, stored)
			}
		}
	}()
	w.runAlone(last, done)
}

// takeOver takes the study over in at most two attempts. With more attempts there are too many orders to try.
func (a *actor) takeOver(steps []step) (*Lease, error) {
	t := &takeover{disk: a, me: Owner{ID: a.name, Host: "host-" + a.name}, ttl: time.Hour, recoverCopy: a.recoverCopy}
	err := t.once(context.Background(), steps)
	if errors.Is(err, errAgain) {
		err = t.once(context.Background(), steps)
	}
	if err != nil {
		return nil, err
	}
	if a.prunes {
		_ = t.pruneLast() // an error only means that the actor has crashed
	}
	return newLease(t, &pages{}), nil
}

// stepsWithout returns the steps of a takeover, but leaves out the named ones. It always leaves out the step "wait",
// because the order of the moves decides when the takeover goes on.
func stepsWithout(without ...string) []step {
	return slices.DeleteFunc(slices.Clone(steps), func(s step) bool { return s.name == "wait" || slices.Contains(without, s.name) })
}

// mistakes lists the ways in which an owner that writes may break the protocol.
type mistakes struct {
	unacknowledged bool // a value counts as acknowledged without a slot
	tooEarly       bool // the slot is taken before the value is stored
	prunesClaim    bool // the first two slots of the epoch are removed too
	prunesNewest   bool // the newest two slots are removed too
	prunesNothing  bool // all slots stay, as after a kill
}

// write stores and acknowledges values until an error ends it.
func (a *actor) write(l *Lease, m mistakes, values ...string) {
	if m.prunesClaim {
		l.old = append(l.old, l.epoch, l.epoch+1)
	}
	acknowledge := func() error { return l.Acknowledge(l.commits + 1) }
	for _, value := range values {
		var err error
		switch {
		case m.unacknowledged:
			err = a.store(l.Dir(), value)
			l.slot++ // counts a slot that the owner did not take
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

// takeOverAndWrite takes the study over with the given steps, and writes the values.
func (a *actor) takeOverAndWrite(steps []step, m mistakes, values ...string) {
	l, err := a.takeOver(steps)
	if err != nil {
		return
	}
	var next Slot
	text := strings.Join(a.w.files[slotName(l.epoch+1)], "")
	if json.Unmarshal([]byte(text), &next) == nil && next.Owner.ID != a.name {
		a.w.fail("%s owns the study, although %s has taken it over since", a.name, next.Owner.ID)
	}
	a.write(l, m, values...)
}

// ownFirst lets an actor take the study and write values before anything else happens.
func (a *actor) ownFirst(values []string) (l *Lease) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		var err error
		if l, err = a.takeOver(stepsWithout()); err != nil {
			a.w.fail("the first owner: %v", err)
			return
		}
		a.write(l, mistakes{prunesNothing: a.prunes}, values...)
	}()
	a.w.runAlone(a, done)
	a.heard = [sha256.Size]byte{}
	return l
}

// runAlone does only the calls of one actor, until the channel done is closed.
func (w *world) runAlone(a *actor, done <-chan struct{}) {
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

// A setup describes a scenario. The owner named a has the study first. The owner named b takes it over while owner a
// writes.
type setup struct {
	coarse   bool     // see world.coarse
	crashes  int      // see world.crashes
	before   []string // values that owner a writes before anything else happens
	values   []string // values that owner a writes during the takeover by owner b
	more     []string // values that owner b writes
	third    bool     // another actor, named c, takes the study over too
	loses    bool     // see world.loses
	without  []string // steps that the takeovers leave out
	mistakes mistakes // mistakes that both owners make
	long     bool     // the test takes a minute under the race detector
	veryLong bool     // the test takes half a minute even without the race detector; -short skips it
	soak     bool     // the test takes a minute even without the race detector
	prunes   bool     // see actor.prunes

	staleCache, ignoresExcl bool // see actor.staleCache and actor.ignoresExcl
}

// scenario returns the scenario of a setup. At its beginning the actors named b and c have cached listings of the
// directories.
func (s setup) scenario() scenario {
	leases := map[*world]*Lease{}
	is := scenario{actors: []string{"a", "b"}, crashes: s.crashes, do: map[string]func(a *actor){
		"a": func(a *actor) { a.write(leases[a.w], s.mistakes, s.values...) },
		"b": func(a *actor) { a.takeOverAndWrite(stepsWithout(s.without...), s.mistakes, s.more...) },
		"c": func(a *actor) { a.takeOverAndWrite(stepsWithout(s.without...), s.mistakes, "c1") },
		"server": func(a *actor) {
			a.change("loses the newest value", func() error {
				db := leases[a.w].Dir() + "/" + Database
				first, _, _ := strings.Cut(strings.Join(a.w.files[db], ""), "|")
				first = first[:max(0, strings.LastIndex(first, " "))]
				a.w.files[db] = content{first + "|", first}
				return nil
			})
		},
	}}
	if s.third {
		is.actors = append(is.actors, "c")
	}
	if s.loses {
		is.actors = append(is.actors, "server")
	}
	is.prepare = func(w *world) {
		clear(leases)
		w.coarse = s.coarse
		w.loses = s.loses
		a, b := w.actors[0], w.actors[1]
		for _, one := range w.actors {
			one.prunes = s.prunes
		}
		lease := a.ownFirst(s.before)
		leases[w] = lease
		for _, other := range w.actors[1:] {
			other.listed[SlotDir] = w.names(SlotDir)
			other.staleCache, other.ignoresExcl = s.staleCache, s.ignoresExcl
		}
		a.ignoresExcl = s.ignoresExcl
		b.missing[lease.Dir()+"/"+Journal] = true
	}
	return is
}

// The next owner finds every acknowledged value. This holds in each order of the moves, with crashes and stale caches.
func TestNothingAcknowledgedIsLost(t *testing.T) {
	setups := map[string]setup{
		"two owners, page by page":             {long: true, values: []string{"a1"}, more: []string{"b1"}},
		"two owners, more pages":               {long: true, soak: true, values: []string{"a1", "a2"}, more: []string{"b1"}},
		"two owners, more slots":               {long: true, soak: true, coarse: true, values: []string{"a1", "a2", "a3", "a4"}, more: []string{"b1", "b2"}},
		"two owners and a crash, page by page": {veryLong: true, values: []string{"a1"}, more: []string{"b1"}, crashes: 1},
		"three owners":                         {long: true, coarse: true, third: true},
		"two owners, many slots":               {long: true, coarse: true, values: []string{"a1", "a2", "a3"}, more: []string{"b1"}},
		"two owners, few slots":                {coarse: true, values: []string{"a1", "a2"}, more: []string{"b1"}},
		"two owners and a crash":               {coarse: true, values: []string{"a1"}, more: []string{"b1"}, crashes: 1},
		"slots that a killed owner left":       {coarse: true, before: []string{"a1", "a2"}, values: []string{"a3"}, more: []string{"b1"}, prunes: true},
		"a server that loses synced data":      {coarse: true, before: []string{"a1"}, more: []string{"b1"}, loses: true},
	}
	for name, s := range setups {
		t.Run(name, func(t *testing.T) {
			if s.long {
				realtime.Only(t, "a minute each")
			}
			if s.veryLong {
				realtime.Long(t, "half a minute")
			}
			if s.soak && !realtime.Soak() {
				t.Skip("takes a minute; make soak-real-time runs it")
			}
			synctest.Test(t, func(t *testing.T) {
				wrong, tried := explore(s.scenario())
				if wrong != "" {
					t.Fatal(wrong)
				}
				t.Logf("%+v", tried)
			})
		})
	}
}

// Each part of the protocol is necessary: without it, some order of the moves loses a value or has two owners at work.
func TestNothingCanBeLeftOut(t *testing.T) {
	realtime.Only(t, "explores a dozen incomplete protocols")
	few := []string{"a1", "a2"}
	more := []string{"b1", "b2"}
	for name, s := range map[string]setup{
		"claim":                      {values: few, more: more[:1], without: []string{"claim"}},
		"list again":                 {coarse: true, values: []string{"a1", "a2", "a3", "a4", "a5"}, more: more[:1], without: []string{"list again"}},
		"copy again":                 {values: few, more: more[:1], without: []string{"copy again"}},
		"refresh before the journal": {values: few[:1], staleCache: true},
		"recover":                    {values: few[:1], more: more[:1], without: []string{"recover"}},
		"check":                      {coarse: true, before: few, more: more[:1], loses: true, without: []string{"check"}},
		"open":                       {coarse: true, more: more[:1], third: true, without: []string{"open"}},
		"O_EXCL":                     {coarse: true, values: few, more: more[:1], ignoresExcl: true},
		"acknowledgement by a slot":  {coarse: true, values: few[:1], mistakes: mistakes{unacknowledged: true}},
		"slot after the commit":      {coarse: true, values: few[:1], mistakes: mistakes{tooEarly: true}},
		"claims that stay":           {coarse: true, values: few[:1], more: more, mistakes: mistakes{prunesClaim: true}},
		"newest slot that stays":     {coarse: true, values: few, more: more[:1], mistakes: mistakes{prunesNewest: true}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wrong, tried := explore(s.scenario())
				if wrong == "" {
					t.Fatalf("no order goes wrong, of %+v", tried)
				}
				t.Logf("%+v: %s", tried, wrong)
			})
		})
	}
}
