package agent

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
)

// eventScheme knows the kinds of the objects that events are about.
var eventScheme = scheme.Scheme

func eventSink(kube kubernetes.Interface) record.EventSink {
	return &typedcorev1.EventSinkImpl{Interface: kube.CoreV1().Events("")}
}

// The reasons of events are the kubelet's.
const (
	eventFailedMount = "FailedMount"
	eventFailed      = "Failed"
	eventStarted     = "Started"
	eventKilling     = "Killing"
	eventUnhealthy   = "Unhealthy"
	eventBackOff     = "BackOff"
)

// tell logs what happened to a pod, and shows it as an event.
func (a *Agent) tell(pod *corev1.Pod, kind, reason, message string) {
	a.Log.Info(message, "pod", pod.Namespace+"/"+pod.Name, "reason", reason)
	a.events.Event(pod, kind, reason, message)
}
