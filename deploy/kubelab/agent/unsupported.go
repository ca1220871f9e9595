package agent

import (
	corev1 "k8s.io/api/core/v1"
)

// unsupported names the fields of a pod without which it would run, but not as its author means. The agent rejects such
// a pod, so no test passes by mistake.
func unsupported(pod *corev1.Pod) []string {
	var missing []string
	note := func(isUsed bool, field string) {
		if isUsed {
			missing = append(missing, field)
		}
	}
	spec := pod.Spec
	note(spec.HostPID, "hostPID")
	note(spec.HostIPC, "hostIPC")
	note(isTrue(spec.ShareProcessNamespace), "shareProcessNamespace")
	note(spec.SecurityContext != nil && spec.SecurityContext.FSGroup != nil, "securityContext.fsGroup")
	for _, c := range spec.InitContainers {
		note(c.RestartPolicy != nil, "initContainers.restartPolicy")
	}
	for _, c := range append(append([]corev1.Container{}, spec.InitContainers...), spec.Containers...) {
		note(c.Lifecycle != nil, "lifecycle")
		note(len(c.VolumeDevices) > 0, "volumeDevices")
		for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe} {
			note(p != nil && p.HTTPGet == nil && p.TCPSocket == nil, "probes by exec or gRPC")
		}
	}
	for _, v := range spec.Volumes {
		s := v.VolumeSource
		note(s.EmptyDir == nil && s.HostPath == nil && s.PersistentVolumeClaim == nil && s.ConfigMap == nil && s.Secret == nil &&
			s.DownwardAPI == nil && s.Projected == nil, "the kind of volume "+v.Name)
	}
	return missing
}
