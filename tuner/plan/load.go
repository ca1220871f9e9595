package plan

import (
	"cmp"
	"fmt"
	"os/exec"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/tuner/studyfile"
)

// A Load has the requests of a study, and says how its probes send them.
type Load struct {
	Source workload.Source
	Seed   uint64 // seed of requests and arrivals
	ITL    bool   // record the times between tokens even if the SLO does not need them

	file *studyfile.File
}

// open opens the requests. A lead-in is uncounted load before a probe's window. If the file has no lead-in, open
// computes one from the requests.
func (l *Load) open() (err error) {
	f := l.file
	if l.Source, err = workload.Open(f.WorkloadSpec(), l.Seed); err != nil {
		return fmt.Errorf("%s: workload: %w", f.Path, err)
	}
	if f.Probe.LeadIn < 0 {
		f.Probe.LeadIn = trial.SearchLeadIn(f.SLO, l.Source)
	}
	return nil
}

// Protocol returns what happens to the prefix cache between probes.
func (l *Load) Protocol() trial.Protocol { return l.file.Protocol(l.Source.Len() == 0) }

// Probe returns the load of a probe at the start rate, or at the lowest rate if there is no start rate.
func (l *Load) Probe() workload.Plan {
	f := l.file
	return workload.Plan{
		Source: l.Source, Seed: l.Seed, Rate: cmp.Or(f.Probe.StartRate, f.Probe.MinRate), LeadIn: f.Probe.LeadIn, Window: f.Probe.Window,
		MinRequests: f.Probe.MinRequests, Arrivals: workload.Arrivals{Burstiness: f.Load.Burstiness},
	}
}

// Requests returns the number of requests in the window of a probe at the start rate.
func (l *Load) Requests() int {
	n, _ := l.Probe().Counted()
	return n
}

// Window returns the length of the window of a probe at the start rate.
func (l *Load) Window() time.Duration {
	f := l.file
	return max(f.Probe.Window, time.Duration(float64(f.Probe.MinRequests)/max(f.Probe.StartRate, f.Probe.MinRate)*float64(time.Second)))
}

// confirmWindows is the length of a confirmation's windows, as a multiple of the windows of the search.
const confirmWindows = 2

// confirm returns the lengths of the probes that confirm a point.
func (l *Load) confirm() trial.Lengths {
	f := l.file
	return trial.Lengths{
		LeadIn: max(f.Probe.LeadIn, trial.DefaultLeadIn(f.SLO, l.Source, l.Protocol())),
		Window: confirmWindows * f.Probe.Window, MinRequests: f.Probe.MinRequests,
	}
}

// NeedsITL reports whether the times between tokens must be recorded.
func (l *Load) NeedsITL() bool { return l.ITL || l.file.SLO.NeedsITL() }

// CacheText describes the cache protocol. It also says what share of a window's prompt tokens the server's prefix cache
// will hold.
func (l *Load) CacheText() string {
	protocol := l.Protocol()
	state := "carried from probe to probe"
	if protocol == trial.Reset {
		state = "emptied before each probe"
	}
	found := "none"
	if share := trial.Cached(l.Probe(), protocol); share >= 0.005 {
		found = fmt.Sprintf("up to %.0f %%", 100*share)
	}
	return fmt.Sprintf("%s: the prefix cache is %s; it holds %s of a window's prompt tokens", protocol, state, found)
}

// checkDriver returns an error if the program that generates the load is missing.
func (l *Load) checkDriver() error {
	if l.file.Load.Driver != studyfile.VLLMBench {
		return nil
	}
	if _, err := exec.LookPath(l.file.Load.Command[0]); err != nil {
		return fmt.Errorf("%s: load.command: %w; give its full path, or leave load.driver out", l.file.Path, err)
	}
	return nil
}

// checkBudget refuses a budget of GPU time that is shorter than one probe. It does nothing without a start rate,
// because the time of a probe depends on the rate.
func (l *Load) checkBudget() error {
	f := l.file
	probe := f.Probe.LeadIn + l.Window()
	if f.Budget.GPUTime <= 0 || f.Probe.StartRate == 0 || probe <= f.Budget.GPUTime {
		return nil
	}
	least, limit := f.SLO.MinRequests()
	return fmt.Errorf("%s: budget.gpu_time %s is less than one probe takes: %s for %s (a verdict on %s takes %d), and a trial has about %d probes; "+
		"raise it, lower probe.min_requests or probe.seconds, or choose a lower percentile",
		f.Path, render.Span(f.Budget.GPUTime), render.Span(probe), render.Count(l.Requests(), "request"), limit, least, typicalProbes)
}

// checkRequests returns an error if the workload is too small for a probe. It also reports skipped rows and repeated
// requests.
func (l *Load) checkRequests(say Say) error {
	if n, first := workload.Skipped(l.Source); n > 0 {
		say("bad rows", "%d are skipped; the first: %v", n, first)
	}
	need := l.Requests()
	if err := workload.Enough(l.Source, need); err != nil {
		return inputf("%s: workload: %w", l.file.Path, err)
	}
	if workload.Repeats(l.Source, need) > 0 {
		say("repeats", "the workload has %s, but a probe sends %d: they repeat and hit the prefix cache (repeat: salt makes them miss it)", render.Count(l.Source.Len(), "request"), need)
	}
	return nil
}
