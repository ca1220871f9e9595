package bench

import (
	"math"
	"runtime/metrics"
	"syscall"
	"time"

	"vllmtuner/serverctl/cgroup"
)

// Names of histograms in package runtime/metrics.
const (
	pauseMetric     = "/sched/pauses/total/gc:seconds"
	schedulerMetric = "/sched/latencies:seconds"
)

// A processStats is a reading of the process's counters. The difference between two readings is the Lateness of a run.
type processStats struct {
	pauses, waits *metrics.Float64Histogram
	throttled     time.Duration
	cpu           time.Duration
}

func readProcessStats() processStats {
	samples := []metrics.Sample{{Name: pauseMetric}, {Name: schedulerMetric}}
	metrics.Read(samples)
	w := processStats{throttled: cgroup.Throttled(nil), cpu: cpuTime()}
	for i, to := range []**metrics.Float64Histogram{&w.pauses, &w.waits} {
		if samples[i].Value.Kind() == metrics.KindFloat64Histogram {
			*to = samples[i].Value.Float64Histogram()
		}
	}
	return w
}

// since returns the Lateness from the reading w until now.
func (w processStats) since() Lateness {
	now := readProcessStats()
	return Lateness{
		GCPause:      quantileSince(w.pauses, now.pauses, 1),
		SchedulerP99: quantileSince(w.waits, now.waits, 0.99),
		Throttled:    max(0, now.throttled-w.throttled),
		CPU:          now.cpu - w.cpu,
	}
}

// quantileSince returns a quantile of the values that a histogram has gained between two readings. The result is the
// upper bound of the bucket that holds the quantile.
func quantileSince(before, after *metrics.Float64Histogram, q float64) time.Duration {
	if before == nil || after == nil || len(before.Counts) != len(after.Counts) {
		return 0
	}
	var n uint64
	for i := range after.Counts {
		n += after.Counts[i] - before.Counts[i]
	}
	if n == 0 {
		return 0
	}
	rank, seen := uint64(math.Ceil(q*float64(n))), uint64(0)
	for i := range after.Counts {
		if seen += after.Counts[i] - before.Counts[i]; seen >= rank {
			bound := after.Buckets[i+1]
			if math.IsInf(bound, 1) {
				bound = after.Buckets[i]
			}
			return time.Duration(bound * float64(time.Second))
		}
	}
	return 0
}

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
