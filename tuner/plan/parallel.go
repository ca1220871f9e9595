package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// maxSizes is the largest number of values that are checked for one parallel size. If a range has more values, only so
// many of them are checked, and both ends are among them.
const maxSizes = 16

// A layout is a choice of the searched flags that set the number of a server's GPUs.
type layout struct {
	point space.Point
	args  []string // server.args and the args of the point
}

func (l layout) gpus() int { return serverctl.GPUCount(l.args) }

// layouts returns the layouts that the study may try. The first layout is server.args alone.
func layouts(file *studyfile.File) ([]layout, error) {
	s, err := file.Space()
	if err != nil {
		return nil, err
	}
	points := []space.Point{{}}
	for _, parameter := range file.Parameters {
		if !serverctl.SetsGPUs(parameter.Name) {
			continue
		}
		var more []space.Point
		for _, p := range points {
			for _, level := range s.Parameter(parameter.Name).Levels(maxSizes) {
				q := maps.Clone(p)
				q[parameter.Name] = level
				more = append(more, q)
			}
		}
		points = append(points, more...)
	}
	points = slices.DeleteFunc(points, func(p space.Point) bool { return !s.Possible(p) })
	all := []layout{{args: file.Server.Args}}
	for _, p := range points {
		all = append(all, layout{p, slices.Concat(file.Server.Args, s.Args(p))})
	}
	return all, nil
}

// largest returns the layout with the most GPUs. If several have the same number, it returns the first.
func largest(all []layout) layout {
	return slices.MaxFunc(all, func(a, b layout) int { return a.gpus() - b.gpus() })
}

// checkLayouts returns an error if a server of the study, or of a sweep, needs more GPUs than it can use on this
// machine.
func (m *Machine) checkLayouts(all []layout, usable int) error {
	file := m.server.file
	tooMany := func(args []string) (int, bool) {
		n := serverctl.GPUCount(args)
		return n, n > usable && !serverctl.SpansMachines(args)
	}
	here := "the server can use only " + render.Count(usable, "GPU") + " here"
	if n, no := tooMany(file.Server.Args); no {
		return fmt.Errorf("%s asks for %s, and %s; lower the parallel sizes", file.Place("server.args"), render.Count(n, "GPU"), here)
	}
	if n, no := tooMany(slices.Concat(file.Server.Args, file.Server.Current)); no {
		return fmt.Errorf("%s asks for %s, and %s; lower the parallel sizes", file.Place("server.current"), render.Count(n, "GPU"), here)
	}
	if file.Sweep != nil {
		for _, config := range file.Sweep.Configs {
			if n, no := tooMany(file.ConfigArgs(config)); no {
				return fmt.Errorf("%s asks for %s, and %s; lower its parallel sizes", file.Place("sweep.configs."+config.Name), render.Count(n, "GPU"), here)
			}
		}
	}
	most := largest(all)
	if n, no := tooMany(most.args); no {
		return fmt.Errorf("%s: %s asks for %s, and %s; %s", file.Place("parameters."+sizeNames(most.point)[0]), most.point, render.Count(n, "GPU"), here,
			sizeRemedy(most, usable))
	}
	return nil
}

// sizeNames returns the names of the flags of a layout, sorted.
func sizeNames(p space.Point) []string { return slices.Sorted(maps.Keys(p)) }

// sizeRemedy says how a study file leaves out points with too many GPUs.
func sizeRemedy(most layout, usable int) string {
	p, names := most.point, sizeNames(most.point)
	if len(names) == 1 {
		return "search only smaller values"
	}
	// The sizes of the point replace those in server.args. So only the sizes that the point does not set are left for
	// the factor fixed.
	product := 1
	for _, name := range names {
		product *= serverctl.GPUCount([]string{"--" + name, p[name]})
	}
	fixed := max(1, serverctl.GPUCount(most.args)/product)
	return fmt.Sprintf("search only smaller values, or add to constraints: %q", fmt.Sprintf("%s <= %d", strings.Join(names, " * "), usable/fixed))
}

// gpusText says how many GPUs the servers of the study use, and how the objective counts them. It returns "" if all
// servers use the same number and the objective is the default.
func gpusText(file *studyfile.File) string {
	all, err := layouts(file)
	if err != nil {
		return ""
	}
	least, most := slices.MinFunc(all, func(a, b layout) int { return a.gpus() - b.gpus() }).gpus(), largest(all).gpus()
	perGPU := file.Objective == studies.CapacityPerGPU
	switch {
	case least == most && !perGPU:
		return ""
	case least == most:
		return fmt.Sprintf("every server uses %s, so objective: %s changes only the unit of the figures", render.Count(least, "GPU"), file.Objective)
	case perGPU:
		return fmt.Sprintf("servers use %d to %d GPUs; the best has the highest capacity per GPU", least, most)
	}
	return fmt.Sprintf("servers use %d to %d GPUs; the best has the highest capacity, whatever its number of GPUs (objective: %s)", least, most, file.Objective)
}
