package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/proc"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "show GPUs, cores, memory and limits, and what a study would lack",
		Description: `It reads what this machine, or this container, lets a server and the load on
it use. GPUs are asked for by nvidia-smi in PATH, or by a DCGM exporter. With
--root it writes and removes a small file there, to see whether studies are
safe on that disk. It changes nothing else, and takes seconds, also when a
driver hangs; a network disk that does not answer is given 90 seconds. Exit
code 1: something is so wrong that figures measured here would be, too;
warnings alone give 0.

Examples:
  tuner doctor
  tuner doctor --gpus 4 -o json
  tuner doctor --root /mnt/nfs/studies
  tuner doctor --dcgm http://10.0.0.7:9400`,
		Flags: []cli.Flag{
			formatFlag(),
			&cli.StringFlag{Name: "root", Usage: "`directory` for studies, on the disk that is to be examined"},
			&cli.IntFlag{Name: "gpus", Value: -1, DefaultText: "all", Usage: "`number` of GPUs that one server will use; 0 for vLLM on CPU"},
			&cli.IntFlag{Name: "streams", Value: usualStreams, Usage: "`number` of requests in flight at most"},
			&cli.StringFlag{Name: "nvidia-smi", Usage: "`path` of nvidia-smi"},
			&cli.StringFlag{Name: "dcgm", Usage: "`URL` of a DCGM exporter to ask instead"},
		},
		Action: func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			d, err := newDoctor(c)
			if err != nil {
				return err
			}
			d.examine(c.Context, host.Reader{}.Read(), os.LookupEnv)
			d.examineMeans()
			d.examineStore(c.Context, c.String("root"))
			if err := d.write(c.App.Writer, format); err != nil {
				return err
			}
			if n := d.count(host.Error); n > 0 {
				return fmt.Errorf("not ready: %s", plural(n, "error"))
			}
			return nil
		},
	}
}

// A doctor is the examination of one machine, and its report.
type doctor struct {
	Ready    bool           `json:"ready"` // no finding is an error
	Findings []host.Finding `json:"findings"`
	Need     host.Need      `json:"need"`
	GPUs     doctorGPUs     `json:"gpus"`
	Machine  host.Machine   `json:"machine"`
	Means    []string       `json:"means"`           // by which a server is ended whatever happens to the tuner
	Store    *doctorStore   `json:"store,omitempty"` // nil where none was to be examined

	source gpu.Source
}

// examineMeans finds out by what a server's processes are known and ended here. Each alone is enough for a server that behaves.
func (d *doctor) examineMeans() {
	d.Means = []string{}
	for _, means := range []struct {
		name string
		err  error
	}{{"subreaper", proc.SubreaperSupport()}, {"watchdog", proc.WatchdogSupport()}, {"cgroup v2", proc.CgroupSupport()}} {
		if means.err == nil {
			d.Means = append(d.Means, means.name)
			continue
		}
		d.Findings = append(d.Findings, host.Finding{Severity: host.Fact, What: "no " + means.name, Have: means.err.Error()})
	}
	host.Sort(d.Findings)
}

// doctorGPUs are those of the machine, or of the container.
type doctorGPUs struct {
	Source    string        `json:"source"`
	None      string        `json:"none,omitempty"` // why there is none
	List      []gpu.GPU     `json:"list"`           // those that the server will see
	Hidden    int           `json:"hidden"`         // by CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES
	Processes []gpu.Process `json:"processes"`      // that hold memory on them
}

// newDoctor reads the flags.
func newDoctor(c *cli.Context) (*doctor, error) {
	if c.Args().Len() > 0 {
		return nil, usage("doctor takes no argument; see `tuner doctor --help`")
	}
	smi, dcgm := c.String("nvidia-smi"), c.String("dcgm")
	if c.Int("streams") < 0 || c.IsSet("gpus") && c.Int("gpus") < 0 {
		return nil, usage("--gpus and --streams are 0 or more")
	}
	d := &doctor{Need: host.Need{GPUs: c.Int("gpus"), GeneratorCores: 1, Streams: c.Int("streams")}}
	switch {
	case smi != "" && dcgm != "":
		return nil, usage("--nvidia-smi and --dcgm exclude each other")
	case dcgm != "":
		address, err := url.Parse(dcgm)
		if err != nil || address.Scheme != "http" && address.Scheme != "https" || address.Host == "" {
			return nil, usage("--dcgm: a URL is wanted, such as http://10.0.0.7:9400")
		}
		d.source, d.GPUs.Source = &gpu.DCGM{URL: dcgm}, "dcgm"
		return d, nil
	case smi != "":
		if _, err := exec.LookPath(smi); err != nil {
			return nil, usage("--nvidia-smi: %w", err)
		}
	}
	d.source, d.GPUs.Source = &gpu.NvidiaSMI{Path: smi}, "nvidia-smi"
	return d, nil
}

