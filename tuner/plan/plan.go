// Package plan opens everything that a study file names, such as the data set, and checks it before GPU time is spent.
// It never starts a server, except to read the output of --help.
package plan

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"vllmtuner/studies/rights"
	"vllmtuner/tuner/studyfile"
)

// An InputError is a mistake in the user's input. The same command fails again until the user corrects the mistake.
type InputError struct{ error }

// Unwrap returns the wrapped error for errors.Is and errors.As.
func (e InputError) Unwrap() error { return e.error }

func inputf(format string, args ...any) error { return InputError{fmt.Errorf(format, args...)} }

// A Plan is a study file with everything that the file names.
type Plan struct {
	File    *studyfile.File
	Load    *Load
	Search  *Search // for a sweep, the search has no space and no sampler
	Server  *Server
	Machine *Machine
}

// Open opens a study with everything that a run needs.
func Open(file *studyfile.File) (*Plan, error) {
	if file.Sweep != nil && len(file.Parameters) == 0 {
		return nil, inputf("%s: there are no parameters to search; add some, or measure its configs with `tuner sweep %s`", file.Path, file.Path)
	}
	p := newPlan(file)
	return p.open(p.openServer, p.openSearch, p.Search.checkCommand)
}

// OpenSearch opens the workload and the search. It does not check the server, which may be on another machine.
func OpenSearch(file *studyfile.File) (*Plan, error) {
	if len(file.Parameters) == 0 {
		return nil, inputf("%s: there are no parameters to search; add some", file.Path)
	}
	p := newPlan(file)
	return p.open(p.Load.open, p.openSearch)
}

// OpenWorkload opens only the workload.
func OpenWorkload(file *studyfile.File) (*Plan, error) {
	p := newPlan(file)
	return p.open(p.Load.open)
}

func newPlan(file *studyfile.File) *Plan {
	server := &Server{Model: file.Model, file: file}
	return &Plan{
		File: file, Load: &Load{Seed: file.Sampler.Seed, file: file}, Search: &Search{file: file},
		Server: server, Machine: &Machine{server: server},
	}
}

// open calls the functions that open the parts of the plan. Every error is an InputError, because only the user can
// correct it.
func (p *Plan) open(parts ...func() error) (*Plan, error) {
	for _, part := range parts {
		if err := part(); err != nil {
			return nil, InputError{err}
		}
	}
	return p, nil
}

// openServer opens the server and the load that measures it.
func (p *Plan) openServer() error {
	if err := p.Load.open(); err != nil {
		return err
	}
	if err := p.Server.open(); err != nil {
		return err
	}
	return errors.Join(p.Server.check(), p.Load.checkDriver(), p.Load.checkBudget())
}

// openSearch opens the search. Its flags must leave room for the longest request of the load.
func (p *Plan) openSearch() error {
	if err := p.Search.open(); err != nil {
		return err
	}
	return errors.Join(p.Search.checkLegal(), p.Search.checkLongest(p.Load.Source.Longest()))
}

// CheckWritable creates a directory. It returns an error if the directory cannot be created or written. It does nothing
// if dir is "".
func CheckWritable(dir string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, rights.Dir(filepath.Dir(dir))); err != nil {
		return err
	}
	file, err := os.CreateTemp(dir, ".tuner-")
	if err != nil {
		return err
	}
	return errors.Join(file.Close(), os.Remove(file.Name()))
}
