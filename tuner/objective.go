package tuner

import (
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// asJudged returns the study with the capacity of each trial as the study's objective counts it.
func asJudged(study studies.Study) studies.Study {
	o := study.Objective()
	if o == studies.TotalCapacity {
		return study
	}
	study.Trials, study.Prior = o.Judged(study.Trials), o.Judged(study.Prior)
	return study
}

// rivalFor returns a trial as the rival of another trial. With the objective capacity_per_gpu, a server with twice the
// GPUs must carry twice as much to be as good. The probes of two servers with different numbers of GPUs are not
// compared one by one. Their rates differ so much that the same requests make different bursts.
func rivalFor(t *studies.Trial, best studies.Trial, o studies.Objective) trial.Rival {
	rival := trial.Rival{Capacity: best.Result.Capacity, Probes: best.Probes}
	if factor := o.Factor(*t) / o.Factor(best); factor != 1 {
		rival = trial.Rival{Capacity: rival.Capacity.Times(factor), Unit: " for as many GPUs"}
	}
	return rival
}
