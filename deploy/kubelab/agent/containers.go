package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"vllmtuner/deploy/kubelab/container"
)

// These are the waits of a kubelet whose back-off begins with a second (ReduceDefaultCrashLoopBackOffDecay).
const (
	minBackOff = time.Second
	maxBackOff = time.Minute
	// A container that ran for this long begins again with the shortest wait.
	resetBackOff = 10 * time.Minute
	// retryAfter is the wait before something is tried again that may depend on others, such as a missing ConfigMap.
	retryAfter = time.Second
)

// runContainer runs a container, again and again if the pod says so, and returns how it ended for good. An error that
// is an *ending says that the pod must end.
func (w *worker) runContainer(ctx context.Context, pod *corev1.Pod, c *corev1.Container, volumes volumes) (container.Exit, error) {
	backOff := minBackOff
	for attempt := w.lastAttempt(c.Name); ; attempt++ {
		running, err := w.attachOrStart(ctx, pod, c, volumes, attempt)
		if err != nil {
			return container.Exit{}, err
		}
		w.status.running(c.Name, attempt, running.Started())
		exit, err := w.attend(ctx, pod, c, running)
		err = errors.Join(err, running.Close())
		if err != nil {
			return exit, err
		}
		exit.Message = w.message(pod, c, attempt, exit)
		w.Log.Info("container ended", "pod", w.name(), "container", c.Name, "code", exit.Code, "reason", exit.Reason)
		w.status.terminated(c.Name, attempt, exit)
		if ended := context.Cause(w.alive); ended != nil {
			return exit, ended
		}
		if !restarts(pod, c, exit.Code) {
			return exit, nil
		}
		if exit.Ended.Sub(exit.Started) > resetBackOff {
			backOff = minBackOff
		}
		w.tell(pod, corev1.EventTypeWarning, eventBackOff, "Back-off restarting failed container "+c.Name)
		w.status.waiting(c.Name, "CrashLoopBackOff", fmt.Sprintf("back-off %v restarting failed container=%s", backOff, c.Name))
		if !pause(w.alive, backOff) {
			return exit, context.Cause(w.alive)
		}
		backOff = min(2*backOff, maxBackOff)
	}
}

// restarts reports whether a container begins again after it has ended with this code.
func restarts(pod *corev1.Pod, c *corev1.Container, code int) bool {
	switch pod.Spec.RestartPolicy {
	case corev1.RestartPolicyAlways:
		return code != 0 || !isInit(pod, c)
	case corev1.RestartPolicyOnFailure:
		return code != 0
	}
	return false
}

func isInit(pod *corev1.Pod, c *corev1.Container) bool {
	for i := range pod.Spec.InitContainers {
		if pod.Spec.InitContainers[i].Name == c.Name {
			return true
		}
	}
	return false
}

// attachOrStart finds the container of an earlier life of the agent, or starts it. It tries again while the container
// lacks something that others can still provide, such as a key of a ConfigMap.
func (w *worker) attachOrStart(ctx context.Context, pod *corev1.Pod, c *corev1.Container, volumes volumes, attempt int) (*container.Container, error) {
	dir := w.attemptDir(c.Name, attempt)
	running, err := container.Attach(dir)
	if !errors.Is(err, fs.ErrNotExist) {
		return running, err
	}
	for {
		if ended := context.Cause(w.alive); ended != nil {
			return nil, ended
		}
		spec, err := w.spec(ctx, pod, c, volumes, attempt)
		if err == nil {
			if running, err = container.Start(ctx, dir, spec); err != nil {
				return nil, fmt.Errorf("start container %s: %w", c.Name, err)
			}
			w.tell(pod, corev1.EventTypeNormal, eventStarted, "Started container "+c.Name)
			return running, nil
		}
		w.status.waiting(c.Name, "CreateContainerConfigError", err.Error())
		w.tell(pod, corev1.EventTypeWarning, eventFailed, "Error: "+err.Error())
		pause(w.alive, retryAfter)
	}
}

// attend watches a running container until it has ended. It ends the container if the pod must end, or if a probe says
// so.
func (w *worker) attend(ctx context.Context, pod *corev1.Pod, c *corev1.Container, running *container.Container) (container.Exit, error) {
	watch, stop := context.WithCancelCause(w.alive)
	var probes sync.WaitGroup
	defer probes.Wait()
	defer stop(nil)
	probes.Go(func() { w.probe(watch, pod, c, running.Started(), stop) })
	exit, err := running.Wait(watch)
	if err == nil || ctx.Err() != nil || watch.Err() == nil {
		return exit, err // it has ended by itself, or the agent stops, or Wait itself failed
	}
	patience, cancel := w.patience, context.CancelFunc(func() {})
	left := w.graceLeft()
	if unhealthy, ok := errors.AsType[*unhealthyError](err); ok {
		patience, cancel = context.WithTimeout(w.patience, unhealthy.grace)
		left = unhealthy.grace
	}
	defer cancel()
	w.tell(pod, corev1.EventTypeNormal, eventKilling, fmt.Sprintf("Stopping container %s within %v: %v", c.Name, left, err))
	return terminateWith(ctx, patience, running)
}

// graceLeft returns how long the pod's containers may still run.
func (w *worker) graceLeft() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(time.Until(w.killAt), 0).Round(time.Second)
}

// terminate ends a container: SIGTERM, and SIGKILL after the grace period.
func terminate(ctx context.Context, c *container.Container, grace time.Duration) (container.Exit, error) {
	patience, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	return terminateWith(ctx, patience, c)
}

func terminateWith(ctx, patience context.Context, c *container.Container) (container.Exit, error) {
	if err := c.Signal(syscall.SIGTERM); err != nil {
		return container.Exit{}, err
	}
	exit, err := c.Wait(patience)
	if err == nil || ctx.Err() != nil || patience.Err() == nil {
		return exit, err
	}
	if err := c.Signal(syscall.SIGKILL); err != nil {
		return container.Exit{}, err
	}
	return c.Wait(ctx)
}

// attemptDir is where the files of one start of a container are.
func (w *worker) attemptDir(name string, attempt int) string {
	return filepath.Join(w.dir, "containers", name, strconv.Itoa(attempt))
}

// lastAttempt returns the number of the newest start of a container. An earlier life of the agent may have made it.
func (w *worker) lastAttempt(name string) int {
	attempt := 0
	for {
		if _, err := os.Stat(w.attemptDir(name, attempt+1)); err != nil {
			return attempt
		}
		attempt++
	}
}

// pause waits, and reports false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
