package workload

// WithoutRunOut returns the schedule without its run-out, as in vllm bench serve. The last requests then see a falling load.
func WithoutRunOut(schedule Schedule) Schedule {
	return func(yield func(Arrival) bool) {
		for a := range schedule {
			if a.Phase == RunOut || !yield(a) {
				return
			}
		}
	}
}
