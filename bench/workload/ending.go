package workload

// WithoutRunOut is a schedule that ends with its window, as vllm bench serve has it: the last requests then see a falling load.
func WithoutRunOut(schedule Schedule) Schedule {
	return func(yield func(Arrival) bool) {
		for a := range schedule {
			if a.Phase == RunOut || !yield(a) {
				return
			}
		}
	}
}
