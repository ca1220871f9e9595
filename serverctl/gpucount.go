package serverctl

import (
	"slices"
	"strconv"

	"vllmtuner/tuner/space"
)

// parallelSizes are flags of vLLM, each with its short name (vllm/config/parallel.py of 0.14.1 and 0.33). The product
// of their values is the number of GPUs that a server uses. Decode context parallelism is not among them: it uses the
// GPUs of the tensor parallel group.
var parallelSizes = []struct{ name, short string }{
	{"tensor-parallel-size", "tp"}, {"pipeline-parallel-size", "pp"}, {"data-parallel-size", "dp"}, {"prefill-context-parallel-size", "pcp"},
}

// GPUCount returns how many GPUs a server with these args uses: the product of its parallel sizes. A size that is not
// given is 1. If a flag is given twice, the last value counts, as in vLLM. A size that is not a number counts as 1; the
// server will report it.
func GPUCount(args []string) int {
	flags, err := space.Flags(args)
	if err != nil {
		return 1
	}
	count := 1
	for _, size := range parallelSizes {
		value := 1
		for _, flag := range flags {
			if flag.Name == size.name || flag.Name == size.short {
				setSize(&value, flag)
			}
		}
		count *= value
	}
	return count
}

// SetsGPUs reports whether a flag changes how many GPUs a server uses. The flag is named without its leading dashes.
func SetsGPUs(flag string) bool {
	for _, size := range parallelSizes {
		if flag == size.name || flag == size.short {
			return true
		}
	}
	return false
}

// multiMachineFlags are flags of a server that has GPUs on other machines too.
var multiMachineFlags = []string{
	"nnodes", "data-parallel-size-local", "dpl", "data-parallel-address", "dpa", "data-parallel-rank", "dpn",
	"data-parallel-external-lb", "dpe", "data-parallel-hybrid-lb", "dph", "data-parallel-multi-port-external-lb", "dpm",
}

// SpansMachines reports whether a server with these args may use GPUs of other machines.
func SpansMachines(args []string) bool {
	flags, _ := space.Flags(args) // without flags the server uses this machine
	return slices.ContainsFunc(flags, func(f space.Flag) bool {
		switch f.Name {
		case "distributed-executor-backend", "data-parallel-backend", "dpb":
			return !slices.Equal(f.Values, []string{"mp"}) && !slices.Equal(f.Values, []string{"uni"})
		}
		return slices.Contains(multiMachineFlags, f.Name)
	})
}

// setSize sets size to the value of the flag, if that is a positive number.
func setSize(size *int, flag space.Flag) {
	if len(flag.Values) != 1 {
		return
	}
	if n, err := strconv.Atoi(flag.Values[0]); err == nil && n > 0 {
		*size = n
	}
}
