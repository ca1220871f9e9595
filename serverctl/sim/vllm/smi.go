package vllm

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// No real GPU has these names.
const (
	gpuName   = "Simulated GPU"
	gpuUUID   = "GPU-simulated-0000-0000-0000-000000000000"
	gpuDriver = "simulated"
)

// A card is the state of the GPU at one moment.
type card struct {
	total, used float64 // MiB
	holders     []holding
}

// A property is a field of a query, with its names and unit in nvidia-smi, driver 580.
type property[T any] struct {
	names []string
	unit  string
	value func(T) string
}

func mib(x float64) string { return strconv.FormatFloat(x, 'f', 0, 64) }

// byLoad returns one constant while a process holds memory, and another while none does. Only the memory is simulated.
func byLoad(idle, busy string) func(card) string {
	return func(c card) string {
		if len(c.holders) > 0 {
			return busy
		}
		return idle
	}
}

func always(text string) func(card) string { return func(card) string { return text } }

var gpuProperties = []property[card]{
	{[]string{"index"}, "", always("0")},
	{[]string{"count"}, "", always("1")},
	{[]string{"name", "gpu_name"}, "", always(gpuName)},
	{[]string{"uuid", "gpu_uuid"}, "", always(gpuUUID)},
	{[]string{"driver_version"}, "", always(gpuDriver)},
	{[]string{"timestamp"}, "",
		func(card) string { return time.Now().Format("2006/01/02 15:04:05.000") }},
	{[]string{"memory.total"}, "MiB", func(c card) string { return mib(c.total) }},
	{[]string{"memory.used"}, "MiB", func(c card) string { return mib(c.used) }},
	{[]string{"memory.free"}, "MiB", func(c card) string { return mib(max(0, c.total-c.used)) }},
	{[]string{"utilization.gpu"}, "%",
		byLoad("0", "100")},
	{[]string{"utilization.memory"}, "%",
		byLoad("0", "50")},
	{[]string{"power.draw"}, "W", byLoad("75.00", "600.00")},
	{[]string{"power.limit"}, "W", always("700.00")},
	{[]string{"clocks.sm", "clocks.current.sm"}, "MHz", byLoad("345", "1980")},
	{[]string{"clocks.mem", "clocks.current.memory"}, "MHz", always("3201")},
	{[]string{"temperature.gpu"}, "", byLoad("30", "60")},
	{[]string{"clocks_event_reasons.active", "clocks_throttle_reasons.active"}, "",
		byLoad("0x0000000000000001", "0x0000000000000000")},
	{[]string{"mig.mode.current"}, "", always("Disabled")},
}

var appProperties = []property[holding]{
	{[]string{"pid"}, "", func(h holding) string { return strconv.Itoa(h.PID) }},
	{[]string{"process_name", "name"}, "", func(holding) string { return "simulated" }},
	{[]string{"gpu_uuid"}, "", func(holding) string { return gpuUUID }},
	{[]string{"gpu_name"}, "", func(holding) string { return gpuName }},
	{[]string{"used_gpu_memory", "used_memory"}, "MiB",
		func(h holding) string { return mib(h.MiB) }},
}

// An smi is one command line of nvidia-smi.
type smi struct {
	gpu, apps []string // fields of the query
	header    bool
	units     bool
	every     time.Duration // interval of a loop; 0 means to print once
	list      bool
}

// NvidiaSMI is nvidia-smi for the simulated GPU in a directory: CSV queries, once or in a loop, and -L. A loop ends
// with ctx or when nobody reads the output. totalGiB is the GPU's size until a server has used it. NvidiaSMI returns
// the exit code. Like nvidia-smi it writes errors to its standard output.
func NvidiaSMI(ctx context.Context, args []string, dir string, totalGiB float64, out io.Writer) int {
	if dir == "" {
		fmt.Fprintln(out, "No simulated GPU is given: set TUNER_SIM_GPU_DIR to the directory of --sim-gpu.")
		return 2
	}
	q, wrong := parseSMI(args)
	if wrong != "" {
		fmt.Fprintln(out, wrong)
		return 2
	}
	for {
		c, err := readCard(dir, totalGiB)
		if err != nil {
			fmt.Fprintln(out, err)
			return 1
		}
		if err := q.print(out, c); err != nil {
			return 0 // nobody reads the output any more
		}
		q.header = false
		if q.every == 0 {
			return 0
		}
		select {
		case <-ctx.Done():
			return 0
		case <-time.After(q.every):
		}
	}
}

