// Package gpu tells which GPUs exist, and their memory, utilization, power, clocks and throttle reasons. It starts no
// program except nvidia-smi. It never links or opens NVML, because a static binary that opens NVML crashes with SIGSEGV
// on a machine with a GPU.
package gpu

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"
)

// ErrNone says that no program can use an NVIDIA GPU here: there is no nvidia-smi, no driver, or no device. This is a
// fact about the machine, not a failure. The error that wraps it has the reason.
var ErrNone = errors.New("no NVIDIA GPU")

// A NoneError is an error that wraps ErrNone and gives the reason.
type NoneError struct{ Why string }

// Error returns the text of ErrNone, followed by the reason.
func (e *NoneError) Error() string { return ErrNone.Error() + ": " + e.Why }

// Unwrap returns ErrNone.
func (e *NoneError) Unwrap() error { return ErrNone }

func none(format string, args ...any) error { return &NoneError{fmt.Sprintf(format, args...)} }

// A Source tells the state of the GPUs at this moment. Its error is a *NoneError, a *Failure, or the end of ctx.
type Source interface {
	Query(ctx context.Context) (Reading, error)
}

// A Reading is the answer of a source at one moment.
type Reading struct {
	At   time.Time `json:"at"`
	GPUs []GPU     `json:"gpus"` // sorted by index
}

// A GPU is a device, or an instance of a device that MIG has divided.
//
// A number is nil if its source does not report it. nvidia-smi then says [N/A], [Not Supported] or, for MIG and for
// other users' containers, [Insufficient Permissions]. Nil differs from 0; JSON shows it as null. Unsaid has the
// source's own words.
type GPU struct {
	Index  int    `json:"index"`
	UUID   string `json:"uuid"`
	Name   string `json:"name"`
	Driver string `json:"driver"`        // such as 580.173.02
	MIG    string `json:"mig,omitempty"` // "enabled" for a divided device, a profile such as "2g.20gb #3" for an instance

	Profile string `json:"-"` // profile of an instance without its number, such as 2g.20gb; "" for a device

	TotalMiB       *float64 `json:"total_mib"`
	UsedMiB        *float64 `json:"used_mib"` // the memory that the driver reserves is left out, so used + free is less than total
	FreeMiB        *float64 `json:"free_mib"`
	Utilization    *float64 `json:"utilization_percent"` // share of the last 1/6 to 1 s in which a kernel ran
	PowerW         *float64 `json:"power_w"`             // mean of the last second on Ampere and newer GPUs; on older GPUs the last value
	PowerLimitW    *float64 `json:"power_limit_w"`
	SMClockMHz     *float64 `json:"sm_clock_mhz"`
	MemoryClockMHz *float64 `json:"memory_clock_mhz"`
	TemperatureC   *float64 `json:"temperature_c"`

	// Throttle lists the reasons that limit the clocks. throttleReasons has their names. Throttle is empty when nothing
	// limits the clocks, and nil when the source does not tell.
	Throttle []string `json:"throttle"`

	Unsaid map[string]string `json:"unsaid,omitempty"` // the source's words for missing values, by the name that the source gives the field
}

// figures are the numbers of a GPU, by their names in nvidia-smi and in DCGM's dcgm_fields.h. Both sources give memory
// in MiB, power in W, and clocks in MHz.
var figures = []struct {
	smi, dcgm string
	of        func(*GPU) **float64
}{
	{"memory.total", "DCGM_FI_DEV_FB_TOTAL", func(g *GPU) **float64 { return &g.TotalMiB }},
	{"memory.used", "DCGM_FI_DEV_FB_USED", func(g *GPU) **float64 { return &g.UsedMiB }},
	{"memory.free", "DCGM_FI_DEV_FB_FREE", func(g *GPU) **float64 { return &g.FreeMiB }},
	{"utilization.gpu", "DCGM_FI_DEV_GPU_UTIL", func(g *GPU) **float64 { return &g.Utilization }},
	{"power.draw", "DCGM_FI_DEV_POWER_USAGE", func(g *GPU) **float64 { return &g.PowerW }},
	{"power.limit", "DCGM_FI_DEV_POWER_MGMT_LIMIT", func(g *GPU) **float64 { return &g.PowerLimitW }},
	{"clocks.sm", "DCGM_FI_DEV_SM_CLOCK", func(g *GPU) **float64 { return &g.SMClockMHz }},
	{"clocks.mem", "DCGM_FI_DEV_MEM_CLOCK", func(g *GPU) **float64 { return &g.MemoryClockMHz }},
	{"temperature.gpu", "DCGM_FI_DEV_GPU_TEMP", func(g *GPU) **float64 { return &g.TemperatureC }},
}

// A reason is one reason why a GPU limits its clocks.
type reason struct {
	name   string
	normal bool
}

// throttleReasons names the bits of nvmlClocksEventReason, formerly nvmlClocksThrottleReason, from the lowest bit
// (nvml.h). DCGM uses the same mask. A reason that is marked as normal comes from settings or load. Any other reason
// means that the machine needs attention.
var throttleReasons = []reason{
	{"idle", true}, {"application clocks", true}, {"power cap", true}, {"hardware slowdown", false}, {"sync boost", true},
	{"software thermal slowdown", false}, {"hardware thermal slowdown", false}, {"power brake", false}, {"display clock", true},
}

// Slowdowns returns only those throttle reasons for which the machine needs attention.
func (g GPU) Slowdowns() (names []string) {
	for _, name := range g.Throttle {
		if i := slices.IndexFunc(throttleReasons, func(r reason) bool { return r.name == name }); i < 0 || !throttleReasons[i].normal {
			names = append(names, name)
		}
	}
	return names
}

// throttle returns the names of the reasons in a mask. An unknown bit is named by its value.
func throttle(mask uint64) []string {
	words := []string{} // empty and not nil means that nothing limits the clocks
	for ; mask != 0; mask &= mask - 1 {
		if i := bits.TrailingZeros64(mask); i < len(throttleReasons) {
			words = append(words, throttleReasons[i].name)
		} else {
			words = append(words, fmt.Sprintf("reason 0x%x", uint64(1)<<i))
		}
	}
	return words
}

// A Process is a process with a context on a GPU, which takes memory there.
type Process struct {
	PID     int      `json:"pid"`      // process ID on the host, not in a container; 0 when the driver does not report it
	GPU     string   `json:"gpu_uuid"` // the UUID of the device, even if the process uses an instance of it
	UsedMiB *float64 `json:"used_mib"` // nil when the driver does not report it
}

// A Failure says that a source could not answer, although there may be GPUs.
type Failure struct {
	Doing  string // what was attempted
	Why    string // what went wrong, with the source's own words
	Remedy string // may be empty
}

func (f *Failure) Error() string {
	if f.Remedy == "" {
		return f.Doing + ": " + f.Why
	}
	return f.Doing + ": " + f.Why + "; " + f.Remedy
}

// sortGPUs sorts by index and keeps the order of a device's instances.
func sortGPUs(gpus []GPU) {
	slices.SortStableFunc(gpus, func(a, b GPU) int { return a.Index - b.Index })
}
