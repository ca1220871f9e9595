package searchbench

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"vllmtuner/tuner/space"
)

// optunaVersion is the version of Optuna for which the driver was written.
const optunaVersion = "5.0.0"

// python returns the Python interpreter that may have Optuna: SEARCH_PYTHON, or the interpreter that `make clients`
// installs, or python3.
func python() string {
	if given := os.Getenv("SEARCH_PYTHON"); given != "" {
		return given
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "python3"
	}
	clients := filepath.Join(cache, "tuner-clients/venv/bin/python")
	if _, err := os.Stat(clients); err != nil {
		return "python3"
	}
	return clients
}

var optunaProblem = map[string]func() string{
	"tpe": sync.OnceValue(func() string { return lacks("import optuna; print(optuna.__version__)") }),
	"gp":  sync.OnceValue(func() string { return lacks("import optuna, torch, scipy; print(optuna.__version__)") }),
}

// noOptuna says why a sampler of Optuna cannot run here; "" if it can.
func noOptuna(sampler string) string { return optunaProblem[sampler]() }

func lacks(imports string) string {
	out, err := exec.Command(python(), "-c", imports).CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	switch last := lines[len(lines)-1]; {
	case err != nil && last != "":
		return fmt.Sprintf("%s: %s; make clients installs optuna, SEARCH_PYTHON names another python", python(), last)
	case err != nil:
		return err.Error()
	case last != optunaVersion:
		return fmt.Sprintf("optuna is %s, the driver needs %s", last, optunaVersion)
	}
	return ""
}

// An optuna is a process of the driver, which runs one study of Optuna.
type optuna struct {
	space   *space.Space
	process *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Scanner
}

// startOptuna starts a study of Optuna. Optuna sees each number as its position on the space's own scale, from 0 to 1.
func startOptuna(sampler string, s *space.Space, seed uint64) (chooser, error) {
	o := &optuna{space: s, process: exec.Command(python(), "testdata/optuna_driver.py")}
	o.process.Stderr = os.Stderr
	out, err := o.process.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if o.in, err = o.process.StdinPipe(); err != nil {
		return nil, err
	}
	o.out = bufio.NewScanner(out)
	if err := o.process.Start(); err != nil {
		return nil, err
	}
	numbers, choices := 0, []int{}
	for _, p := range s.Parameters() {
		if n := len(choicesOf(p)); n > 0 {
			choices = append(choices, n)
		} else {
			numbers++
		}
	}
	var ready struct{}
	return o, o.say(map[string]any{"sampler": sampler, "seed": seed, "numbers": numbers, "choices": choices}, &ready)
}

// choicesOf returns the values of a parameter that has no scale.
func choicesOf(p space.Parameter) []string {
	if p.Kind == space.Bool {
		return []string{"false", "true"}
	}
	return p.Choices
}

// say sends one message and reads its answer.
func (o *optuna) say(message, answer any) error {
	if err := json.NewEncoder(o.in).Encode(message); err != nil {
		return fmt.Errorf("optuna: %w", err)
	}
	if !o.out.Scan() {
		return fmt.Errorf("optuna ended: %w", cmp.Or(o.out.Err(), io.ErrUnexpectedEOF))
	}
	return json.Unmarshal(o.out.Bytes(), answer)
}

func (o *optuna) next(int) (space.Point, error) {
	var asked struct {
		U       []float64
		Choices []int
	}
	if err := o.say(map[string]bool{"ask": true}, &asked); err != nil {
		return nil, err
	}
	u := make([]float64, len(o.space.Parameters()))
	for i, p := range o.space.Parameters() {
		if n := len(choicesOf(p)); n > 0 {
			u[i] = (float64(asked.Choices[0]) + 0.5) / float64(n)
			asked.Choices = asked.Choices[1:]
		} else {
			u[i] = asked.U[0]
			asked.U = asked.U[1:]
		}
	}
	return o.space.Sample(u), nil
}

func (o *optuna) told(capacity float64) error {
	var done struct{}
	return o.say(map[string]float64{"tell": capacity}, &done)
}

func (o *optuna) close() error {
	if err := o.in.Close(); err != nil {
		return err
	}
	return o.process.Wait()
}
