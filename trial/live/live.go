// Package live provides the Server and the Load of a trial on this machine: a real server with its log, and requests
// over HTTP. It never judges what it measured. Package simload provides the same in virtual time.
package live

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/proc"
	"vllmtuner/studies/logs"
	"vllmtuner/trial"
	"vllmtuner/trial/vllmserve"
)

// A Rig starts the servers of one study.
type Rig struct {
	Dir     string           // directory of the study, for logs and the process record
	Server  serverctl.Config // settings of the server; Start sets Args, Log, Progress and OnRecord, and adds the point's variables to Env
	Source  workload.Source
	Request Request
	Bench   []string // the command vllm bench serve, if that command sends the load; empty means the tuner's own client

	checked bool // whether a server has already counted the tokens of all texts
}

// Request has the settings of the client's requests.
type Request struct {
	Endpoint   string
	ITL        bool    // whether to record the times between tokens
	Natural    bool    // whether the model decides where an answer ends
	Burstiness float64 // burstiness of the arrivals in vllm bench serve; 0 means Poisson arrivals
}

// maxIdle is how long a request may wait for its next byte. Priming may overload a small server on purpose, so a wait
// of minutes is no failure. A probe whose requests wait that long has already failed and ended.
const maxIdle = 10 * time.Minute

// Start starts a server with its log and its process record, and returns it with its load. If a text of the workload is
// too long for the model, the error wraps a *bench.PreflightError.
func (r *Rig) Start(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
	log := logs.Create(r.Dir, launch.Number)
	config := r.Server
	config.Args, config.Log, config.Progress = launch.Args, log, launch.Progress
	config.Env = maps.Collect(maps.All(config.Env)) // the next server must not get the variables of this one
	maps.Copy(config.Env, launch.Env)
	config.OnRecord = func(record proc.Record) error { return writeRecord(r.Dir, record) }
	server, err := serverctl.Start(ctx, config)
	if err != nil {
		_, left := Reclaim(r.Dir) // ends a process that the failed start left, which is rare
		if lost := log.Close(); lost != nil {
			launch.Progress(lost.Error())
		}
		return nil, nil, errors.Join(err, left)
	}
	client := &bench.Client{
		URL: server.URL(), Model: server.ModelID(), Endpoint: r.Request.Endpoint, ITL: r.Request.ITL,
		IdleTimeout: maxIdle, APIKey: bench.Secret(config.APIKey), Natural: r.Request.Natural,
	}
	logged := &loggedServer{Server: server, log: log, dir: r.Dir}
	if err := r.checkLengths(ctx, client, server); err != nil {
		_, stopErr := logged.Stop(context.WithoutCancel(ctx))
		return nil, nil, errors.Join(err, stopErr)
	}
	if len(r.Bench) == 0 {
		return logged, client, nil
	}
	load := &vllmserve.Load{Command: r.Bench, Client: client, Tokenizer: config.Model, Dir: r.Dir, Log: log, Burstiness: r.Request.Burstiness}
	for name, value := range r.Server.Env { // without the point's variables, so that all trials have the same load generator
		load.Env = append(load.Env, name+"="+value)
	}
	return logged, load, nil
}

// checkLengths finds texts that are too long for the model. Only a server can count their tokens, so the first server
// checks the texts for all trials. Any other failure counts as a failure of the server.
func (r *Rig) checkLengths(ctx context.Context, client *bench.Client, server *serverctl.Server) error {
	maxModelLen := server.Facts().MaxModelLen
	if r.checked || maxModelLen == 0 || r.Source.Len() == 0 {
		return nil
	}
	_, err := client.CheckLengths(ctx, func(yield func(*workload.Request) bool) {
		for i := range r.Source.Len() {
			if !yield(r.Source.Request(workload.WindowStream, i)) {
				return
			}
		}
	}, maxModelLen)
	if err == nil {
		r.checked = true
		return nil
	}
	if _, tooLong := errors.AsType[*bench.PreflightError](err); tooLong || ctx.Err() != nil {
		return err
	}
	return trial.AwaitDeath(ctx, server, &serverctl.ExitError{Class: serverctl.Infrastructure, Evidence: err.Error(), Code: -1})
}

// A loggedServer closes its log and removes its process record when the server is gone.
type loggedServer struct {
	*serverctl.Server
	log  *logs.Writer
	dir  string
	once sync.Once

	logErr error // set if the log is incomplete
	err    error // why the process record could not be removed
}

// Stop stops the server, closes its log and removes its record. An incomplete log is reported, but it does not end the
// study.
func (s *loggedServer) Stop(ctx context.Context) (serverctl.Ended, error) {
	ended, err := s.Server.Stop(ctx)
	s.once.Do(func() {
		s.logErr = s.log.Close()
		if err == nil { // otherwise the next run needs the record to end the remaining processes
			s.err = removeRecord(s.dir)
		}
	})
	if s.logErr != nil {
		ended.LogError = s.logErr.Error()
	}
	return ended, errors.Join(err, s.err)
}
