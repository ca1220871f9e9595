package studyfile

import (
	"slices"

	"github.com/goccy/go-yaml/ast"
)

// Load says who sends the requests.
type Load struct {
	Driver  string   // one of Drivers
	Command []string // of VLLMBench; its options are appended

	// Burstiness is the shape of the gaps between arrivals: 1 is Poisson (also 0), larger is smoother.
	Burstiness float64
}

// The drivers of a Load.
const (
	TunerBench = "tuner"      // the tuner itself, as `tuner bench` does
	VLLMBench  = "vllm-bench" // `vllm bench serve`, whose latencies count from the POST
)

// Drivers are the known ones.
var Drivers = []string{TunerBench, VLLMBench}

func (d *decoder) load(l *Load, path string, n ast.Node) {
	d.mapping(path, n, map[string]reader{
		"driver":     oneOf(d, &l.Driver, Drivers...),
		"command":    d.words(&l.Command),
		"burstiness": d.real(&l.Burstiness, 0.01, 1000),
	})
}

// checkLoad holds the driver against what it can do, and completes its command.
func (d *decoder) checkLoad(f *File) {
	l := &f.Load
	given := d.nodes["load.command"] != nil
	if l.Driver != VLLMBench {
		if given && slices.Contains(Drivers, l.Driver) {
			d.failAtKey("load.command", "load.command has no effect on driver %s; remove it, or write driver: %s", l.Driver, VLLMBench)
		}
		return
	}
	switch {
	case f.Server.Simulate != "":
		d.failAt("load.driver", "driver %s needs a server that speaks HTTP; %s is simulated in virtual time: write driver: %s", VLLMBench, f.Server.Simulate, TunerBench)
	case given && (len(l.Command) == 0 || l.Command[0] == ""):
		d.failAt("load.command", "load.command is empty; write [vllm, bench, serve]")
	}
	if !given {
		l.Command = []string{"vllm", "bench", "serve"}
	}
}
