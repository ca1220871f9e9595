package doctor

import (
	"fmt"
	"strconv"
	"strings"

	"vllmtuner/render"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
)

// Text returns the report for a person, in lines of at most width columns.
func (r *Report) Text(width int) string {
	t := text{render.Text{Width: width, NameWidth: 12}}
	t.gpus(r.GPUs)
	t.machine(r.Machine)
	if s := r.Store; s != nil && s.Mount.Point != "" {
		t.item("studies", "%s: %s", s.Root, s.Text)
		t.item("", "%s %s on %s, %s", s.Mount.Type, s.Mount.Source, s.Mount.Point, strings.Join(s.Mount.Options, ","))
	}
	if len(r.Means) > 0 {
		t.item("servers", "end even if the tuner dies, by %s", strings.Join(r.Means, ", "))
	}
	t.item("needed", "for %s, %s: %.3g cores, %d open files, %s /dev/shm", render.Count(r.Need.GPUs, "GPU"), render.Count(r.Need.Streams, "stream"),
		r.Need.Cores, r.Need.OpenFiles, render.Bytes(r.Need.Shm))
	for _, f := range r.Findings {
		t.WriteByte('\n')
		t.item(string(f.Severity), "%s", f.Text())
		if f.Remedy != "" {
			t.item("", "%s", f.Remedy)
		}
	}
	t.WriteByte('\n')
	verdict := "ready"
	if !r.Ready {
		verdict = "not ready"
	}
	t.item(verdict, "%s, %s", render.Count(r.Count(host.Error), "error"), render.Count(r.Count(host.Warning), "warning"))
	return t.String()
}

// A text collects the lines of a report.
type text struct{ render.Text }

// item adds a name with its description. It also breaks long words, such as the path of a cgroup.
func (t *text) item(name, format string, args ...any) {
	for _, line := range render.Break(fmt.Sprintf(format, args...), t.Columns()-t.NameWidth) {
		t.Item(name, "%s", line)
		name = ""
	}
}

func (t *text) gpus(g GPUs) {
	switch {
	case g.None != "":
		t.item("GPUs", "none: %s", g.None)
		return
	case len(g.List) == 0 && g.Hidden == 0:
		t.item("GPUs", "not known")
		return
	}
	head := fmt.Sprintf("%d, by %s", len(g.List), g.Source)
	if len(g.List) > 0 && g.List[0].Driver != "" {
		head += ", driver " + g.List[0].Driver
	}
	if g.Hidden > 0 {
		head += fmt.Sprintf("; %d more hidden by *_VISIBLE_DEVICES", g.Hidden)
	}
	t.item("GPUs", "%s", head)
	for _, one := range g.List {
		t.gpu(one, g.Processes)
	}
}

// gpu adds about four lines on one GPU. A question mark stands for a figure that the source does not report.
func (t *text) gpu(g gpu.GPU, processes []gpu.Process) {
	name := g.Name
	if g.MIG != "" {
		name += ", MIG " + g.MIG
	}
	t.item(fmt.Sprintf("  %d", g.Index), "%s, %s", name, g.UUID)
	t.item("", "%s of %s free, %s %% busy, %s °C", optional(g.FreeMiB, render.Mebibytes), optional(g.TotalMiB, render.Mebibytes),
		optional(g.Utilization, whole), optional(g.TemperatureC, whole))
	clocks := ""
	if len(g.Throttle) > 0 {
		clocks = " (" + strings.Join(g.Throttle, ", ") + ")"
	}
	t.item("", "%s of %s W, SM %s MHz, memory %s MHz%s", optional(g.PowerW, whole), optional(g.PowerLimitW, whole),
		optional(g.SMClockMHz, whole), optional(g.MemoryClockMHz, whole), clocks)
	for _, p := range processes {
		if p.GPU != g.UUID {
			continue
		}
		user := "a process of another container"
		if p.PID > 0 {
			user = fmt.Sprintf("process %d", p.PID)
		}
		t.item("", "in use by %s: %s", user, optional(p.UsedMiB, render.Mebibytes))
	}
}

// machine adds the lines on everything except the GPUs.
func (t *text) machine(m host.Machine) {
	limit := "no cgroup limit"
	if m.Cores.Limit != nil {
		limit = fmt.Sprintf("limit %.3g by %s", *m.Cores.Limit, m.Cores.LimitAt)
	}
	t.item("cores", "%.3g usable; %s allowed, %s", m.Cores.Usable, render.Count(m.Cores.Affinity, "CPU"), limit)
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

// limit adds a line with a limit. An unknown limit gets no line here, because it is one of the findings.
func (t *text) limit(name string, l *host.Limit, show func(int64) string) {
	if l == nil {
		return
	}
	value := func(n *int64) string {
		if n == nil {
			return "unlimited"
		}
		return show(*n)
	}
	t.item(name, "%s, hard limit %s", value(l.Soft), value(l.Hard))
}

func optional(v *float64, show func(float64) string) string {
	if v == nil {
		return "?"
	}
	return show(*v)
}

func whole(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }
