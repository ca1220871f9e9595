package agent

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"vllmtuner/deploy/kubelab/container"
)

// An unhealthyError ends a container whose liveness or startup probe has failed too often.
type unhealthyError struct {
	message string
	grace   time.Duration
}

func (e *unhealthyError) Error() string { return e.message }

// probe probes a container until ctx ends. It calls kill if the container must end.
func (w *worker) probe(ctx context.Context, pod *corev1.Pod, c *corev1.Container, started time.Time, kill context.CancelCauseFunc) {
	client := w.prober()
	defer client.CloseIdleConnections()
	run := func(p *corev1.Probe, kind string, report func(ok bool) bool) {
		r := probing{w, pod, c, p, kind, client}
		r.run(ctx, started, report)
	}
	unhealthy := func(p *corev1.Probe, kind string) bool {
		left := grace(pod)
		if p.TerminationGracePeriodSeconds != nil {
			left = time.Duration(*p.TerminationGracePeriodSeconds) * time.Second
		}
		kill(&unhealthyError{fmt.Sprintf("Container %s failed %s probe", c.Name, kind), left})
		return false
	}
	// The other probes wait until the container has started.
	if p := c.StartupProbe; p != nil {
		run(p, "startup", func(ok bool) bool {
			if !ok {
				return unhealthy(p, "startup")
			}
			w.status.started(c.Name)
			return false
		})
	}
	var probes sync.WaitGroup
	if p := c.LivenessProbe; p != nil {
		probes.Go(func() { run(p, "liveness", func(ok bool) bool { return ok || unhealthy(p, "liveness") }) })
	}
	if p := c.ReadinessProbe; p != nil {
		probes.Go(func() {
			run(p, "readiness", func(ok bool) bool {
				w.status.ready(c.Name, ok)
				return true
			})
		})
	}
	probes.Wait()
}

// A probing is one probe of one container.
type probing struct {
	*worker
	pod    *corev1.Pod
	c      *corev1.Container
	p      *corev1.Probe
	kind   string
	client *http.Client
}

// run probes until ctx ends or report returns false. It calls report each time the answer has been the same often
// enough to count.
func (r *probing) run(ctx context.Context, started time.Time, report func(ok bool) bool) {
	if !pause(ctx, time.Until(started.Add(time.Duration(r.p.InitialDelaySeconds)*time.Second))) {
		return
	}
	ticker := time.NewTicker(time.Duration(max(r.p.PeriodSeconds, 1)) * time.Second)
	defer ticker.Stop()
	var same int32 // answers in a row that were like the last one
	var last bool
	for {
		err := r.once(ctx)
		if ctx.Err() != nil {
			return // the answer says nothing about the container
		}
		ok := err == nil
		if !ok {
			r.tell(r.pod, corev1.EventTypeWarning, eventUnhealthy, capitalise(r.kind)+" probe failed: "+err.Error())
		}
		if same == 0 || ok != last {
			same, last = 0, ok
		}
		same++
		needed := max(r.p.FailureThreshold, 1)
		if ok {
			needed = max(r.p.SuccessThreshold, 1)
		}
		if same == needed && !report(ok) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func capitalise(word string) string { return strings.ToUpper(word[:1]) + word[1:] }

// once asks the container once.
func (r *probing) once(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(max(r.p.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	if tcp := r.p.TCPSocket; tcp != nil {
		number, err := port(r.c, tcp.Port.String())
		if err != nil {
			return err
		}
		connection, err := r.dial(ctx, "tcp", net.JoinHostPort(cmp.Or(tcp.Host, r.ip), strconv.Itoa(number)))
		if err != nil {
			return err
		}
		return connection.Close()
	}
	get := r.p.HTTPGet
	number, err := port(r.c, get.Port.String())
	if err != nil {
		return err
	}
	path, err := url.Parse(get.Path)
	if err != nil {
		return err
	}
	path.Scheme = strings.ToLower(string(cmp.Or(get.Scheme, corev1.URISchemeHTTP)))
	path.Host = net.JoinHostPort(cmp.Or(get.Host, r.ip), strconv.Itoa(number))
	return r.get(ctx, path.String(), get.HTTPHeaders)
}

func (r *probing) get(ctx context.Context, url string, headers []corev1.HTTPHeader) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	request.Header.Set("User-Agent", "kube-probe/1.36")
	for _, h := range headers {
		request.Header.Add(h.Name, h.Value)
	}
	response, err := r.client.Do(request)
	if err != nil {
		return err
	}
	if err := response.Body.Close(); err != nil {
		return err
	}
	if response.StatusCode < http.StatusOK || response.StatusCode >= http.StatusBadRequest {
		return fmt.Errorf("HTTP probe failed with statuscode: %d", response.StatusCode)
	}
	return nil
}

// prober returns a client that does not follow redirects and that reaches a pod with a network of its own.
func (w *worker) prober() *http.Client {
	return &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true, DialContext: w.dial},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// dial connects to the pod. A socket belongs to the network of the thread that makes it.
func (w *worker) dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{}
	if !w.Isolated || w.newest().Spec.HostNetwork {
		return dialer.DialContext(ctx, network, address)
	}
	_, number, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	var connection net.Conn
	err = inNetwork(w.networkFile(), func() error {
		connection, err = dialer.DialContext(ctx, network, net.JoinHostPort("127.0.0.1", number))
		return err
	})
	return connection, err
}

// inNetwork runs do on a thread that is in the network namespace.
func inNetwork(path string, do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		if err := container.JoinNetwork(path); err != nil {
			done <- err
			return
		}
		done <- do()
	}()
	return <-done
}
