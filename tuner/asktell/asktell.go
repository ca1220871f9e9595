// Package asktell lets a program of the user choose the points of a study. It tells the program how trials ended and
// asks the program for points. Both write lines of JSON. The package never measures anything, and never trusts what the
// program writes.
package asktell

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// A Config says which program to start, and what it searches.
type Config struct {
	Command     []string      // the program and its args; started without a shell
	Dir         string        // working directory
	Timeout     time.Duration // how long the program may take for one answer
	Say         func(line string)
	Study       string
	Space       *space.Space
	Constraints []string // as in the study file
	Seed        uint64
	Trials      int // the budget of the search
	Objective   studies.Objective
}

// A Program is a running optimiser. It is a sampler. Only one goroutine may call Next.
type Program struct {
	config     Config
	process    *proc.Process
	in         *os.File // write end of the program's stdin
	answers    *answers
	complaints *complaints
	heard      chan struct{} // closed when stderr was read to its end
	stderr     *os.File      // read end of the program's stderr
	told       map[string]bool

	once        sync.Once
	interrupted chan struct{} // closed by Interrupt
}

// ErrInterrupted is returned by Next after Interrupt.
var ErrInterrupted = errors.New("the optimiser was interrupted")

const (
	// maxRefused is the limit of refused points for one trial. A program that proposes random points usually stays
	// below it, even if only one point in twenty keeps a narrow constraint.
	maxRefused = 100
	// lastWords is how long to wait for the end of a program that reads nothing any more, and for the end of its
	// stderr.
	lastWords = 2 * time.Second
)

// quitGrace is how long the program may take to end once its stdin is closed, and again after SIGTERM. Tests shorten
// it.
var quitGrace = 2 * time.Second

// Start starts the program and tells it the space. It returns when the program has answered that it is ready. So a
// program that cannot run is found before GPU time is spent. The end of ctx ends the wait. The caller must call Stop.
func Start(ctx context.Context, c Config) (*Program, error) {
	p, err := start(c)
	if err != nil {
		return nil, fmt.Errorf("start the optimiser: %w", err)
	}
	defer context.AfterFunc(ctx, p.Interrupt)()
	if err := p.begin(); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	return p, nil
}

func start(c Config) (*Program, error) {
	inRead, inWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer inRead.Close()
	errRead, errWrite, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, inWrite.Close())
	}
	defer errWrite.Close()
	p := &Program{
		config: c, in: inWrite, stderr: errRead, answers: newAnswers(), complaints: newComplaints(c.Say),
		heard: make(chan struct{}), told: map[string]bool{}, interrupted: make(chan struct{}),
	}
	p.process, err = proc.Start(proc.Spec{Argv: c.Command, Env: environment(), Dir: c.Dir, Output: p.answers, Stdin: inRead, Stderr: errWrite})
	if err != nil {
		return nil, errors.Join(err, inWrite.Close(), errRead.Close())
	}
	go p.hear()
	return p, nil
}

// environment returns the tuner's environment with PYTHONUNBUFFERED. With this variable, a Python program writes each
// line at once, even if it does not flush.
func environment() []string {
	const unbuffered = "PYTHONUNBUFFERED"
	env := os.Environ()
	if os.Getenv(unbuffered) == "" {
		env = append(env, unbuffered+"=1")
	}
	return env
}

// hear reads stderr until its end, or until Stop sets a deadline.
func (p *Program) hear() {
	defer close(p.heard)
	buf := make([]byte, 4<<10)
	for {
		n, err := p.stderr.Read(buf)
		p.complaints.Write(buf[:n])
		if err != nil {
			p.complaints.end()
			return
		}
	}
}

// Say changes the function that shows the lines of the program's stderr.
func (p *Program) Say(say func(line string)) {
	p.complaints.mu.Lock()
	defer p.complaints.mu.Unlock()
	p.complaints.say = say
}

// Interrupt makes Next return ErrInterrupted, now and later. It closes the program's stdin, which tells the program to
// end.
func (p *Program) Interrupt() {
	p.once.Do(func() {
		close(p.interrupted)
		p.in.Close()
	})
}

// Stop ends the program, and returns when it is gone. It may be called again.
func (p *Program) Stop() error {
	p.Interrupt()
	select {
	case <-p.process.Exited():
	case <-time.After(quitGrace):
	}
	err := p.process.Stop(context.Background(), quitGrace)
	_ = p.stderr.SetReadDeadline(time.Now().Add(lastWords)) // a process outside the tree may hold the pipe
	<-p.heard
	p.stderr.Close()
	if err != nil {
		return fmt.Errorf("end the optimiser: %w", err)
	}
	return nil
}

// begin tells the program the space, and reads the program's answer.
func (p *Program) begin() error {
	if err := p.send(message{Space: newSpaceMessage(p.config)}); err != nil {
		return err
	}
	a, line, err := p.read()
	if err == nil && !a.Ready {
		err = p.wrong(line, `its first answer must be {"ready": true}`)
	}
	return err
}