// examine looks at the GPUs, and holds them and the machine against the need.
func (d *doctor) examine(ctx context.Context, machine host.Machine, lookup func(string) (string, bool)) {
	d.Machine = machine
	d.Findings, d.GPUs.List, d.GPUs.Processes = []host.Finding{}, []gpu.GPU{}, []gpu.Process{} // lists in JSON, also when empty
	d.findGPUs(ctx, lookup)
	if d.Need.GPUs < 0 {
		d.Need.GPUs = len(d.GPUs.List)
	}
	d.Need = d.Need.Filled()
	for _, g := range d.GPUs.List {
		d.checkGPU(g)
	}
	d.Findings = append(d.Findings, host.Check(machine, d.Need)...)
	host.Sort(d.Findings)
	d.Ready = d.count(host.Error) == 0
}

// findGPUs asks the source. That there is no GPU is a fact, unless some are needed; that nobody can tell is an error,
// unless none is.
func (d *doctor) findGPUs(ctx context.Context, lookup func(string) (string, bool)) {
	reading, err := d.source.Query(ctx)
	switch failure, failed := errors.AsType[*gpu.Failure](err); {
	case errors.Is(err, gpu.ErrNone):
		d.GPUs.None = strings.TrimPrefix(err.Error(), gpu.ErrNone.Error()+": ")
	case failed:
		d.lack("not known: "+failure.Doing+": "+failure.Why, failure.Remedy)
		return
	case err != nil:
		d.lack("not known: "+err.Error(), "")
		return
	default:
		d.GPUs.List = append(d.GPUs.List, gpu.Visible(reading, lookup)...)
		d.GPUs.Hidden = len(reading.GPUs) - len(d.GPUs.List)
	}
	if have := len(d.GPUs.List); have < d.Need.GPUs {
		text := strconv.Itoa(have)
		if d.GPUs.None != "" {
			text = "none: " + d.GPUs.None
		}
		d.lack(text, "take a machine with more GPUs, ask for them in the container's resources "+
			"(nvidia.com/gpu), or look at CUDA_VISIBLE_DEVICES")
	}
	d.findProcesses(ctx)
}

// lack notes that the GPUs are not as they should be.
func (d *doctor) lack(have, remedy string) {
	f := host.Finding{Severity: host.Error, What: "GPUs", Have: have, Remedy: remedy}
	switch {
	case d.Need.GPUs > 0:
		f.Need = strconv.Itoa(d.Need.GPUs)
	case d.Need.GPUs == 0:
		f.Severity = host.Warning
	}
	d.Findings = append(d.Findings, f)
}

// findProcesses asks who holds memory on the GPUs that the server will see.
func (d *doctor) findProcesses(ctx context.Context) {
	smi, ok := d.source.(*gpu.NvidiaSMI)
	if !ok || len(d.GPUs.List) == 0 {
		return // an exporter does not tell
	}
	processes, err := smi.Processes(ctx)
	if err != nil {
		d.Findings = append(d.Findings, host.Finding{Severity: host.Fact, What: "GPU processes", Have: "not known: " + err.Error()})
		return
	}
	for _, p := range processes {
		if slices.ContainsFunc(d.GPUs.List, func(g gpu.GPU) bool { return g.UUID == p.GPU }) {
			d.GPUs.Processes = append(d.GPUs.Processes, p)
		}
	}
}

// foreignMiB is how much memory of a GPU may be in use before it is worth a word: a display, or a monitor, takes less.
const foreignMiB = 1024

