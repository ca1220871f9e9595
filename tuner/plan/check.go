package plan

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// Say reports a finding of a check under a name. A finding is harmless unless its name is Warning.
type Say func(name, format string, args ...any)

// Warning is the name of a finding that does not stop a study but may harm it.
const Warning = "warning"

// CheckNeeds returns an error for the first need of a server that is not met. The commands check and run both call it,
// so that they refuse the same studies. It does not call CheckFlags, because run does that itself and only once.
func (p *Plan) CheckNeeds(ctx context.Context, say Say) error {
	if err := p.CheckMachine(ctx, say); err != nil {
		return err
	}
	if err := p.checkWeights(say); err != nil {
		return err
	}
	return p.checkRequests(say)
}

// checkServer returns an error if the server's binary or a local model is missing.
func (p *Plan) checkServer() error {
	server := p.File.Server
	if server.Simulate != "" {
		return p.checkSimulated()
	}
	if err := (serverctl.Config{Command: server.Command, Model: p.File.Model, Args: server.Args, Env: p.Env}).Check(); err != nil {
		return fmt.Errorf("%s: %w", p.File.Path, err)
	}
	model := p.File.Model
	if strings.HasPrefix(model, "/") || strings.HasPrefix(model, ".") {
		if _, err := os.Stat(filepath.Join(model, "config.json")); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: model: %s holds no config.json; a path must be a model's directory", p.File.Path, model)
		}
	}
	return nil
}

// checkSimulated returns an error if the profile is missing or wrong, or if the simulator does not model a searched
// flag.
func (p *Plan) checkSimulated() error {
	if _, err := sim.LoadProfile(p.File.Server.Simulate); err != nil {
		return err
	}
	for _, parameter := range p.File.Parameters {
		if parameter.Name != space.SpeculativeTokens && !sim.Models(parameter.Name) {
			remedy := "remove it, or search it on a real server"
			if near := space.Nearest(parameter.Name, sim.Modelled()); near != "" {
				remedy = fmt.Sprintf("did you mean %q? If not, %s", near, remedy)
			}
			return fmt.Errorf("%s: parameters.%s: the simulated server does not model --%s, so all its values would give the same figures; %s",
				p.File.Path, parameter.Name, parameter.Name, remedy)
		}
	}
	return nil
}

// checkLoad returns an error if the program that generates the load is missing.
func (p *Plan) checkLoad() error {
	if p.File.Load.Driver != studyfile.VLLMBench {
		return nil
	}
	if _, err := exec.LookPath(p.File.Load.Command[0]); err != nil {
		return fmt.Errorf("%s: load.command: %w; give its full path, or leave load.driver out", p.File.Path, err)
	}
	return nil
}

// checkBudget refuses a budget of GPU time that is shorter than one probe. It does nothing without a start rate,
// because the time of a probe depends on the rate.
func (p *Plan) checkBudget() error {
	f := p.File
	probe := f.Probe.LeadIn + p.Window()
	if f.Budget.GPUTime <= 0 || f.Probe.StartRate == 0 || probe <= f.Budget.GPUTime {
		return nil
	}
	least, limit := f.SLO.MinRequests()
	return fmt.Errorf("%s: budget.gpu_time %s is less than one probe takes: %s for %d requests (a verdict on %s takes %d), and a trial has about %d probes; "+
		"raise it, lower probe.min_requests or probe.seconds, or choose a lower percentile",
		f.Path, render.Span(f.Budget.GPUTime), render.Span(probe), p.Requests(), limit, least, TypicalProbes)
}

// checkLegal returns an error if no point keeps the constraints.
func (p *Plan) checkLegal() error {
	random, err := sampler.New("random", p.Space, 1, 1)
	if err != nil {
		return err
	}
	if _, err := random.Next(0, nil); err != nil {
		return fmt.Errorf("%s: parameters and constraints leave no point to try: %w", p.File.Path, err)
	}
	return nil
}

