package trial

import (
	"context"
	"fmt"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
)

// alive asks for two tokens after a load that ended in silence. A probe may end before the server's watch knows that it hangs, and its
// requests are withdrawn then, so that nothing is left which could hang. Without both tokens the fault is the server's, and no limit was
// broken: some servers hang after the first. A server that makes both is slow.
func (m *measuring) alive(ctx context.Context, run bench.Run) error {
	if !run.Silent() {
		return nil
	}
	m.progress("no request was completed; asking the server for two tokens")
	one := *m.Source.Request(workload.WarmUpStream.Draw(2), 0) // which no probe asks
	one.OutputTokens = min(2, one.OutputTokens)
	began := time.Now()
	last, err := m.load.Run(ctx, m.recalled(atOnce([]workload.Request{one})), nil)
	if err != nil {
		m.result.GPUTime += time.Since(began) // spent all the same
		return err
	}
	m.result.GPUTime += last.Elapsed
	for _, s := range last.Samples {
		switch {
		case s.OK():
			drained, err := m.server.Drain(ctx)
			m.result.GPUTime += drained
			if err != nil {
				return serverError{err}
			}
			return nil
		case s.Failure != "" && s.Failure != bench.TimedOut && s.Failure != bench.NeverFinished:
			return m.useless(ctx, fmt.Sprintf("no request was completed, and one more failed too: %s: %s", s.Failure, s.Detail))
		}
	}
	return AwaitDeath(ctx, m.server, &serverctl.ExitError{Class: serverctl.Hang, Cause: serverctl.NoToken, Code: -1,
		Evidence: fmt.Sprintf("no request was completed under load, nor was one more within %.0f s", last.Elapsed.Seconds())})
}
