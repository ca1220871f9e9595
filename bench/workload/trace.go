package workload

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// A Trace is recorded traffic: requests and their times of arrival.
type Trace struct {
	source *finite
	times  []time.Duration // ascending times since the first request, one for each request; nil if the record has none
}

// OpenTrace reads recorded traffic with its times: a spec of kind trace or capture. Every row needs a timestamp.
func OpenTrace(spec Spec, seed uint64) (*Trace, error) {
	spec, err := spec.checked()
	if err != nil {
		return nil, err
	}
	if spec.Kind != "trace" && spec.Kind != "capture" {
		return nil, fmt.Errorf("workload %s has no arrival times: use kind trace or capture", spec.Kind)
	}
	return openRecorded(spec, seed, true)
}

// Name describes the trace as a Source.
func (t *Trace) Name() string { return t.source.name }

// Len returns how many requests the trace has, which is at least one.
func (t *Trace) Len() int { return t.source.Len() }

// request returns the i-th request in the order of the trace.
func (t *Trace) request(i int) *Request { return t.source.at(i) }

// meanGap returns the mean gap between arrivals in nanoseconds, or 0 if there are none.
func (t *Trace) meanGap() float64 {
	if len(t.times) < 2 {
		return 0
	}
	return float64(t.times[len(t.times)-1]) / float64(len(t.times)-1)
}

// A recorder reads the rows of one kind of recorded traffic.
type recorder interface {
	// read reads the file. With timed, a row without a time is bad.
	read(from io.Reader, timed bool, bad *badRows) error
	// times returns the arrival times of the rows, from any start. It may only follow a timed read.
	times() []time.Duration
	// keep keeps the given rows, in the given order.
	keep(rows []int)
	// source returns the population of a finite source: a function for the i-th request, the longest length, and notes for
	// the source's name.
	source(seed uint64) (at func(i int) *Request, longest int, notes []string)
	len() int
}

// openRecorded reads recorded traffic. Rows stay in the order of the file, or with timed in the order of their times. If
// the spec wants fewer rows, it gets the first ones.
func openRecorded(spec Spec, seed uint64, timed bool) (*Trace, error) {
	var in recorder = &captured{spec: spec}
	if spec.Kind == "trace" {
		in = &traced{spec: spec}
	}
	bad := badRows{skip: spec.SkipBadRows}
	err := withFile(spec.Path, func(f io.Reader) error { return in.read(f, timed, &bad) })
	if err != nil {
		return nil, err
	}
	if err := spec.checkRequests(in.len()); err != nil {
		return nil, err
	}
	rows := make([]int, in.len())
	for i := range rows {
		rows[i] = i
	}
	t := &Trace{}
	if timed {
		times := in.times()
		slices.SortStableFunc(rows, func(a, b int) int { return cmp.Compare(times[a], times[b]) })
		for _, row := range rows {
			t.times = append(t.times, times[row]-times[rows[0]])
		}
	}
	if spec.Requests > 0 {
		rows = rows[:spec.Requests]
		t.times = t.times[:min(len(t.times), spec.Requests)]
	}
	in.keep(rows)
	at, longest, notes := in.source(seed)
	t.source = &finite{
		name: spec.titleOf(len(rows), append(notes, bad.note())...), order: newOrder(seed, len(rows)),
		at: at, longest: longest, policy: spec.policy(seed), bad: bad,
	}
	t.source.order.recorded = true
	return t, nil
}

var errNoTime = errors.New(`has no "timestamp", which arrivals need: add it, or do not use the times of the file`)

// maxTime is the limit on a timestamp's distance from the zero of its clock. No record is further away, and the difference
// of two such times fits a Duration.
const maxTime = 140 * 365 * 24 * time.Hour

// since converts seconds of any clock to a Duration.
func since(seconds float64) (time.Duration, error) {
	if !(seconds >= -maxTime.Seconds() && seconds <= maxTime.Seconds()) {
		return 0, fmt.Errorf("timestamp %g is too large for a number of seconds", seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
