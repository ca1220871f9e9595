package serverctl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/gpu"
)

const (
	// gpuSlackMiB is a tolerance in MiB. Memory counts as released if at most this much more is in use than before the
	// start. The driver keeps some MiB per GPU for itself, and more after its first use.
	gpuSlackMiB = 256
	// gpuEvery is the pause between two queries of the GPU's memory. nvidia-smi takes about 50 ms per call and GPU.
	gpuEvery = 250 * time.Millisecond
)

// A GPUMemory is the memory in use on one GPU, in MiB.
type GPUMemory struct {
	Index  int     `json:"index"`
	Before float64 `json:"before_mib"` // before the server's start
	After  float64 `json:"after_mib"`  // after its end; -1 when the GPU no longer reports it
}

// A MemoryError says that a server's GPU memory was not released. No other server may start then: it would run out of
// memory, or get a smaller cache.
type MemoryError struct {
	GPUs    []GPUMemory // GPUs with more memory in use than before the start
	Waited  time.Duration
	Holders []gpu.Process // processes that hold GPU memory, as far as the driver tells
}

// Error lists each GPU with its memory, and says what to do.
func (e *MemoryError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "wait for the GPU's memory to be released: after %s", render.Took(e.Waited))
	for _, g := range e.GPUs {
		if g.After == unknownMiB {
			fmt.Fprintf(&b, " GPU %d no longer reports its memory;", g.Index)
			continue
		}
		fmt.Fprintf(&b, " GPU %d has %s in use, but had %s before the start;", g.Index, render.Mebibytes(g.After), render.Mebibytes(g.Before))
	}
	for _, p := range e.Holders {
		if p.UsedMiB == nil {
			fmt.Fprintf(&b, " process %d holds memory of unknown size;", p.PID)
			continue
		}
		fmt.Fprintf(&b, " process %d holds %s;", p.PID, render.Mebibytes(*p.UsedMiB))
	}
	b.WriteString(" find who uses the GPU with nvidia-smi, or raise server.gpu_memory_timeout")
	return b.String()
}

// gpus holds the GPUs of one server. It knows how much of their memory was in use before the server's start. At the
// server's end it waits until no more than that, with a tolerance of gpuSlackMiB, is in use.
type gpus struct {
	source     gpu.Source                  // nil means that no GPU is queried
	own        func(gpu.Reading) []gpu.GPU // picks, from a reading, the GPUs that the server uses
	timeout    time.Duration               // limit for the release of the memory
	before     []gpu.GPU                   // the server's GPUs before its start; empty if no GPU can be queried
	watchError string                      // why watch() ended early; valid after watch() has returned
}

func newGPUs(c Config) gpus {
	return gpus{
		source:  c.GPU,
		own:     func(r gpu.Reading) []gpu.GPU { return OwnGPUs(r, c.Env, c.Args) },
		timeout: c.GPUMemoryTimeout,
	}
}

// takeStock records the memory that is in use before the server's start.
func (g *gpus) takeStock(ctx context.Context) error {
	if g.source == nil {
		return nil
	}
	reading, err := g.source.Query(ctx)
	if errors.Is(err, gpu.ErrNone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the GPUs' memory before the start: %w", err)
	}
	g.before = g.own(reading)
	return nil
}

// OwnGPUs picks, from a reading, the GPUs that a server with these args uses. The server gets the tuner's own
// environment, with the variables in env added.
func OwnGPUs(reading gpu.Reading, env map[string]string, args []string) []gpu.GPU {
	visible := gpu.Visible(reading, func(name string) (string, bool) {
		if value, ok := env[name]; ok {
			return value, true
		}
		return os.LookupEnv(name)
	})
	return visible[:min(len(visible), GPUCount(args))] // vLLM uses the first GPUs that it can see
}

// A looper is a gpu.Source that reports readings by itself. This costs less than one query for each reading.
type looper interface {
	Watch(ctx context.Context, interval time.Duration, report func(gpu.Reading)) error
}

// watch reads the server's GPUs once per interval until ctx ends, and reports each reading.
func (g *gpus) watch(ctx context.Context, interval time.Duration, report func(gpu.Reading)) {
	if len(g.before) == 0 {
		return
	}
	reportOwn := func(r gpu.Reading) {
		r.GPUs = g.own(r)
		report(r)
	}
	var err error
	if source, ok := g.source.(looper); ok {
		err = source.Watch(ctx, interval, reportOwn)
	} else {
		err = poll(ctx, g.source, interval, reportOwn)
	}
	if err != nil && ctx.Err() == nil {
		g.watchError = err.Error()
	}
}

// maxMisses is how many readings in a row may fail before poll() gives up.
const maxMisses = 10

// poll queries a source once per interval. It returns when ctx ends, or with the last error when it gives up.
func poll(ctx context.Context, source gpu.Source, interval time.Duration, report func(gpu.Reading)) error {
	misses := 0
	for {
		switch r, err := source.Query(ctx); {
		case err == nil:
			misses = 0
			report(r)
		case misses == maxMisses:
			return err
		default:
			misses++
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(interval):
		}
	}
}

// awaitRelease waits until the GPUs have no more memory in use than before the start, at most for the timeout. It
// returns the memory that was in use at the end, and how long it waited. Both results are valid after an error too.
func (g *gpus) awaitRelease(ctx context.Context) (memory []GPUMemory, waited time.Duration, err error) {
	if len(g.before) == 0 {
		return nil, 0, nil
	}
	begin := time.Now()
	for {
		reading, err := g.source.Query(ctx)
		if err == nil {
			memory = compare(g.before, reading.GPUs)
		}
		waited = time.Since(begin)
		above := slices.DeleteFunc(slices.Clone(memory), GPUMemory.released)
		switch {
		case err == nil && len(above) == 0:
			return memory, waited, nil
		case waited < g.timeout:
			time.Sleep(gpuEvery)
		case err != nil:
			return memory, waited, fmt.Errorf("wait for the GPU's memory to be released: %w", err)
		default:
			return memory, waited, &MemoryError{GPUs: above, Waited: waited, Holders: g.holders(ctx)}
		}
	}
}

// holders returns the processes that hold GPU memory. In most containers the driver does not tell them, and holders
// returns none.
func (g *gpus) holders(ctx context.Context) []gpu.Process {
	lister, ok := g.source.(interface {
		Processes(ctx context.Context) ([]gpu.Process, error)
	})
	if !ok {
		return nil
	}
	processes, err := lister.Processes(ctx)
	if err != nil {
		return nil
	}
	return processes
}

// unknownMiB stands for the memory in use on a GPU that no longer reports it.
const unknownMiB = -1

// compare pairs, for each GPU, the memory in use before the server's start with the memory in use now. It omits GPUs
// that did not report their memory before the start.
func compare(before, after []gpu.GPU) []GPUMemory {
	var list []GPUMemory
	for _, b := range before {
		if b.UsedMiB == nil {
			continue
		}
		now := GPUMemory{Index: b.Index, Before: *b.UsedMiB, After: unknownMiB}
		for _, a := range after {
			if a.UUID == b.UUID && a.Index == b.Index && a.MIG == b.MIG && a.UsedMiB != nil {
				now.After = *a.UsedMiB
			}
		}
		list = append(list, now)
	}
	return list
}

// released reports whether the memory in use is at most gpuSlackMiB more than before the start.
func (g GPUMemory) released() bool { return g.After != unknownMiB && g.After <= g.Before+gpuSlackMiB }
