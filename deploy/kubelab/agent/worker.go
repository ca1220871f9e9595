package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"vllmtuner/deploy/kubelab/container"
)

// A worker carries one pod from its arrival to its removal.
type worker struct {
	*Agent
	dir    string
	status *status

	mu      sync.Mutex
	pod     *corev1.Pod // the newest seen
	patient *time.Timer // ends patience
	killAt  time.Time   // when patience ends; zero while the pod may live
	deleted chan struct{}
	isGone  bool // the object is gone, so nothing can be reported

	alive    context.Context // ends, with an *ending as its cause, when the pod must end
	end      context.CancelCauseFunc
	patience context.Context // ends when the containers that still run must be killed
	kill     context.CancelFunc
	ended    chan struct{} // closed when the last state of the pod is in the API
}

// An ending is why a pod must end before its containers end by themselves.
type ending struct {
	grace           time.Duration
	reason, message string // of the pod's status; empty if somebody deleted the pod
	disrupted       bool   // the kubelet marks the pod as disrupted
}

func (e *ending) Error() string { return cmp.Or(e.message, "the pod was deleted") }

func newWorker(ctx context.Context, a *Agent, pod *corev1.Pod) *worker {
	w := &worker{
		Agent: a, dir: filepath.Join(a.podsDir(), string(pod.UID)), pod: pod,
		deleted: make(chan struct{}), ended: make(chan struct{}),
	}
	w.status = newStatus(a, pod)
	w.alive, w.end = context.WithCancelCause(ctx)
	w.patience, w.kill = context.WithCancel(ctx)
	return w
}

// run tells the pod's story. It returns early if ctx ends; then the containers go on without an agent.
func (w *worker) run(ctx context.Context, rejected bool) {
	defer w.kill()
	defer w.end(nil)
	var reporter sync.WaitGroup
	reporting, stop := context.WithCancel(ctx)
	reporter.Go(func() { w.status.report(reporting) })
	defer reporter.Wait()
	defer stop()

	phase := w.newest().Status.Phase
	switch {
	case phase == corev1.PodSucceeded || phase == corev1.PodFailed: // an earlier life of the agent saw the end
	case rejected:
		w.status.finish(corev1.PodFailed, "NodeShutdown", "Pod was rejected as the node is shutting down.")
	default:
		if err := w.live(ctx); err != nil {
			w.Log.Error("run a pod", "pod", w.name(), "error", err)
			w.status.finish(corev1.PodFailed, "AgentError", err.Error())
		}
	}
	if !w.status.flush(ctx) {
		return // the agent stops
	}
	close(w.ended)
	select {
	case <-ctx.Done():
		return
	case <-w.deleted:
	}
	w.remove(ctx)
}

// live runs the pod's containers to the pod's last phase.
func (w *worker) live(ctx context.Context) error {
	pod := w.newest()
	if missing := unsupported(pod); len(missing) > 0 {
		w.status.finish(corev1.PodFailed, "UnexpectedAdmissionError", fmt.Sprintf("kubelab does not support %q", missing))
		return nil
	}
	defer w.limit(pod)()
	volumes, err := w.prepare(ctx, pod)
	if err == nil {
		err = w.runInOrder(ctx, pod, volumes)
	}
	if ctx.Err() != nil {
		return nil
	}
	var forced *ending
	if errors.As(err, &forced) || errors.As(context.Cause(w.alive), &forced) {
		w.finishForced(forced)
		return nil
	}
	if err != nil {
		return err
	}
	w.status.finishByContainers()
	return nil
}

// runInOrder runs the init containers one after the other, and then all main containers.
func (w *worker) runInOrder(ctx context.Context, pod *corev1.Pod, volumes volumes) error {
	for i := range pod.Spec.InitContainers {
		exit, err := w.runContainer(ctx, pod, &pod.Spec.InitContainers[i], volumes)
		if err != nil || exit.Code != 0 {
			return err
		}
	}
	w.status.initialized()
	errs := make([]error, len(pod.Spec.Containers))
	var running sync.WaitGroup
	for i := range pod.Spec.Containers {
		running.Go(func() { _, errs[i] = w.runContainer(ctx, pod, &pod.Spec.Containers[i], volumes) })
	}
	running.Wait()
	return errors.Join(errs...)
}

