package serverctl

import (
	"slices"
	"strconv"
	"strings"
)

// sizes are the flags whose product is the number of GPUs of one server (vllm/config/parallel.py: world_size times data
// parallel ranks).
var sizes = [][]string{
	{"--tensor-parallel-size", "-tp"}, {"--pipeline-parallel-size", "-pp"}, {"--data-parallel-size", "-dp"},
}

// WorldSize is how many GPUs a server with these args uses. Sizes that are no numbers count as 1: the server will say so.
func WorldSize(args []string) int {
	size := 1
	for _, names := range sizes {
		size *= sizeOf(args, names)
	}
	return size
}

// sizeOf returns the last value of a flag.
func sizeOf(args, names []string) int {
	size := 1
	for i, arg := range args {
		if !slices.Contains(names, flagName(arg)) {
			continue
		}
		_, value, inline := strings.Cut(arg, "=")
		if !inline && i+1 < len(args) {
			value = args[i+1]
		}
		if n, err := strconv.Atoi(value); err == nil && n > 0 {
			size = n
		}
	}
	return size
}
