package bench

import (
	"time"

	"vllmtuner/bench/workload"
)

// follow starts the next turn of a live conversation and reports whether there is one. The next turn is due after the
// think time.
func (f *runState) follow(x *exchange) bool {
	if x.Request.Next == nil || !x.sample.OK() || f.ctx.Err() != nil {
		return false
	}
	request, think := x.Request.Next(x.text())
	if request == nil {
		return false
	}
	arrival := x.Arrival
	arrival.Request, arrival.Due = request, x.sample.End+think
	f.requests.Add(1)
	f.mu.Lock()
	f.extend(think)
	f.mu.Unlock()
	f.pool.work.Go(func() {
		defer f.requests.Done()
		f.nextTurn(arrival)
	})
	return true
}

// nextTurn waits until the next turn is due and sends it.
func (f *runState) nextTurn(arrival workload.Arrival) {
	abandon := func() {
		if arrival.Phase == workload.Window {
			f.mu.Lock()
			f.pending--
			f.mu.Unlock()
		}
	}
	wire, _, err := f.compose(arrival, nil)
	if err != nil {
		f.finish(err)
		abandon()
		return
	}
	timer := time.NewTimer(arrival.Due - f.now())
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-f.ctx.Done():
		abandon()
		return
	}
	x := f.depart(departure{arrival, wire}, slot{})
	abandon() // the method depart has counted the turn a second time, so abandon takes back the first count
	f.send(x)
}
