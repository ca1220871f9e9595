// Package gpu says what GPUs there are and what they do: memory, utilization, power, clocks, throttle reasons. It starts
// nothing but nvidia-smi, and never links or opens NVML: a static binary that opens it dies of SIGSEGV where there is a
// GPU.
package gpu

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"
)

// ErrNone says that no program could use an NVIDIA GPU here: there is no nvidia-smi, no driver, or no device. It is a
// fact about the machine and no failure; the error that wraps it has the reason.
var ErrNone = errors.New("no NVIDIA GPU")

// A Source says what the GPUs do at this moment. Its error is ErrNone, a *Failure, or the end of ctx.
type Source interface {
	Query(ctx context.Context) (Reading, error)
}

// A Reading is what a source said at one moment.
type Reading struct {
	At   time.Time `json:"at"`
	GPUs []GPU     `json:"gpus"` // by index
}

// A GPU is one device, or one instance of a device that MIG has divided.
//
// Every figure is nil where its source does not tell it: nvidia-smi says [N/A], [Not Supported] or, of MIG and of other
// users' containers, [Insufficient Permissions]. Nil is unlike 0, and JSON, which has no NaN, shows it as null. Unsaid
// has the source's own words for it.
type GPU struct {
	Index  int    `json:"index"`
	UUID   string `json:"uuid"`
	Name   string `json:"name"`
	Driver string `json:"driver"`        // such as 580.173.02
	MIG    string `json:"mig,omitempty"` // "enabled" for a divided device, a profile such as "2g.20gb #3" for an instance

	TotalMiB       *float64 `json:"total_mib"`
	UsedMiB        *float64 `json:"used_mib"` // without what the driver reserves, so that used + free is less than total
	FreeMiB        *float64 `json:"free_mib"`
	Utilization    *float64 `json:"utilization_percent"` // of the last 1/6 to 1 s in which any kernel ran
	PowerW         *float64 `json:"power_w"`             // mean of the last second since Ampere, before that the last value
	PowerLimitW    *float64 `json:"power_limit_w"`
	SMClockMHz     *float64 `json:"sm_clock_mhz"`
	MemoryClockMHz *float64 `json:"memory_clock_mhz"`
	TemperatureC   *float64 `json:"temperature_c"`

	// Throttle says why the clocks are not higher, see the Throttle words; empty when nothing holds them, nil when the
	// source does not tell.
	Throttle []string `json:"throttle"`

	Unsaid map[string]string `json:"unsaid,omitempty"` // by the source's name of the field
}

// The words of GPU.Throttle. The first five are about choices and load, the others about a machine that needs attention.
const (
	ThrottleIdle              = "idle"
	ThrottleApplicationClocks = "application clocks"
	ThrottlePowerCap          = "power cap"
	ThrottleSyncBoost         = "sync boost"
	ThrottleDisplayClock      = "display clock"
	ThrottleHardware          = "hardware slowdown"
	ThrottleSoftwareThermal   = "software thermal slowdown"
	ThrottleHardwareThermal   = "hardware thermal slowdown"
	ThrottlePowerBrake        = "power brake"
)

// throttleWords are the bits of nvmlClocksEventReason, once nvmlClocksThrottleReason, from the lowest (nvml.h). DCGM
// passes the same mask on.
var throttleWords = []string{
	ThrottleIdle, ThrottleApplicationClocks, ThrottlePowerCap, ThrottleHardware, ThrottleSyncBoost,
	ThrottleSoftwareThermal, ThrottleHardwareThermal, ThrottlePowerBrake, ThrottleDisplayClock,
}

// throttle puts a mask of reasons in words. A bit that is not known yet is named by its value.
func throttle(mask uint64) []string {
	words := []string{} // not nil: nothing holds the clocks, and that is known
	for ; mask != 0; mask &= mask - 1 {
		if i := bits.TrailingZeros64(mask); i < len(throttleWords) {
			words = append(words, throttleWords[i])
		} else {
			words = append(words, fmt.Sprintf("reason 0x%x", uint64(1)<<i))
		}
	}
	return words
}

// A Process is one that holds a context on a GPU, and memory with it.
type Process struct {
	PID     int      `json:"pid"`      // as the driver counts, on the host rather than in a container; 0 when it is not told
	GPU     string   `json:"gpu_uuid"` // of the device, also when the process uses an instance of it
	UsedMiB *float64 `json:"used_mib"` // nil when it is not told
}

// A Failure is a source that could not say what the GPUs do, although there may be some.
type Failure struct {
	Doing  string // what was attempted
	Why    string // what happened instead, with the source's own words
	Remedy string // may be empty
}

func (f *Failure) Error() string {
	if f.Remedy == "" {
		return f.Doing + ": " + f.Why
	}
	return f.Doing + ": " + f.Why + "; " + f.Remedy
}

// sortGPUs puts them in the order of their numbers, instances of one device in that of their names.
func sortGPUs(gpus []GPU) {
	slices.SortStableFunc(gpus, func(a, b GPU) int { return a.Index - b.Index })
}
