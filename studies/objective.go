package studies

import (
	"slices"

	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
)

// An Objective is what a study maximises.
type Objective string

// The objectives.
const (
	TotalCapacity  Objective = "capacity"         // the capacity of the server
	CapacityPerGPU Objective = "capacity_per_gpu" // the capacity of the server, divided by the number of its GPUs
)

// Objectives are the legal objectives.
var Objectives = []Objective{TotalCapacity, CapacityPerGPU}

// ObjectiveKey is the key of the objective in Study.World. A world without it has the objective TotalCapacity.
const ObjectiveKey = "objective"

// Objective returns the objective of the study's present world.
func (s Study) Objective() Objective { return objectiveOf(s.World) }

// DecidingObjective returns the objective of the world that decides the study; see Deciding.
func (s Study) DecidingObjective() Objective {
	if len(s.Events) == 0 { // the study has one world
		return s.Objective()
	}
	return objectiveOf(s.Asked()[s.Deciding()-1])
}

func objectiveOf(world map[string]string) Objective {
	if world[ObjectiveKey] == string(CapacityPerGPU) {
		return CapacityPerGPU
	}
	return TotalCapacity
}

// Of returns the capacity of a trial as the objective counts it. All comparisons of a study use this capacity.
func (o Objective) Of(t Trial) capacity.Capacity { return t.Result.Capacity.Times(1 / o.Factor(t)) }

// Judged returns the trials with their capacities as the objective counts them. Predictions stay as they are: the
// simulator knows nothing of the number of GPUs, so it predicts each point with the number of GPUs of the first trial.
func (o Objective) Judged(trials []Trial) []Trial {
	trials = slices.Clone(trials)
	for i := range trials {
		if t := &trials[i]; !t.Predicted() {
			t.Result.Capacity = o.Of(*t)
		}
	}
	return trials
}

// Factor returns the ratio of the server's capacity to the capacity that the objective counts. This is the number of
// GPUs that the trial's args use, or 1.
func (o Objective) Factor(t Trial) float64 {
	if o == CapacityPerGPU {
		return float64(t.GPUs())
	}
	return 1
}

// Per returns the words that follow a figure of the objective: "" or " per GPU".
func (o Objective) Per() string {
	if o == CapacityPerGPU {
		return " per GPU"
	}
	return ""
}

// GPUs returns how many GPUs the trial's server uses, by its args.
func (t Trial) GPUs() int { return serverctl.GPUCount(t.Args) }
