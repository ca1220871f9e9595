package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"vllmtuner/render"
)

// queryLimit is the default time limit for an answer. A healthy nvidia-smi answers in 30 ms to 2 s. It is slowest when
// no program keeps the driver open (no persistence mode). With many GPUs, each GPU can add up to a second.
const queryLimit = 10 * time.Second

// We use these return codes of nvidia-smi(1). They have the values of nvmlReturn_t in nvml.h.
const (
	codeDriverNotLoaded  = 9
	codeLibraryNotFound  = 12
	codeCorruptedInfoROM = 14 // only a warning: the answer is complete
)

// NvidiaSMI queries nvidia-smi. Several goroutines may use it. Its fields may be changed until the first call.
type NvidiaSMI struct {
	Path    string        // path of the program; empty means nvidia-smi in PATH
	Timeout time.Duration // limit for one answer; 0 means ten seconds

	pause time.Duration       // wait before Watch restarts nvidia-smi; 0 means firstPause
	kill  func(pid int) error // kills a child; nil means sigkill()

	mu      sync.Mutex
	unknown []string // names of columns that this nvidia-smi has rejected
	stuck   *child   // a child that survived SIGKILL
}

// Query returns all GPUs of the machine. In a container it returns only the GPUs of the container.
func (n *NvidiaSMI) Query(ctx context.Context) (Reading, error) {
	gpus, err := query(ctx, n, "--query-gpu", gpuColumns(), newGPU)
	if err == nil && len(gpus) == 0 {
		err = n.failure("it listed no GPU and gave no reason", "run nvidia-smi yourself to see what it says")
	}
	if err != nil {
		return Reading{}, err
	}
	sortGPUs(gpus)
	return Reading{At: time.Now(), GPUs: gpus}, nil
}

// Processes returns the processes that hold memory on the GPUs. In a container it often returns none.
func (n *NvidiaSMI) Processes(ctx context.Context) ([]Process, error) {
	return query(ctx, n, "--query-compute-apps", processColumns, newProcess)
}

// query asks nvidia-smi for a table. If nvidia-smi does not know some columns, query asks again without them. Later
// queries leave out these columns from the start.
func query[T any](ctx context.Context, n *NvidiaSMI, option string, columns []column, read func(row) (T, error)) ([]T, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, n.limit(), errTimeout)
	defer cancel()
	for {
		names := n.names(columns)
		text, complaints, err := n.run(ctx, option+"="+strings.Join(names, ","), "--format=csv,noheader,nounits")
		if n.reject(names, text+complaints) && len(n.names(columns)) > 0 {
			continue // each pass rejects at least one name, so the loop ends
		}
		if err != nil {
			return nil, err
		}
		rows, err := parseTable(text, names, read)
		if err != nil {
			return nil, n.failure("its answer makes no sense: "+err.Error(), "check that it is NVIDIA's own nvidia-smi")
		}
		return rows, nil
	}
}

// names returns one name for each column: the first that this nvidia-smi has not rejected. It leaves out a column whose
// names are all rejected.
func (n *NvidiaSMI) names(columns []column) (names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range columns {
		if i := slices.IndexFunc(c, func(name string) bool { return !slices.Contains(n.unknown, name) }); i >= 0 {
			names = append(names, c[i])
		}
	}
	return names
}

// reject remembers the names that nvidia-smi calls unknown in its answer. It reports whether there are any.
func (n *NvidiaSMI) reject(names []string, answer string) (any bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, match := range unknownField.FindAllStringSubmatch(answer, -1) {
		if name := match[1]; slices.Contains(names, name) {
			n.unknown = append(n.unknown, name)
			any = true
		}
	}
	return any
}

// errTimeout is the cause with which a query's context ends when the answer comes too late.
var errTimeout = errors.New("no answer in time")

func (n *NvidiaSMI) limit() time.Duration { return cmp.Or(n.Timeout, queryLimit) }

func (n *NvidiaSMI) program() string { return cmp.Or(n.Path, "nvidia-smi") }

// run runs nvidia-smi until it ends. It returns the output even if nvidia-smi failed.
func (n *NvidiaSMI) run(ctx context.Context, args ...string) (stdout, stderr string, err error) {
	path, err := n.find()
	if err != nil {
		return "", "", err
	}
	var out, complaints boundedBuffer
	c, err := start(path, args, &out, &complaints)
	if err != nil {
		return "", "", n.failure("it does not start: "+err.Error(), "")
	}
	select {
	case <-c.exited:
	case <-ctx.Done():
		return "", "", n.abandon(ctx, c)
	}
	if out.full || complaints.full {
		return "", "", n.failure(fmt.Sprintf("more output than any valid answer: over %s, so the tuner ended it", render.Bytes(maxOutput)),
			"check that it is NVIDIA's own nvidia-smi")
	}
	stdout, stderr = out.buf.String(), complaints.buf.String()
	return stdout, stderr, n.verdict(c.err, stdout, stderr)
}

