package bench

import (
	"time"

	"vllmtuner/bench/workload"
)

// follow sends the next turn of a live conversation after its user has thought, and reports whether there is one.
func (f *flight) follow(x *exchange) bool {
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
func (f *flight) nextTurn(arrival workload.Arrival) {
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
	x := f.depart(departure{arrival, wire}, place{})
	abandon() // its departure is counted now
	f.send(x)
}
