package studies

import (
	"testing"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

func TestObjective(t *testing.T) {
	one := Trial{Args: []string{"--max-model-len", "4096", "-tp", "2", "--pipeline-parallel-size=2"}, Result: trial.Result{
		Capacity: capacity.Capacity{Rate: 8, Low: 7, High: 9, Lowest: 6, Highest: 10, StdErr: 0.1, Bound: capacity.Exact},
	}}
	for _, row := range []struct {
		name       string
		world      map[string]string
		want       Objective
		rate, high float64
	}{
		{"a study of an older tuner", nil, TotalCapacity, 8, 9},
		{"the default by name", map[string]string{ObjectiveKey: "capacity"}, TotalCapacity, 8, 9},
		{"per GPU", map[string]string{ObjectiveKey: "capacity_per_gpu"}, CapacityPerGPU, 2, 2.25},
	} {
		o := Study{World: row.world}.Objective()
		if c := o.Of(one); o != row.want || c.Rate != row.rate || c.High != row.high || c.StdErr != 0.1 || one.Result.Capacity.Rate != 8 {
			t.Errorf("%s: %s gives %+v; want %s, %g and %g", row.name, o, c, row.want, row.rate, row.high)
		}
	}
}

// The world that decides a study has its own objective, even if the present world has another one.
func TestTheDecidingWorldHasItsObjective(t *testing.T) {
	met := Trial{State: Done, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 1, Low: 1, Bound: capacity.Exact}}}
	study := Study{
		World:  map[string]string{ObjectiveKey: string(CapacityPerGPU)},
		Events: []Event{{Kind: Drift, Trial: 1, Changes: Changes{{Fact: ObjectiveKey, Is: new(string(CapacityPerGPU))}}}},
		Trials: []Trial{met, {Number: 1, State: Running}},
	}
	if got := study.DecidingObjective(); got != TotalCapacity {
		t.Errorf("before the new world has a capacity, the objective is %s", got)
	}
	study.Trials[1] = met
	study.Trials[1].Number = 1
	if got := study.DecidingObjective(); got != CapacityPerGPU {
		t.Errorf("after that, the objective is %s", got)
	}
}