// checkGPU says what is wrong with one GPU.
func (d *doctor) checkGPU(g gpu.GPU) {
	find := func(severity host.Severity, what, have, need, remedy string) {
		d.Findings = append(d.Findings, host.Finding{
			Severity: severity, What: fmt.Sprintf("GPU %d %s", g.Index, what), Have: have, Need: need, Remedy: remedy,
		})
	}
	for _, words := range g.Unsaid {
		if strings.Contains(words, "lost") || strings.Contains(words, "reset") { // [GPU is lost], [GPU requires reset]
			find(host.Error, "state", words, "", "reset the GPU, or reboot the node")
			return
		}
	}
	switch {
	case g.UsedMiB == nil:
		find(host.Fact, "memory", "not told: "+cmp.Or(g.Unsaid["memory.used"], "no figure"), "",
			"the tuner cannot see that a stopped server's memory is free again")
	case *g.UsedMiB >= foreignMiB:
		find(host.Warning, "memory", gibibytes(*g.UsedMiB)+" in use by others", "nearly all free: vLLM takes 90 % unless told",
			"end the processes that hold it, or choose another GPU with CUDA_VISIBLE_DEVICES")
	}
	if slow := slices.DeleteFunc(slices.Clone(g.Throttle), harmless); len(slow) > 0 {
		find(host.Warning, "clocks", strings.Join(slow, ", "), "",
			"look at cooling and power of the node (nvidia-smi -q -d PERFORMANCE): what is measured now is too low")
	}
}

// harmless reports whether clocks are where they are by choice or by load.
func harmless(reason string) bool {
	return slices.Contains([]string{
		gpu.ThrottleIdle, gpu.ThrottleApplicationClocks, gpu.ThrottlePowerCap, gpu.ThrottleSyncBoost, gpu.ThrottleDisplayClock,
	}, reason)
}

func (d *doctor) count(severity host.Severity) int {
	n := 0
	for _, f := range d.Findings {
		if f.Severity == severity {
			n++
		}
	}
	return n
}