// Next tells the program which trials have ended, and asks it for a point. It asks again if the point is not legal or
// was tried. After maxRefused refused points, Next returns an error. If all of these points were tried before, the
// error is sampler.ErrExhausted, and the search is over.
func (p *Program) Next(number int, history []studies.Trial) (space.Point, error) {
	if err := p.tell(history); err != nil {
		return nil, err
	}
	tried := sampler.Tried(history)
	allTried, reason := true, error(nil)
	for refused := range maxRefused {
		raw, err := p.ask(number, refused)
		if err != nil {
			return nil, err
		}
		point, err := readPoint(p.config.Space, raw)
		switch {
		case err != nil:
			allTried, reason = false, err
		case tried[point.String()]:
			reason = fmt.Errorf("%s was tried before", name(point))
		default:
			return point, nil
		}
		if err := p.send(message{Refused: &refusal{Number: number, Point: raw, Reason: reason.Error()}}); err != nil {
			return nil, err
		}
	}
	if allTried {
		return nil, fmt.Errorf("%w: the optimiser proposed %d points that were tried before", sampler.ErrExhausted, maxRefused)
	}
	return nil, p.fault(fmt.Sprintf("proposed %d points that cannot be tried, the last one because %s", maxRefused,
		shown(strings.ReplaceAll(reason.Error(), "\n", "; "))), "let it read the lines with the key refused")
}

// name returns a point as a text; the empty point is the server's default.
func name(point space.Point) string {
	if len(point) == 0 {
		return "the server's default"
	}
	return point.String()
}

// tell sends each finished trial that was not sent yet. An imported trial has no number of its own, so its source and
// its point identify it.
func (p *Program) tell(history []studies.Trial) error {
	for _, t := range history {
		key := fmt.Sprint(t.Number)
		if t.Number < 0 {
			key = t.Source + "\x00" + t.Point.String()
		}
		if p.told[key] || t.State != studies.Done {
			continue
		}
		if err := p.send(message{Tell: newTellMessage(p.config.Space, t)}); err != nil {
			return err
		}
		p.told[key] = true
	}
	return nil
}

// ask asks for a point and returns it as the program wrote it.
func (p *Program) ask(number, refused int) ([]byte, error) {
	select {
	case line := <-p.answers.ready:
		return nil, p.wrong(line.text, "nothing was asked")
	default:
	}
	if err := p.send(message{Ask: &askMessage{Number: number, Refused: refused}}); err != nil {
		return nil, err
	}
	a, line, err := p.read()
	switch {
	case err != nil:
		return nil, err
	case a.Exhausted:
		return nil, fmt.Errorf("%w: the optimiser has none", sampler.ErrExhausted)
	case a.Point == nil:
		return nil, p.wrong(line, `the answer must be {"point": {…}} or {"exhausted": true}`)
	}
	return a.Point, nil
}

// send writes one line.
func (p *Program) send(m message) error {
	line, err := encode(m)
	if err != nil {
		return fmt.Errorf("tell the optimiser: %w", err)
	}
	_ = p.in.SetWriteDeadline(time.Now().Add(p.config.Timeout)) // it fails if the file is closed, and then Write fails too
	_, err = p.in.Write(line)
	switch {
	case err == nil:
		return nil
	case p.isInterrupted():
		return ErrInterrupted
	case errors.Is(err, os.ErrDeadlineExceeded):
		return p.fault("has read nothing for "+render.Took(p.config.Timeout), "let it read each line of its standard input")
	}
	return p.died()
}

func (p *Program) isInterrupted() bool {
	select {
	case <-p.interrupted:
		return true
	default:
		return false
	}
}

// read waits for one line and decodes it.
func (p *Program) read() (a answer, line string, err error) {
	late := time.NewTimer(p.config.Timeout)
	defer late.Stop()
	select {
	case line := <-p.answers.ready:
		return p.decode(line)
	case <-p.interrupted:
		return a, "", ErrInterrupted
	case <-late.C:
		return a, "", p.fault("gave no answer within "+render.Took(p.config.Timeout), "raise sampler.timeout, and let it flush each line that it writes")
	case <-p.process.Exited():
	}
	select {
	case line := <-p.answers.ready: // the program answered and ended
		return p.decode(line)
	default:
		return a, "", p.died()
	}
}

func (p *Program) decode(line answerLine) (a answer, text string, err error) {
	if line.cut {
		return a, "", p.fault(fmt.Sprintf("wrote a line of more than %s", render.Bytes(maxLine)), "let it write one JSON object per line, and messages to its standard error")
	}
	if err := a.decode(line.text); err != nil {
		return a, "", p.wrong(line.text, err.Error())
	}
	return a, line.text, nil
}

// wrong returns the error for a line that the protocol does not allow.
func (p *Program) wrong(line, why string) error {
	return p.fault(fmt.Sprintf("wrote %q: %s", shown(line), why), "let it write only answers to its standard output, and messages to its standard error")
}

// died returns the error for a program that has ended, or has closed its stdin.
func (p *Program) died() error {
	select {
	case <-p.process.Exited():
	case <-time.After(lastWords):
		return p.fault("has closed its standard input", "let it read until the end of its input")
	}
	select {
	case <-p.heard:
	case <-time.After(lastWords):
	}
	p.complaints.mu.Lock()
	last := p.complaints.last
	p.complaints.mu.Unlock()
	if last != "" {
		last = fmt.Sprintf("; its last words: %q", last)
	}
	return p.fault(fmt.Sprintf("ended with %s before the study was over%s", p.process.State(), last), "correct it")
}

// fault returns an error of the program, with advice.
func (p *Program) fault(what, remedy string) error {
	return &trial.RemedyError{
		Err:    fmt.Errorf("the optimiser %s %s", strings.Join(p.config.Command, " "), what),
		Remedy: remedy + ", and run the study again: it keeps its trials",
	}
}
