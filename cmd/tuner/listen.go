package main

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

// A listener serves /healthz and /metrics while a study runs. /healthz answers through a 20-minute model load too: it says
// that the tuner is alive, not that a server is.
type listener struct {
	address net.Addr
	server  *http.Server
	gone    chan error

	incumbent incumbent

	trials, trial, probes, rate, best, bestTrial prometheus.Gauge
	finished                                     *prometheus.CounterVec
	gpuSeconds                                   prometheus.Counter
}

// openSocket listens at an address, such as 127.0.0.1:9090. A port alone means loopback; no address is no socket.
func openSocket(address string) (net.Listener, error) {
	if address == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return nil, usage("--listen %s: write HOST:PORT, such as 127.0.0.1:9090, with a port from 0 (any that is free) to 65535", address)
	}
	socket, err := net.Listen("tcp", net.JoinHostPort(cmp.Or(host, "127.0.0.1"), port))
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, usage("--listen %s: another program listens there; choose another port, or 0 for any that is free", address)
	case errors.Is(err, unix.EACCES):
		return nil, usage("--listen %s: this user may not listen there; choose a port from 1024", address)
	case err != nil:
		return nil, usage("--listen %s: %s; take an address of this machine, such as 127.0.0.1:9090", address, foreign.Cause(err))
	}
	return socket, nil
}

// listen begins to serve at a socket.
func listen(socket net.Listener, study string, trials int) *listener {
	registry := prometheus.NewRegistry()
	labels := prometheus.Labels{"study": study}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Namespace: "tuner", Name: name, Help: help, ConstLabels: labels})
		registry.MustRegister(g)
		return g
	}
	l := &listener{
		address:    socket.Addr(),
		gone:       make(chan error, 1),
		trials:     gauge("trials_budget", "Trials that the study may run."),
		trial:      gauge("trial", "Number of the running trial."),
		probes:     gauge("trial_probes", "Probes that the running trial has finished."),
		rate:       gauge("probe_rate", "Request rate of the last probe, requests per second."),
		best:       gauge("incumbent_capacity", "Best capacity so far, requests per second."),
		bestTrial:  gauge("incumbent_trial", "Number of the best trial so far."),
		finished:   prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "tuner", Name: "trials_total", Help: "Finished trials by outcome.", ConstLabels: labels}, []string{"outcome"}),
		gpuSeconds: prometheus.NewCounter(prometheus.CounterOpts{Namespace: "tuner", Name: "gpu_seconds_total", Help: "GPU time of the finished trials.", ConstLabels: labels}),
	}
	registry.MustRegister(l.finished, l.gpuSeconds)
	l.trials.Set(float64(trials))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	l.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { l.gone <- l.server.Serve(socket) }()
	return l
}

// watch keeps the metrics.
func (l *listener) watch(e tuner.Event) {
	switch e.Kind {
	case tuner.Began:
		l.trial.Set(float64(e.Trial.Number))
		l.probes.Set(float64(len(e.Trial.Probes)))
	case tuner.Probed:
		l.probes.Inc()
		l.rate.Set(e.Probe.Rate)
	case tuner.Ended:
		l.count(e.Trial)
		l.compare(e.Trial)
	}
}

// resume counts the trials that were there before.
func (l *listener) resume(s studies.Study) {
	for _, t := range s.Trials {
		if t.State == studies.Done {
			l.count(t)
		}
	}
	for _, t := range s.Present().Trials {
		if t.State == studies.Done {
			l.compare(t)
		}
	}
}

func (l *listener) count(t studies.Trial) {
	r := t.Result
	l.finished.WithLabelValues(string(r.Outcome)).Inc()
	l.gpuSeconds.Add(r.GPUTime.Seconds())
}

// compare shows a finished trial as the best if it is.
func (l *listener) compare(t studies.Trial) {
	if l.incumbent.replacedBy(t) {
		l.best.Set(t.Result.Capacity.Rate)
		l.bestTrial.Set(float64(t.Number))
	}
}

// stop ends the service and waits for it.
func (l *listener) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := l.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) { // a client that does not go is no reason to fail
		err = l.server.Close()
	}
	if served := <-l.gone; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
