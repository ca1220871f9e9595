// Package metrics serves the health and the Prometheus metrics of a running study. It never changes the study.
package metrics

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/tuner"
)

// A Server serves /healthz and /metrics while a study runs. /healthz reports whether the tuner is alive, not whether an
// inference server is alive. So it answers even while a model loads for 20 minutes.
type Server struct {
	Address net.Addr

	http *http.Server
	gone chan error // receives the error of the HTTP server when it ends

	trials, trial, probes, rate, best, bestTrial prometheus.Gauge
	finished                                     *prometheus.CounterVec
	gpuSeconds                                   prometheus.Counter

	objective studies.Objective
}

// Listen listens at an address, such as 127.0.0.1:9090. An address without a host, such as :9090, means the loopback
// address.
func Listen(address string) (net.Listener, error) {
	host, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: write HOST:PORT, such as 127.0.0.1:9090, with a port from 0 (any that is free) to 65535", address)
	}
	socket, err := net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, fmt.Errorf("%s: another program listens there; choose another port, or 0 for any that is free", address)
	case errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("%s: this user may not listen there; choose a port from 1024", address)
	case err != nil:
		return nil, fmt.Errorf("%s: %s; give an address of this machine, such as 127.0.0.1:9090", address, foreign.Cause(err))
	}
	return socket, nil
}

// Serve starts a server for the metrics of a study on a socket, and returns at once. budget is the number of trials in
// the study's budget. The best capacity is given as the objective counts it.
func Serve(socket net.Listener, study string, budget int, objective studies.Objective) *Server {
	registry := prometheus.NewRegistry()
	labels := prometheus.Labels{"study": study}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "tuner", Name: name, Help: help, ConstLabels: labels})
		registry.MustRegister(g)
		return g
	}
	s := &Server{
		Address:    socket.Addr(),
		gone:       make(chan error, 1),
		objective:  objective,
		trials:     gauge("trials_budget", "Trials that the study may run."),
		trial:      gauge("trial", "Number of the running trial."),
		probes:     gauge("trial_probes", "Probes that the running trial has finished."),
		rate:       gauge("probe_rate", "Request rate of the last probe, requests per second."),
		best:       gauge("incumbent_capacity", "Best capacity so far, requests per second; per GPU if this is the study's objective."),
		bestTrial:  gauge("incumbent_trial", "Number of the best trial so far."),
		finished:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "tuner", Name: "trials_total", Help: "Finished trials by outcome.", ConstLabels: labels}, []string{"outcome"}),
		gpuSeconds: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "tuner", Name: "gpu_seconds_total", Help: "GPU time of the finished trials.", ConstLabels: labels}),
	}
	registry.MustRegister(s.finished, s.gpuSeconds)
	s.trials.Set(float64(budget))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	s.http = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { s.gone <- s.http.Serve(socket) }()
	return s
}

// URL returns where the server answers, for people.
func (s *Server) URL() string {
	at, ok := s.Address.(*net.TCPAddr)
	if !ok || !at.IP.IsUnspecified() {
		return "http://" + s.Address.String()
	}
	return fmt.Sprintf("http://127.0.0.1:%d, and at every other address of this machine", at.Port)
}

// Watch updates the metrics after an event of the study.
func (s *Server) Watch(e tuner.Event) {
	switch e.Kind {
	case tuner.Began:
		s.trial.Set(float64(e.Trial.Number))
		s.probes.Set(float64(len(e.Trial.Probes)))
	case tuner.Probed:
		s.probes.Inc()
		s.rate.Set(e.Probe.Rate)
	case tuner.Ended:
		s.count(e.Trial)
		if e.Best {
			s.setBest(e.Trial)
		}
	}
}

// Resume adds the finished trials of a continued study to the metrics.
func (s *Server) Resume(study studies.Study) {
	for _, t := range study.Trials {
		if t.State == studies.Done {
			s.count(t)
		}
	}
	if best, found := tuner.Incumbent(study); found {
		s.setBest(best)
	}
}

func (s *Server) count(t studies.Trial) {
	s.finished.WithLabelValues(string(t.Result.Outcome)).Inc()
	s.gpuSeconds.Add(t.Result.GPUTime.Seconds())
}

func (s *Server) setBest(t studies.Trial) {
	s.best.Set(s.objective.Of(t).Rate)
	s.bestTrial.Set(float64(t.Number))
}

// Stop ends the server and waits until it has ended. Clients that are still connected after two seconds are cut off.
func (s *Server) Stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) { // a client is still connected
		err = s.http.Close()
	}
	if served := <-s.gone; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