// checkLongest refuses a max-model-len, fixed or searched, that is shorter than the workload's longest request.
func (p *Plan) checkLongest() error {
	const flag = "max-model-len"
	longest, shortest := p.Source.Longest(), studyfile.MaxModelLen(p.File.Server.Args)
	remedy := "raise it in server.args"
	if searched := p.Space.Parameter(flag); searched != nil {
		remedy = "search only longer ones"
		for _, text := range searched.Levels(2) { // the two ends of a range, or all choices
			if n, err := strconv.Atoi(text); err == nil && (shortest == 0 || n < shortest) {
				shortest = n
			}
		}
	}
	if shortest > 0 && longest > shortest {
		return fmt.Errorf("%s: %s %d is less than the workload's longest request of %d tokens; %s", p.File.Path, flag, shortest, longest, remedy)
	}
	return nil
}

// checkRequests returns an error if the workload is too small for a probe. It also reports skipped rows and repeated
// requests.
func (p *Plan) checkRequests(say Say) error {
	if n, first := workload.Skipped(p.Source); n > 0 {
		say("bad rows", "%d are skipped; the first: %v", n, first)
	}
	need := p.Requests()
	if err := workload.Enough(p.Source, need); err != nil {
		return inputf("%s: workload: %w", p.File.Path, err)
	}
	if workload.Repeats(p.Source, need) > 0 {
		say("repeats", "the workload has %d requests, but a probe sends %d: they repeat and hit the prefix cache (repeat: salt makes them miss it)", p.Source.Len(), need)
	}
	return nil
}

// CheckFlags checks that the server knows the flags of the study. If askServer is false, it does not ask a real server,
// which takes 10 to 60 s to list its flags.
func (p *Plan) CheckFlags(ctx context.Context, say Say, askServer bool) error {
	s := p.File.Server
	args := s.Args
	for _, point := range p.samplePoints() {
		args = append(args[:len(args):len(args)], p.Space.Args(point)...)
	}
	if s.Simulate != "" {
		profile, err := sim.LoadProfile(s.Simulate)
		if err != nil {
			return err
		}
		if _, err := profile.ParseArgs(args); err != nil {
			return inputf("%s: the simulated server refuses: %w", p.File.Path, err)
		}
		say("server", "%s, simulated", s.Simulate)
		return nil
	}
	if refused := slices.Compact(sim.RefusedValues(args)); len(refused) > 0 {
		return inputf("%s: vLLM accepts no such value: %s; correct it in server.args, server.current or parameters", p.File.Path, strings.Join(refused, "; "))
	}
	command := strings.Join(s.Command, " ")
	if !askServer {
		say("server", "%s exists; its flags are not checked", command)
		return nil
	}
	accepted, err := serverctl.Help(ctx, s.Command, p.Env)
	if err != nil {
		return fmt.Errorf("%s: server.command: %w", p.File.Path, err)
	}
	if err := serverctl.CheckFlags(accepted, args); err != nil {
		return inputf("%s: %w", p.File.Path, err)
	}
	flags, _ := space.Flags(args) // no error: studyfile has already parsed these args
	own := lo.UniqBy(flags, func(f space.Flag) string { return f.Name })
	say("server", "%s knows all %d flags of the study (it has %d flags)", command, len(own), len(accepted))
	return nil
}

// samplePoints returns points that together use every flag of the space, with both ends of each range and every choice.
// CheckFlags joins the args of all points, and vLLM uses the last value of a flag. So in the last point every parameter
// has its highest value, because these values fit together.
func (p *Plan) samplePoints() []space.Point {
	n := len(p.File.Parameters)
	low, high := make([]float64, n), make([]float64, n)
	for i := range high {
		high[i] = 0.999
	}
	points := []space.Point{p.Space.Sample(low)}
	for _, parameter := range p.File.Parameters {
		for _, level := range p.Space.Parameter(parameter.Name).Levels(2) {
			point := maps.Clone(points[0])
			point[parameter.Name] = level
			points = append(points, point)
		}
	}
	return append(points, p.Space.Sample(high))
}
