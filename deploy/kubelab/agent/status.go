package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"

	"vllmtuner/deploy/kubelab/container"
)

// A status is the agent's view of a pod. The worker and its containers change it; report writes it to the API.
type status struct {
	*Agent
	pod *corev1.Pod // only for its names and its spec, which never change

	sending sync.Mutex       // held while a version is written
	written corev1.PodStatus // what the API has of it

	mu      sync.Mutex
	s       corev1.PodStatus
	version int // number of changes
	sent    int // version that the API has
	isGone  bool
	changed chan struct{}
}

func newStatus(a *Agent, pod *corev1.Pod) *status {
	s := &status{Agent: a, pod: pod, changed: make(chan struct{}, 1)}
	s.s = corev1.PodStatus{
		Phase: pod.Status.Phase, StartTime: pod.Status.StartTime, Reason: pod.Status.Reason, Message: pod.Status.Message,
		HostIP: a.ip, HostIPs: []corev1.HostIP{{IP: a.ip}}, PodIP: a.ip, PodIPs: []corev1.PodIP{{IP: a.ip}},
		InitContainerStatuses: slices.Clone(pod.Status.InitContainerStatuses),
		ContainerStatuses:     slices.Clone(pod.Status.ContainerStatuses),
	}
	for _, c := range pod.Status.Conditions {
		if ours(c.Type) {
			s.s.Conditions = append(s.s.Conditions, c)
		}
	}
	s.written = *s.s.DeepCopy() // what the API has of our part
	s.written.HostIP, s.written.HostIPs, s.written.PodIP, s.written.PodIPs = "", nil, "", nil
	if s.s.StartTime == nil {
		s.s.StartTime = new(metav1.Now())
	}
	if len(s.s.ContainerStatuses) == 0 {
		s.s.InitContainerStatuses = waitingStatuses(pod.Spec.InitContainers)
		s.s.ContainerStatuses = waitingStatuses(pod.Spec.Containers)
		s.change(func() {
			s.condition(corev1.PodInitialized, len(pod.Spec.InitContainers) == 0, "ContainersNotInitialized")
			s.refresh()
		})
	}
	return s
}

func waitingStatuses(containers []corev1.Container) []corev1.ContainerStatus {
	statuses := make([]corev1.ContainerStatus, 0, len(containers))
	for _, c := range containers {
		statuses = append(statuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Started: new(false),
			State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}},
		})
	}
	return statuses
}

// ours reports whether the agent writes conditions of this type. The others belong to the control plane.
func ours(t corev1.PodConditionType) bool {
	return t == corev1.PodInitialized || t == corev1.ContainersReady || t == corev1.PodReady
}

// change changes the status and lets report know.
func (s *status) change(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
	s.version++
	select {
	case s.changed <- struct{}{}:
	default: // report knows already
	}
}

// report writes each change to the API until ctx ends.
func (s *status) report(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		}
		if !s.flush(ctx) {
			return
		}
	}
}

// flush writes the newest status, and tries until the API has it. It returns false if ctx ends first.
func (s *status) flush(ctx context.Context) bool {
	for {
		err := s.send(ctx)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		s.Log.Error("report the status of a pod", "pod", s.pod.Namespace+"/"+s.pod.Name, "error", err)
		if !pause(ctx, retryAfter) {
			return false
		}
	}
}

// send writes the newest status, unless the API has it.
func (s *status) send(ctx context.Context) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	s.mu.Lock()
	version := s.version
	if s.isGone || version == s.sent {
		s.mu.Unlock()
		return nil
	}
	status := *s.s.DeepCopy()
	s.mu.Unlock()
	body, err := s.difference(status)
	if err != nil {
		return err
	}
	_, err = s.kube.CoreV1().Pods(s.pod.Namespace).Patch(ctx, s.pod.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		s.lose()
		return nil
	}
	if err != nil {
		return err
	}
	s.written = status
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = version
	return nil
}

// difference returns a patch from the status in the API to the new one. Conditions of the control plane are in neither, so
// they stay. The UID keeps the patch off a new pod with this name.
func (s *status) difference(status corev1.PodStatus) ([]byte, error) {
	before, err := json.Marshal(corev1.Pod{Status: s.written})
	if err != nil {
		return nil, err
	}
	after, err := json.Marshal(corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: s.pod.UID}, Status: status})
	if err != nil {
		return nil, err
	}
	return strategicpatch.CreateTwoWayMergePatch(before, after, corev1.Pod{})
}

// lose notes that the pod is gone from the API, so nothing more can be reported.
func (s *status) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.isGone = true
}

func (s *status) startTime() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.s.StartTime.Time
}

// container returns the status of a container. The caller holds the lock.
func (s *status) container(name string) *corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{s.s.InitContainerStatuses, s.s.ContainerStatuses} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	panic("a container without a status: " + name)
}

func (s *status) initialized() {
	s.change(func() { s.condition(corev1.PodInitialized, true, "") })
}

func (s *status) waiting(name, reason, message string) {
	s.change(func() {
		c := s.container(name)
		if c.State.Terminated != nil {
			c.LastTerminationState = c.State
		}
		c.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}
		c.Ready, c.Started = false, new(false)
		s.refresh()
	})
}

