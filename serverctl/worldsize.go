package serverctl

import (
	"strconv"

	"vllmtuner/tuner/space"
)

// worldSize returns how many GPUs a server with these args uses: the product of its parallel sizes
// (vllm/config/parallel.py: world_size × the number of data parallel ranks). A size that is not a number counts as 1;
// the server will report it.
func worldSize(args []string) int {
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

// setSize reads the size of a flag. If a flag is given twice, the last value counts.
func setSize(size *int, flag space.Flag) {
	if len(flag.Values) != 1 {
		return
	}
	if n, err := strconv.Atoi(flag.Values[0]); err == nil && n > 0 {
		*size = n
	}
}
