package main

import "vllmtuner/bench/workload"

// A later is an endless source further on: what the prefix cache has of an earlier run, another one does not ask again.
type later struct {
	workload.Source
	by int
}

func (l later) Request(stream workload.Stream, i int) *workload.Request {
	return l.Source.Request(stream, i+l.by)
}

// aRun is further than any run comes.
const aRun = 1 << 30

// nth is the load of the n-th run, from 0, with requests of its own where the population has no end.
func (l benchLoad) nth(n int) benchLoad {
	if l.source != nil && l.source.Len() == 0 && n > 0 {
		l.source = later{l.source, n * aRun}
	}
	return l
}
