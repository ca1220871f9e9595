package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"vllmtuner/deploy/guard"
)

// productionOf returns what the guard must know of a Deployment. alive are its pods that have not ended.
func productionOf(d appsv1.Deployment, container string, alive []corev1.Pod) guard.Deployment {
	p := guard.Deployment{UID: string(d.UID), Generation: d.Generation, Replicas: 1, ScaledBy: scaledBy(d), Rollout: rolloutOf(d, alive), Alive: len(alive)}
	if d.Spec.Replicas != nil {
		p.Replicas = *d.Spec.Replicas
	}
	for _, c := range d.Spec.Template.Spec.Containers {
		if c.Name == container {
			p.Serves, p.Args = true, c.Args
		}
	}
	return p
}

// scaledBy returns the field manager that owns the replicas. Nobody owns them after a change through the subresource scale, as
// by `kubectl scale`: Kubernetes 1.36 then drops the owner from the managed fields.
func scaledBy(d appsv1.Deployment) string {
	owner, since := "", time.Time{}
	for _, entry := range d.ManagedFields {
		var fields struct {
			Spec map[string]any `json:"f:spec"`
		}
		if entry.FieldsV1 == nil || entry.Time == nil || json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
			continue
		}
		if _, sets := fields.Spec["f:replicas"]; sets && !entry.Time.Time.Before(since) {
			owner, since = entry.Manager, entry.Time.Time
		}
	}
	return owner
}

// maxRestarts is how often a container may crash before a rollout counts as failed.
const maxRestarts = 3

// rolloutOf says whether all wanted pods run with the present template. The rule is that of kubectl rollout status
// (k8s.io/kubectl/pkg/polymorphichelpers).
func rolloutOf(d appsv1.Deployment, alive []corev1.Pod) guard.Rollout {
	wanted, s := int32(1), d.Status
	if d.Spec.Replicas != nil {
		wanted = *d.Spec.Replicas
	}
	if s.ObservedGeneration < d.Generation || wanted == 0 {
		return guard.Rollout{}
	}
	if s.UpdatedReplicas == wanted && s.Replicas == wanted && s.AvailableReplicas == wanted {
		return guard.Rollout{Done: true}
	}
	for _, p := range alive {
		for _, c := range p.Status.ContainerStatuses {
			if c.RestartCount >= maxRestarts && !c.Ready {
				return guard.Rollout{Failed: fmt.Sprintf("container %s of pod %s crashed %d times", c.Name, p.Name, c.RestartCount)}
			}
		}
	}
	i := slices.IndexFunc(s.Conditions, func(c appsv1.DeploymentCondition) bool {
		return c.Type == appsv1.DeploymentProgressing && c.Status == corev1.ConditionFalse
	})
	if i >= 0 {
		return guard.Rollout{Failed: s.Conditions[i].Reason + ": " + s.Conditions[i].Message}
	}
	return guard.Rollout{}
}

// stateOf returns the state of a Job.
func stateOf(j batchv1.Job) guard.JobState {
	for _, c := range j.Status.Conditions {
		switch {
		case c.Status != corev1.ConditionTrue:
		case c.Type == batchv1.JobComplete:
			return guard.Complete
		case c.Type == batchv1.JobFailed:
			return guard.Failed
		}
	}
	if j.Spec.Suspend != nil && *j.Spec.Suspend {
		return guard.Suspended
	}
	return guard.Running
}
