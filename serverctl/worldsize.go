package serverctl

import (
	"strconv"

	"vllmtuner/tuner/space"
)

// WorldSize is how many GPUs a server with these args uses: the product of the sizes of its parallelism
// (vllm/config/parallel.py: world_size times data parallel ranks). Sizes that are no numbers count as 1: the server will
// say so.
func WorldSize(args []string) int {
	flags, err := space.Flags(args)
	if err != nil {
		return 1
	}
	tensor, pipeline, data := 1, 1, 1
	for _, flag := range flags {
		switch flag.Name {
		case "tensor-parallel-size", "tp":
			setSize(&tensor, flag)
		case "pipeline-parallel-size", "pp":
			setSize(&pipeline, flag)
		case "data-parallel-size", "dp":
			setSize(&data, flag)
		}
	}
	return tensor * pipeline * data
}

// setSize reads the size of a flag; of one that is given twice the last counts.
func setSize(size *int, flag space.Flag) {
	if len(flag.Values) != 1 {
		return
	}
	if n, err := strconv.Atoi(flag.Values[0]); err == nil && n > 0 {
		*size = n
	}
}
