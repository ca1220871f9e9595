package vllm

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// No real GPU has this name or this UUID.
const (
	gpuName = "Simulated GPU"
	gpuUUID = "GPU-simulated-0000-0000-0000-000000000000"
)

// smiFormat is the only format that serverctl/gpu asks nvidia-smi for.
const smiFormat = "csv,noheader,nounits"

func mib(x float64) string { return strconv.FormatFloat(x, 'f', 0, 64) }

// gpuFields returns a value for each field of --query-gpu. The field names are those of driver 580. Only the memory is
// simulated. Load, power and clocks have one constant value while a process holds memory, and another while no process
// does.
func gpuFields(total, used float64, busy bool) map[string]string {
	byLoad := func(idle, working string) string {
		if busy {
			return working
		}
		return idle
	}
	return map[string]string{
		"index": "0", "name": gpuName, "uuid": gpuUUID, "driver_version": "simulated", "mig.mode.current": "Disabled",
		"memory.total": mib(total), "memory.used": mib(used), "memory.free": mib(max(0, total-used)),
		"utilization.gpu": byLoad("0", "100"), "temperature.gpu": byLoad("30", "60"),
		"power.draw": byLoad("75.00", "600.00"), "power.limit": "700.00",
		"clocks.sm": byLoad("345", "1980"), "clocks.mem": "3201",
		"clocks_event_reasons.active": byLoad("0x0000000000000001", "0x0000000000000000"),
	}
}

// NvidiaSMI acts as nvidia-smi for the simulated GPU in a directory. It answers only what serverctl/gpu asks: CSV
// without header and units, once or in a loop. A loop ends with ctx, or when nobody reads the output. The parameter
// totalGiB is the GPU's size until a server has used the GPU. NvidiaSMI returns the exit code. Like nvidia-smi it
// writes errors to its standard output.
func NvidiaSMI(ctx context.Context, args []string, dir string, totalGiB float64, out io.Writer) int {
	flags := flag.NewFlagSet("nvidia-smi", flag.ContinueOnError)
	flags.SetOutput(out)
	gpuQuery := flags.String("query-gpu", "", "`fields` of the GPU")
	appQuery := flags.String("query-compute-apps", "", "`fields` of the processes that hold memory: pid and used_memory")
	format := flags.String("format", "", "must be "+smiFormat)
	every := flags.Int("lms", 0, "`milliseconds` between two answers; 0 means one answer")
	if flags.Parse(args) != nil {
		return 2
	}
	refuse := func(text string) int {
		fmt.Fprintln(out, text)
		return 2
	}
	switch {
	case dir == "":
		return refuse("No simulated GPU is given: set TUNER_SIM_GPU_DIR to the directory of --sim-gpu.")
	case *format != smiFormat || (*gpuQuery == "") == (*appQuery == ""):
		return refuse("The simulated nvidia-smi answers --query-gpu or --query-compute-apps, with --format=" + smiFormat + ".")
	}
	for {
		answer, unknown, err := answerSMI(dir, totalGiB, *gpuQuery, *appQuery)
		switch {
		case err != nil:
			fmt.Fprintln(out, err)
			return 1
		case unknown != "":
			return refuse(fmt.Sprintf("Field %q is not a valid field to query.\n", unknown))
		}
		if _, err := io.WriteString(out, answer); err != nil || *every == 0 {
			return 0 // an error means that nobody reads the output any more
		}
		select {
		case <-ctx.Done():
			return 0
		case <-time.After(time.Duration(*every) * time.Millisecond):
		}
	}
}

// answerSMI answers one query. If the query has a field that does not exist, the result unknown is the name of that
// field.
func answerSMI(dir string, totalGiB float64, gpuQuery, appQuery string) (answer, unknown string, err error) {
	g := &fakeGPU{dir: dir}
	total, err := g.total(totalGiB * 1024)
	if err != nil {
		return "", "", err
	}
	used, holders, err := g.measure(time.Now())
	if err != nil {
		return "", "", err
	}
	rows := []map[string]string{gpuFields(total, used, len(holders) > 0)}
	if appQuery != "" {
		rows = nil
		for _, h := range holders {
			rows = append(rows, map[string]string{"pid": strconv.Itoa(h.PID), "used_memory": mib(h.MiB), "gpu_uuid": gpuUUID})
		}
	}
	for _, row := range rows {
		var values []string
		for name := range strings.SplitSeq(cmp.Or(gpuQuery, appQuery), ",") {
			value, ok := row[name]
			if !ok {
				return "", name, nil
			}
			values = append(values, value)
		}
		answer += strings.Join(values, ", ") + "\n"
	}
	return answer, "", nil
}
