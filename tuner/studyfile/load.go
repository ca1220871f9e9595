package studyfile

import (
	"slices"
)

// Load says which program sends the requests.
type Load struct {
	Driver  string   // TunerBench or VLLMBench
	Command []string // command of VLLMBench; the tuner appends the options

	// Burstiness is the shape of the gaps between arrivals: 1 is Poisson, below it is burstier, above it smoother. 0 means 1.
	Burstiness float64
}

// The drivers of a Load.
const (
	TunerBench = "tuner"      // the tuner itself, as `tuner bench` does
	VLLMBench  = "vllm-bench" // `vllm bench serve`, whose latencies count from the POST
)

// drivers are the legal values of Load.Driver.
var drivers = []string{TunerBench, VLLMBench}

// checkLoad refuses a driver that the study cannot use, and fills in the default command.
func (d *decoder) checkLoad(f *File) {
	l := &f.Load
	given := d.nodes["load.command"] != nil
	if l.Driver != VLLMBench {
		if given && slices.Contains(drivers, l.Driver) {
			d.failAtKey("load.command", "load.command has no effect on driver %s; remove it, or write driver: %s", l.Driver, VLLMBench)
		}
		return
	}
	switch {
	case f.Server.Simulate != "":
		d.failAt("load.driver", "driver %s needs a server that speaks HTTP, and %s runs in virtual time; write driver: %s", VLLMBench, f.Server.Simulate, TunerBench)
	case given && (len(l.Command) == 0 || l.Command[0] == ""):
		d.failAt("load.command", "load.command is empty; write [vllm, bench, serve]")
	}
	if !given {
		l.Command = []string{"vllm", "bench", "serve"}
	}
}