// find returns the program's path. It fails while an earlier run hangs in the kernel, because a new run would hang too.
func (n *NvidiaSMI) find() (string, error) {
	if err := n.checkStuck(); err != nil {
		return "", err
	}
	path, err := exec.LookPath(n.program())
	switch {
	case errors.Is(err, exec.ErrNotFound) && !strings.Contains(n.program(), "/"):
		return "", none("there is no %s in PATH", n.program())
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return "", none("there is no %s", n.program())
	case err != nil:
		return "", n.failure(err.Error(), "give its full path, and make it executable")
	}
	return path, nil
}

// abandon ends a run whose context has ended, and returns the reason as an error.
func (n *NvidiaSMI) abandon(ctx context.Context, c *child) error {
	if err := n.end(c); err != nil {
		return err
	}
	if cause := context.Cause(ctx); cause != errTimeout {
		return fmt.Errorf("query %s: %w", n.program(), cause)
	}
	return n.failure(fmt.Sprintf("no answer within %s, so the tuner ended it", render.Took(n.limit())),
		"the driver may hang: look for NVRM and Xid in the node's kernel log (dmesg)")
}

// end ends a child process. If the child survives, end remembers it and returns an error.
func (n *NvidiaSMI) end(c *child) error {
	kill := n.kill
	if kill == nil {
		kill = sigkill
	}
	if c.end(kill) {
		return nil
	}
	n.mu.Lock()
	n.stuck = c
	n.mu.Unlock()
	return n.checkStuck()
}

// checkStuck returns an error while a child that could not be ended still exists.
func (n *NvidiaSMI) checkStuck() error {
	n.mu.Lock()
	c := n.stuck
	n.mu.Unlock()
	if c == nil {
		return nil
	}
	select {
	case <-c.exited:
		return nil
	default:
		return n.failure(fmt.Sprintf("its process %d survives SIGKILL", c.cmd.Process.Pid),
			"it hangs inside the driver; usually only a reboot of the node helps")
	}
}

func (n *NvidiaSMI) failure(why, remedy string) error {
	return &Failure{Doing: "query " + n.program(), Why: why, Remedy: remedy}
}

// verdict returns the error for a run that has ended; nil means that its output is usable.
func (n *NvidiaSMI) verdict(err error, stdout, stderr string) error {
	said := firstLine(stdout, stderr)
	exit, ended := errors.AsType[*exec.ExitError](err)
	if strings.Contains(stdout+stderr, "No devices were found") {
		return none("%s says %q", n.program(), said)
	}
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay): // ErrWaitDelay: nvidia-smi has ended, but a child of it holds the pipe
		return nil
	case !ended:
		return n.failure(err.Error(), "")
	case exit.ExitCode() == codeCorruptedInfoROM:
		return nil
	case exit.ExitCode() == codeDriverNotLoaded, exit.ExitCode() == codeLibraryNotFound:
		return none("%s says %q", n.program(), said)
	}
	why := exit.String() // such as "exit status 18" or "signal: killed"
	if said != "" {
		why += ": " + said
	}
	return n.failure(why, remedyFor(said))
}

// firstLine returns the first line that is neither empty nor a warning. nvidia-smi writes its errors to standard
// output.
func firstLine(texts ...string) string {
	for _, text := range texts {
		for line := range strings.Lines(text) {
			if line = strings.TrimSpace(line); isRow(line) {
				return clip(line)
			}
		}
	}
	return ""
}

// remedyFor returns a remedy if nvidia-smi has reported a common error of the driver, and "" otherwise.
func remedyFor(said string) string {
	for _, known := range []struct{ words, remedy string }{
		{"Driver/library version mismatch", "the driver was updated under its loaded kernel module: reboot the node, or reload the module"},
		{"NVML: Unknown Error", "the container has lost its devices (a reload of systemd does that): restart the container"},
		{"Insufficient Permissions", "the container may not open the devices: request the GPU in its resources"},
		{"GPU is lost", "the GPU has fallen off the bus: reboot the node"},
	} {
		if strings.Contains(said, known.words) {
			return known.remedy
		}
	}
	return ""
}