// write prints the report.
func (d *doctor) write(w io.Writer, format string) error {
	var text []byte
	var err error
	switch format {
	case "json":
		text, err = json.MarshalIndent(d, "", "  ")
		text = append(text, '\n')
	case "yaml":
		text, err = foreign.YAML(d)
	default:
		text = []byte(d.text())
	}
	if err == nil {
		_, err = w.Write(text)
	}
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// text is the report as a person reads it, within 80 columns.
func (d *doctor) text() string {
	var t doctorText
	t.gpus(d.GPUs)
	t.machine(d.Machine)
	if s := d.Store; s != nil && s.Mount.Point != "" {
		t.item("studies", "%s: %s", s.Root, s.Text)
		t.item("", "%s %s on %s, %s", s.Mount.Type, s.Mount.Source, s.Mount.Point, strings.Join(s.Mount.Options, ","))
	}
	if len(d.Means) > 0 {
		t.item("servers", "ended whatever happens, by %s", strings.Join(d.Means, ", "))
	}
	t.item("needed", "for %s, %s: %s, %d open files, %s /dev/shm", plural(d.Need.GPUs, "GPU"), plural(d.Need.Streams, "stream"),
		plural(d.Need.Cores, "core"), d.Need.OpenFiles, render.Bytes(d.Need.Shm))
	for _, f := range d.Findings {
		t.WriteByte('\n')
		have := f.What + ": " + f.Have
		if f.Need != "" {
			have += "; wanted " + f.Need
		}
		t.item(string(f.Severity), "%s", have)
		if f.Remedy != "" {
			t.item("", "%s", f.Remedy)
		}
	}
	t.WriteByte('\n')
	verdict := "ready"
	if !d.Ready {
		verdict = "not ready"
	}
	t.item(verdict, "%s, %s", plural(d.count(host.Error), "error"), plural(d.count(host.Warning), "warning"))
	return t.String()
}

// doctorText collects the lines of the report.
type doctorText struct{ strings.Builder }

// The report has its names in the first column, and what is to be said in a second one.
const (
	doctorColumn = 12
	doctorWidth  = 80 - doctorColumn
)

// item adds a name with what is to be said of it, and wraps that below itself.
func (t *doctorText) item(name, format string, args ...any) {
	margin := strings.Repeat(" ", doctorColumn)
	words := strings.Fields(fmt.Sprintf(format, args...))
	for i, word := range words {
		words[i] = broken(word)
	}
	t.WriteString(render.Hang(render.Pad(name, doctorColumn, false), strings.Join(words, " "), margin, render.DefaultWidth))
}

// broken puts spaces into a word that is wider than its column, after a slash if it is a path: those of cgroups are long.
func broken(word string) string {
	if len(word) <= doctorWidth {
		return word
	}
	end := strings.LastIndexByte(word[:doctorWidth], '/') + 1
	if end < doctorWidth/2 {
		for end = doctorWidth; !utf8.RuneStart(word[end]); end-- { // never within a letter
		}
	}
	return word[:end] + " " + broken(word[end:])
}

func (t *doctorText) gpus(g doctorGPUs) {
	switch {
	case g.None != "":
		t.item("GPUs", "none: %s", g.None)
		return
	case len(g.List) == 0 && g.Hidden == 0:
		t.item("GPUs", "not known")
		return
	}
	text := fmt.Sprintf("%d, by %s", len(g.List), g.Source)
	if len(g.List) > 0 && g.List[0].Driver != "" {
		text += ", driver " + g.List[0].Driver
	}
	if g.Hidden > 0 {
		text += fmt.Sprintf("; %d more hidden by *_VISIBLE_DEVICES", g.Hidden)
	}
	t.item("GPUs", "%s", text)
	for _, one := range g.List {
		t.gpu(one, g.Processes)
	}
}

// gpu adds four lines or so on one GPU. What is not told is a question mark.
func (t *doctorText) gpu(g gpu.GPU, processes []gpu.Process) {
	name := g.Name
	if g.MIG != "" {
		name += ", MIG " + g.MIG
	}
	t.item(fmt.Sprintf("  %d", g.Index), "%s, %s", name, g.UUID)
	t.item("", "%s of %s free, %s %% busy, %s °C", told(g.FreeMiB, gibibytes), told(g.TotalMiB, gibibytes),
		told(g.Utilization, whole), told(g.TemperatureC, whole))
	clocks := ""
	if len(g.Throttle) > 0 {
		clocks = " (" + strings.Join(g.Throttle, ", ") + ")"
	}
	t.item("", "%s of %s W, SM %s MHz, memory %s MHz%s", told(g.PowerW, whole), told(g.PowerLimitW, whole),
		told(g.SMClockMHz, whole), told(g.MemoryClockMHz, whole), clocks)
	for _, p := range processes {
		if p.GPU != g.UUID {
			continue
		}
		who := "a process of another container"
		if p.PID > 0 {
			who = fmt.Sprintf("process %d", p.PID)
		}
		t.item("", "in use by %s: %s", who, told(p.UsedMiB, gibibytes))
	}
}

// machine adds the lines on everything else.
func (t *doctorText) machine(m host.Machine) {
	limit := "no cgroup limit"
	if m.Cores.Limit != nil {
		limit = fmt.Sprintf("limit %.3g by %s", *m.Cores.Limit, m.Cores.LimitAt)
	}
	t.item("cores", "%.3g usable; %s to run on, %s", m.Cores.Usable, plural(m.Cores.Affinity, "CPU"), limit)
	limit = "no cgroup limit"
	if m.Memory.Limit != nil {
		limit = fmt.Sprintf("limit %s by %s", render.Bytes(*m.Memory.Limit), m.Memory.LimitAt)
	}
	t.item("memory", "%s of %s free, %s", render.Bytes(m.Memory.Free), render.Bytes(m.Memory.Total), limit)
	if m.Shm.Total > 0 {
		t.item(m.Shm.Dir, "%s of %s free", render.Bytes(m.Shm.Free), render.Bytes(m.Shm.Total))
	}
	count := func(n int64) string { return strconv.FormatInt(n, 10) }
	t.limit("open files", m.Limits.OpenFiles, count)
	t.limit("processes", m.Limits.Processes, count)
	t.limit("locked mem", m.Limits.LockedMemory, render.Bytes)
}

func (t *doctorText) limit(name string, l *host.Limit, show func(int64) string) {
	if l == nil {
		return // said among what is not known
	}
	number := func(n *int64) string {
		if n == nil {
			return "unlimited"
		}
		return show(*n)
	}
	t.item(name, "%s, hard limit %s", number(l.Soft), number(l.Hard))
}

// told shows a figure, or a question mark where there is none.
func told(v *float64, show func(float64) string) string {
	if v == nil {
		return "?"
	}
	return show(*v)
}

func whole(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }

func gibibytes(mib float64) string { return strconv.FormatFloat(mib/1024, 'f', 1, 64) + " GiB" }

// plural writes a count with its noun, such as "no GPU", "1 GPU" and "2 GPUs".
func plural[N int | float64](n N, noun string) string {
	switch n {
	case 0:
		return "no " + noun
	case 1:
		return "1 " + noun
	}
	return fmt.Sprintf("%v %ss", n, noun)
}
