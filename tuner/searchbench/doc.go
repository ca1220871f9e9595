// Package searchbench runs whole studies, and the methods of other tools, on simulated servers whose capacities are
// known. For tests only: make bench-search writes its table. It never uses a GPU.
package searchbench