// running notes the start of a container. A startup or readiness probe reports later that it has started or is ready.
func (s *status) running(name string, attempt int, since time.Time) {
	s.change(func() {
		c, spec := s.container(name), s.specOf(name)
		if c.State.Running != nil && int(c.RestartCount) == attempt {
			return // an earlier life of the agent has reported it, with what its probes said
		}
		c.State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(since)}}
		c.RestartCount = int32(attempt)
		c.ContainerID = s.id(name, attempt)
		c.ImageID = "kubelab://" + c.Image
		c.Started = new(spec.StartupProbe == nil)
		c.Ready = spec.StartupProbe == nil && spec.ReadinessProbe == nil
		s.refresh()
	})
}

func (s *status) started(name string) {
	s.change(func() {
		c := s.container(name)
		c.Started, c.Ready = new(true), s.specOf(name).ReadinessProbe == nil
		s.refresh()
	})
}

func (s *status) ready(name string, ready bool) {
	s.change(func() {
		s.container(name).Ready = ready
		s.refresh()
	})
}

func (s *status) terminated(name string, attempt int, exit container.Exit) {
	s.change(func() {
		c := s.container(name)
		c.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: int32(exit.Code), Reason: exit.Reason, Message: exit.Message, ContainerID: s.id(name, attempt),
			StartedAt: metav1.NewTime(exit.Started), FinishedAt: metav1.NewTime(exit.Ended),
		}}
		c.RestartCount = int32(attempt)
		c.Started, c.Ready = new(false), isInit(s.pod, s.specOf(name)) && exit.Code == 0
		s.refresh()
	})
}

func (s *status) id(name string, attempt int) string {
	return fmt.Sprintf("kubelab://%s/%s/%d", s.pod.UID, name, attempt)
}

// specOf returns the spec of a container.
func (s *status) specOf(name string) *corev1.Container {
	for _, list := range [][]corev1.Container{s.pod.Spec.InitContainers, s.pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	panic("a status without a container: " + name)
}

// refresh computes phase and readiness from the containers. The caller holds the lock.
func (s *status) refresh() {
	if s.s.Phase == corev1.PodFailed || s.s.Phase == corev1.PodSucceeded {
		return
	}
	ready, begun := true, false
	for _, c := range s.s.ContainerStatuses {
		ready = ready && c.Ready
		begun = begun || c.State.Waiting == nil || c.LastTerminationState.Terminated != nil
	}
	s.s.Phase = corev1.PodPending
	if begun {
		s.s.Phase = corev1.PodRunning
	}
	s.condition(corev1.ContainersReady, ready, "ContainersNotReady")
	s.condition(corev1.PodReady, ready, "ContainersNotReady")
}

// finishByContainers sets the last phase: Succeeded if each main container ended with code 0.
func (s *status) finishByContainers() {
	s.change(func() {
		s.endContainers()
		phase, reason := corev1.PodSucceeded, "PodCompleted"
		for _, c := range s.s.ContainerStatuses {
			if c.State.Terminated.ExitCode != 0 {
				phase, reason = corev1.PodFailed, "PodFailed"
			}
		}
		s.end(phase, reason)
	})
}

// finish sets the last phase of a pod that the agent itself ended or rejected.
func (s *status) finish(phase corev1.PodPhase, reason, message string) {
	s.change(func() {
		s.endContainers()
		s.s.Reason, s.s.Message = reason, message
		s.end(phase, "PodFailed")
	})
}

// endContainers says of each container that never ran, or waits for its next start, what the kubelet says at the end.
func (s *status) endContainers() {
	for i := range s.s.ContainerStatuses {
		if c := &s.s.ContainerStatuses[i]; c.State.Terminated == nil {
			c.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
				ExitCode: 137, Reason: container.StatusUnknown, Message: container.StatusUnknownMessage,
			}}
		}
	}
}

func (s *status) end(phase corev1.PodPhase, reason string) {
	s.s.Phase = phase
	s.condition(corev1.ContainersReady, false, reason)
	s.condition(corev1.PodReady, false, reason)
}

// disrupted says that the machine, and not the pod, is the reason of the pod's end.
func (s *status) disrupted(message string) {
	s.change(func() {
		s.condition(corev1.DisruptionTarget, true, corev1.PodReasonTerminationByKubelet)
		s.s.Conditions[len(s.s.Conditions)-1].Message = message
	})
}

// condition sets a condition. The reason is only for a condition that is false or exceptional. The caller holds the lock.
func (s *status) condition(t corev1.PodConditionType, isTrue bool, reason string) {
	c := corev1.PodCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, LastTransitionTime: metav1.Now()}
	if isTrue {
		c.Status = corev1.ConditionTrue
		if ours(t) {
			c.Reason = ""
		}
	}
	i := slices.IndexFunc(s.s.Conditions, func(old corev1.PodCondition) bool { return old.Type == t })
	if i < 0 {
		s.s.Conditions = append(s.s.Conditions, c)
		return
	}
	if s.s.Conditions[i].Status == c.Status {
		c.LastTransitionTime = s.s.Conditions[i].LastTransitionTime
	}
	s.s.Conditions[i] = c
}
