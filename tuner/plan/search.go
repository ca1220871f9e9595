package plan

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/serverctl/sim"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// A Search has the points that a study may try, and the sampler that chooses among them.
type Search struct {
	Space   *space.Space
	Sampler sampler.Sampler // nil if a program of the user chooses the points
	Current space.Point     // nil if the file has none

	file *studyfile.File
}

// open opens the space and the sampler.
func (s *Search) open() (err error) {
	file := s.file
	if s.Space, err = file.Space(); err != nil {
		return err
	}
	if name := file.Prior.Profile; name != "" {
		if _, err := sim.LoadProfile(name); err != nil {
			return fmt.Errorf("%s: prior: %w", file.Path, err)
		}
	}
	if s.Current, err = file.CurrentPoint(); err != nil {
		return err
	}
	if file.Sampler.Name == studyfile.Ask {
		return nil
	}
	if s.Sampler, err = sampler.New(file.Sampler.Name, s.Space, file.Sampler.Seed, file.Budget.Trials); err != nil {
		return fmt.Errorf("%s: sampler: %w", file.Path, err)
	}
	return nil
}

// checkCommand returns an error if the program that chooses the points is missing.
func (s *Search) checkCommand() error {
	if s.file.Sampler.Name != studyfile.Ask {
		return nil
	}
	program := s.file.Sampler.Command[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) { // the program starts in the directory of the study file
		dir, err := filepath.Abs(filepath.Dir(s.file.Path))
		if err != nil {
			return err
		}
		program = filepath.Join(dir, program)
	}
	if _, err := exec.LookPath(program); err != nil {
		if missing, ok := errors.AsType[*fs.PathError](err); ok { // exec.Error would name the path twice
			err = missing
		}
		return fmt.Errorf("%s: sampler.command: %w; correct it, or give the program's full path", s.file.Path, err)
	}
	return nil
}

// Names returns the names of the searched flags.
func (s *Search) Names() []string {
	return lo.Map(s.file.Parameters, func(parameter space.Parameter, _ int) string { return parameter.Name })
}

// Variables returns the names of the searched environment variables.
func (s *Search) Variables() []string {
	if s.Space == nil { // a sweep searches nothing
		return nil
	}
	return s.Space.Variables()
}

// checkLegal returns an error if no point keeps the constraints.
func (s *Search) checkLegal() error {
	random, err := sampler.New("random", s.Space, 1, 1)
	if err != nil {
		return err
	}
	if _, err := random.Next(0, nil); err != nil {
		return fmt.Errorf("%s: parameters and constraints leave no point to try: %w", s.file.Path, err)
	}
	return nil
}

// checkLongest refuses a max-model-len, fixed or searched, that is too short for the workload's longest request.
// longestRequest is the length of this request in tokens.
func (s *Search) checkLongest(longestRequest int) error {
	const flag = "max-model-len"
	shortest := studyfile.MaxModelLen(s.file.Server.Args)
	remedy := "raise it in server.args"
	if searched := s.Space.Parameter(flag); searched != nil {
		remedy = "search only longer ones"
		for _, text := range searched.Levels(2) { // the two ends of a range, or all choices
			if n, err := strconv.Atoi(text); err == nil && (shortest == 0 || n < shortest) {
				shortest = n
			}
		}
	}
	if shortest > 0 && longestRequest > shortest {
		return fmt.Errorf("%s: %s %d is less than the workload's longest request of %d tokens; %s", s.file.Path, flag, shortest, longestRequest, remedy)
	}
	return nil
}

// sampleArgs returns the args of all sample points.
func (s *Search) sampleArgs() []string {
	var args []string
	for _, point := range s.samplePoints() {
		args = append(args, s.Space.Args(point)...)
	}
	return args
}

// samplePoints returns points that together use every flag of the space, with both ends of each range and every choice.
// CheckFlags joins the args of all points, and vLLM uses the last value of a flag. So in the last point every parameter
// has its highest value, because these values fit together.
func (s *Search) samplePoints() []space.Point {
	n := len(s.file.Parameters)
	low, high := make([]float64, n), make([]float64, n)
	for i := range high {
		high[i] = 0.999
	}
	points := []space.Point{s.Space.Sample(low)}
	for _, parameter := range s.file.Parameters {
		for _, level := range s.Space.Parameter(parameter.Name).Levels(2) {
			point := maps.Clone(points[0])
			point[parameter.Name] = level
			points = append(points, point)
		}
	}
	return append(points, s.Space.Sample(high))
}