// finishForced sets the last phase of a pod that the agent had to end.
func (w *worker) finishForced(e *ending) {
	if e.reason == "" {
		w.status.finishByContainers()
		return
	}
	if e.disrupted {
		w.status.disrupted(e.message)
	}
	w.status.finish(corev1.PodFailed, e.reason, e.message)
}

// limit ends the pod when its own deadline is over, until the returned function is called.
func (w *worker) limit(pod *corev1.Pod) (stop func()) {
	seconds := pod.Spec.ActiveDeadlineSeconds
	if seconds == nil {
		return func() {}
	}
	left := time.Until(w.status.startTime().Add(time.Duration(*seconds) * time.Second))
	timer := time.AfterFunc(left, func() {
		w.finishBy(&ending{
			grace: grace(pod), reason: "DeadlineExceeded",
			message: "Pod was active on the node longer than the specified deadline",
		})
	})
	return func() { timer.Stop() }
}

// shutDown ends the pod because the machine shuts down.
func (w *worker) shutDown() {
	w.finishBy(&ending{
		grace: min(grace(w.newest()), w.ShutdownGrace), reason: "Terminated", disrupted: true,
		message: "Pod was terminated in response to imminent node shutdown.",
	})
}

// waitForEnd waits until the pod's last state is in the API.
func (w *worker) waitForEnd(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-w.ended:
		return nil
	}
}

// finishBy ends the pod. The first ending gives the reason; a later one can only shorten the grace period.
func (w *worker) finishBy(e *ending) {
	w.mu.Lock()
	defer w.mu.Unlock()
	killAt := time.Now().Add(e.grace)
	switch {
	case w.killAt.IsZero():
		w.killAt = killAt
		w.patient = time.AfterFunc(e.grace, w.kill)
		w.end(e)
	case killAt.Before(w.killAt):
		w.killAt = killAt
		w.patient.Reset(e.grace)
	}
}

// see takes the newest state of the pod. A deletion ends the pod.
func (w *worker) see(pod *corev1.Pod) {
	w.mu.Lock()
	w.pod = pod
	isDeleted := pod.DeletionTimestamp != nil
	if isDeleted {
		select {
		case <-w.deleted:
		default:
			close(w.deleted)
		}
	}
	w.mu.Unlock()
	if isDeleted {
		w.finishBy(&ending{grace: deletionGrace(pod)})
	}
}

// lose notes that the object is gone. Somebody forced the deletion, so the containers have one second, as with a kubelet.
func (w *worker) lose() {
	w.mu.Lock()
	w.isGone = true
	select {
	case <-w.deleted:
	default:
		close(w.deleted)
	}
	w.mu.Unlock()
	w.status.lose()
	w.finishBy(&ending{grace: time.Second})
}

// deletionGrace is what the deletion leaves to the pod. The kubelet gives at least a second.
func deletionGrace(pod *corev1.Pod) time.Duration {
	if pod.DeletionGracePeriodSeconds == nil {
		return grace(pod)
	}
	return max(time.Duration(*pod.DeletionGracePeriodSeconds)*time.Second, time.Second)
}

func grace(pod *corev1.Pod) time.Duration {
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil {
		return time.Duration(*s) * time.Second
	}
	return corev1.DefaultTerminationGracePeriodSeconds * time.Second
}

// remove removes the pod from the API and its files from the machine, now that no container runs.
func (w *worker) remove(ctx context.Context) {
	w.mu.Lock()
	pod, isGone := w.pod, w.isGone
	w.mu.Unlock()
	if err := removePodDir(w.dir); err != nil {
		w.Log.Error("remove the files of a pod", "pod", w.name(), "error", err)
	}
	for !isGone {
		err := w.kube.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64), Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
		})
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // conflict: another pod has the name
			return
		}
		w.Log.Error("remove a pod", "pod", w.name(), "error", err)
		if !pause(ctx, retryAfter) {
			return
		}
	}
}

func (w *worker) newest() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod
}

func (w *worker) name() string { pod := w.newest(); return pod.Namespace + "/" + pod.Name }

// endOrphan ends the containers in the directory of a pod that the API no longer has.
func endOrphan(ctx context.Context, dir string) error {
	attempts, err := filepath.Glob(filepath.Join(dir, "containers", "*", "*"))
	if err != nil {
		return err
	}
	slices.Sort(attempts)
	for _, attempt := range attempts {
		c, err := container.Attach(attempt)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		_, err = terminate(ctx, c, time.Second)
		if err := errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return removePodDir(dir)
}
