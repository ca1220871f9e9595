package workload

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// A Trace is recorded traffic: when requests came, and what was asked.
type Trace struct {
	source *finite
	times  []time.Duration // since the first, not falling, one for each request of source; nil when the record has none
}

// OpenTrace reads recorded traffic with its times: a spec of kind trace or capture. Every row needs a timestamp.
func OpenTrace(spec Spec, seed uint64) (*Trace, error) {
	spec, err := spec.sound()
	if err != nil {
		return nil, err
	}
	if spec.Kind != "trace" && spec.Kind != "capture" {
		return nil, fmt.Errorf("workload %s has no times of arrival: use kind trace or capture", spec.Kind)
	}
	return openRecorded(spec, seed, true)
}

// Name describes the trace as a Source.
func (t *Trace) Name() string { return t.source.name }

// Len returns how many requests the trace has, which is at least one.
func (t *Trace) Len() int { return t.source.Len() }

// request returns the i-th request in the order of the trace.
func (t *Trace) request(i int) *Request { return t.source.at(i) }

// meanGap returns the mean gap between arrivals in nanoseconds; 0 when there are none.
func (t *Trace) meanGap() float64 {
	if len(t.times) < 2 {
		return 0
	}
	return float64(t.times[len(t.times)-1]) / float64(len(t.times)-1)
}

// A recorder reads the rows of one kind of recorded traffic.
type recorder interface {
	// read reads the file. With timed it is an error of a row that it has no time.
	read(from io.Reader, timed bool, bad *badRows) error
	// times returns when the rows came; the zero of time is any. It is only asked after a timed read.
	times() []time.Duration
	// keep takes the rows in this order, and no others.
	keep(rows []int)
	// source returns the rows as the population of a finite source: how to make one, and the longest; and notes for its name.
	source(seed uint64) (at func(i int) *Request, longest int, notes []string)
	len() int
}

// openRecorded reads recorded traffic. Rows stay in the order of the file, or with timed in that of their times; of too
// many rows the first are taken.
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

var errNoTime = errors.New(`has no "timestamp", which arrivals need: add it, or leave the times of the file out`)

// mostTime is further from the zero of time than any record, and differences of such times still fit a Duration.
const mostTime = 140 * 365 * 24 * time.Hour

// since turns seconds of any clock into a time.
func since(seconds float64) (time.Duration, error) {
	if !(seconds >= -mostTime.Seconds() && seconds <= mostTime.Seconds()) {
		return 0, fmt.Errorf("timestamp %g is no number of seconds", seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