// readCard reads the state of the GPU.
func readCard(dir string, totalGiB float64) (c card, err error) {
	g := &fakeGPU{dir: dir}
	if c.total, err = g.total(totalGiB * 1024); err != nil {
		return c, err
	}
	c.used, c.holders, err = g.used(time.Now())
	return c, err
}

// parseSMI reads the arguments, or returns what is wrong with them.
func parseSMI(args []string) (q smi, wrong string) {
	format := ""
	for i := 0; i < len(args); i++ {
		name, value, inline := strings.Cut(args[i], "=")
		switch name {
		case "--query-gpu":
			q.gpu = strings.Split(value, ",")
		case "--query-compute-apps":
			q.apps = strings.Split(value, ",")
		case "--format":
			format = value
		case "-L", "--list-gpus":
			q.list = true
		case "-l", "-lms", "--loop", "--loop-ms", "-i", "--id":
			if !inline {
				if i++; i == len(args) {
					return q, fmt.Sprintf("Option %q requires a value.", name)
				}
				value = args[i]
			}
			if q.every, wrong = loopOf(name, value, q.every); wrong != "" {
				return q, wrong
			}
		default:
			return q, fmt.Sprintf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help. "+
				"(the simulated one does not know %q)", args[i])
		}
	}
	words := strings.Split(format, ",")
	if (q.gpu != nil || q.apps != nil) && !slices.Contains(words, "csv") {
		return q, "\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help."
	}
	q.header, q.units = !slices.Contains(words, "noheader"), !slices.Contains(words, "nounits")
	if wrong := unknownField(q.gpu, gpuProperties); wrong != "" {
		return q, wrong
	}
	return q, unknownField(q.apps, appProperties)
}

// loopOf reads the interval of a loop. -i has no effect, because there is only one GPU.
func loopOf(name, value string, every time.Duration) (time.Duration, string) {
	unit := time.Second
	switch name {
	case "-i", "--id":
		return every, ""
	case "-lms", "--loop-ms":
		unit = time.Millisecond
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 {
		return 0, fmt.Sprintf("Option %q has the invalid value %q.", name, value)
	}
	return time.Duration(n) * unit, ""
}

func unknownField[T any](asked []string, known []property[T]) string {
	for _, name := range asked {
		if !slices.ContainsFunc(known, func(p property[T]) bool { return slices.Contains(p.names, name) }) {
			return fmt.Sprintf("Field %q is not a valid field to query.\n", name)
		}
	}
	return ""
}

// print writes the answer. It fails when nobody reads the output any more.
func (q smi) print(out io.Writer, c card) error {
	switch {
	case q.gpu != nil:
		return table(out, q, q.gpu, gpuProperties, []card{c})
	case q.apps != nil:
		return table(out, q, q.apps, appProperties, c.holders)
	case q.list:
		_, err := fmt.Fprintf(out, "GPU 0: %s (UUID: %s)\n", gpuName, gpuUUID)
		return err
	}
	_, err := fmt.Fprintf(out, "GPU 0: %s, %s of %s MiB in use\n", gpuName, mib(c.used), mib(c.total))
	return err
}

// table writes the fields of each row, separated as by nvidia-smi.
func table[T any](out io.Writer, q smi, asked []string, known []property[T], rows []T) error {
	var b strings.Builder
	fields := make([]property[T], len(asked))
	titles := make([]string, len(asked))
	for i, name := range asked {
		fields[i] = known[slices.IndexFunc(known, func(p property[T]) bool { return slices.Contains(p.names, name) })]
		titles[i] = name
		if fields[i].unit != "" && q.units {
			titles[i] += " [" + fields[i].unit + "]"
		}
	}
	if q.header {
		b.WriteString(strings.Join(titles, ", ") + "\n")
	}
	for _, row := range rows {
		values := make([]string, len(fields))
		for i, f := range fields {
			values[i] = f.value(row)
			if f.unit != "" && q.units {
				values[i] += " " + f.unit
			}
		}
		b.WriteString(strings.Join(values, ", ") + "\n")
	}
	_, err := io.WriteString(out, b.String())
	return err
}
