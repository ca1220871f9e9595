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
	times  []time.Duration // ascending times since the first request, one for each request; nil if the times were not read
}

// OpenTrace reads recorded traffic with its times. The spec must be of kind trace or capture. Every row needs a
// timestamp.
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

// Name returns a description of the trace for reports, like Source.Name.
func (t *Trace) Name() string { return t.source.name }

// Len returns how many requests the trace has, which is at least one.
func (t *Trace) Len() int { return t.source.Len() }

// request returns the i-th request in the order of the trace.
func (t *Trace) request(i int) *Request { return t.source.at(i) }

// meanGap returns the mean gap between arrivals in nanoseconds, or 0 if there are no gaps.
func (t *Trace) meanGap() float64 {
	if len(t.times) < 2 {
		return 0
	}
	return float64(t.times[len(t.times)-1]) / float64(len(t.times)-1)
}

// A recordedRow is one request of recorded traffic. The request has no prompt if the record has only the prompt's
// length.
type recordedRow struct {
	Request
	at     time.Duration // when the request arrived; the zero of the clock does not matter
	blocks []int64       // hash ids of the prompt; nil if the record does not say what prompts share
}

// openRecorded reads recorded traffic. If withTimes is true, rows are sorted by their times. Otherwise they stay in the
// order of the file. If the spec wants fewer rows than the file has, openRecorded uses the first ones.
func openRecorded(spec Spec, seed uint64, withTimes bool) (*Trace, error) {
	bad := badRows{skip: spec.SkipBadRows}
	var rows []recordedRow
	var notes []string
	err := withFile(spec.Path, func(f io.Reader) (err error) {
		if spec.Kind == "trace" {
			rows, notes, err = readTraced(f, spec, &bad)
		} else {
			rows, err = readCaptures(f, spec, withTimes, &bad)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := spec.checkRequests(len(rows)); err != nil {
		return nil, err
	}
	if withTimes {
		slices.SortStableFunc(rows, func(a, b recordedRow) int { return cmp.Compare(a.at, b.at) })
	}
	if spec.Requests > 0 {
		rows = rows[:spec.Requests]
	}
	t := &Trace{}
	requests := make([]Request, len(rows))
	for i, row := range rows {
		requests[i] = row.Request
		if withTimes {
			t.times = append(t.times, row.at-rows[0].at)
		}
	}
	t.source = newFinite(spec.titleOf(len(rows), append(notes, bad.note())...), spec, seed, requests)
	t.source.bad, t.source.order.recorded = bad, true
	if spec.Kind == "trace" {
		t.source.at = func(i int) *Request { return rows[i].draw(seed, i, spec.VocabSize) }
	}
	return t, nil
}

var errNoTime = errors.New(`has no "timestamp", which arrivals need: add it, or do not use the times of the file`)

// maxTime is the largest distance of a timestamp from the zero of its clock. No record is further away, and the
// difference of two such times fits a Duration.
const maxTime = 140 * 365 * 24 * time.Hour

// clockTime converts a timestamp in seconds to the time since the zero of its clock, whatever that zero is.
func clockTime(seconds float64) (time.Duration, error) {
	if !(seconds >= -maxTime.Seconds() && seconds <= maxTime.Seconds()) {
		return 0, fmt.Errorf("timestamp %g is too large for a number of seconds", seconds)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
