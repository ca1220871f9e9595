package cluster

import (
	"errors"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"vllmtuner/deploy/guard"
)

// managed is an entry of the managed fields: a manager set these fields at a second.
func managed(by string, second int64, fields string) metav1.ManagedFieldsEntry {
	return metav1.ManagedFieldsEntry{Manager: by, Time: new(metav1.Unix(second, 0)), FieldsV1: metav1.NewFieldsV1(fields)}
}

const replicasField = `{"f:spec":{"f:replicas":{},"f:selector":{}}}`

func TestTheOwnerOfTheReplicas(t *testing.T) {
	for _, row := range []struct {
		name    string
		entries []metav1.ManagedFieldsEntry
		want    string
	}{
		{"nobody", nil, ""},
		{"another field", []metav1.ManagedFieldsEntry{managed("kubectl", 7, `{"f:spec":{"f:paused":{}}}`), managed("kubectl", 8, `{"f:status":{"f:replicas":{}}}`)}, ""},
		{"no JSON", []metav1.ManagedFieldsEntry{managed("kubectl", 7, `{`)}, ""},
		{"no time", []metav1.ManagedFieldsEntry{{Manager: "x", FieldsV1: metav1.NewFieldsV1(replicasField)}}, ""},
		{"the later one", []metav1.ManagedFieldsEntry{managed("argocd-controller", 9, `{"f:spec":{"f:replicas":{}}}`), managed("kubectl", 5, replicasField)}, "argocd-controller"},
	} {
		if got := scaledBy(appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{ManagedFields: row.entries}}); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

func TestRollout(t *testing.T) {
	crashing := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "vllm", RestartCount: maxRestarts}}}}
	unsteady := corev1.Pod{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Name: "vllm", RestartCount: maxRestarts, Ready: true}}}}
	late := appsv1.DeploymentCondition{Type: appsv1.DeploymentProgressing, Status: corev1.ConditionFalse, Reason: "ProgressDeadlineExceeded", Message: "too late"}
	for _, row := range []struct {
		name   string
		wanted int32
		status appsv1.DeploymentStatus
		pods   []corev1.Pod
		done   bool
		failed string
	}{
		{"done", 2, appsv1.DeploymentStatus{ObservedGeneration: 5, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 2}, []corev1.Pod{unsteady}, true, ""},
		{"not seen by its controller", 2, appsv1.DeploymentStatus{ObservedGeneration: 4, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 2}, nil, false, ""},
		{"an old pod is left", 2, appsv1.DeploymentStatus{ObservedGeneration: 5, Replicas: 3, UpdatedReplicas: 2, AvailableReplicas: 2}, nil, false, ""},
		{"not available", 2, appsv1.DeploymentStatus{ObservedGeneration: 5, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 1}, []corev1.Pod{unsteady}, false, ""},
		{"scaled to 0", 0, appsv1.DeploymentStatus{ObservedGeneration: 5}, nil, false, ""},
		{"crashing", 1, appsv1.DeploymentStatus{ObservedGeneration: 5, Replicas: 1, UpdatedReplicas: 1}, []corev1.Pod{crashing}, false, "container vllm of pod p crashed 3 times"},
		{"too late", 1, appsv1.DeploymentStatus{ObservedGeneration: 5, Replicas: 1, UpdatedReplicas: 1, Conditions: []appsv1.DeploymentCondition{late}}, nil, false, "ProgressDeadlineExceeded: too late"},
	} {
		d := appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Generation: 5}, Spec: appsv1.DeploymentSpec{Replicas: &row.wanted}, Status: row.status}
		if got := rolloutOf(d, row.pods); got.Done != row.done || got.Failed != row.failed {
			t.Errorf("%s: %+v, want done %v, failed %q", row.name, got, row.done, row.failed)
		}
	}
}

func TestStateOfAJob(t *testing.T) {
	condition := func(kind batchv1.JobConditionType, status corev1.ConditionStatus) []batchv1.JobCondition {
		return []batchv1.JobCondition{{Type: kind, Status: status}}
	}
	for _, row := range []struct {
		suspend    *bool
		conditions []batchv1.JobCondition
		want       guard.JobState
	}{
		{nil, nil, guard.Running},
		{new(false), condition(batchv1.JobSuspended, corev1.ConditionFalse), guard.Running},
		{new(true), nil, guard.Suspended},
		{new(true), condition(batchv1.JobComplete, corev1.ConditionTrue), guard.Complete},
		{nil, condition(batchv1.JobFailed, corev1.ConditionTrue), guard.Failed},
		{nil, condition(batchv1.JobFailed, corev1.ConditionFalse), guard.Running},
		{nil, condition(batchv1.JobFailureTarget, corev1.ConditionTrue), guard.Running}, // its pods still end
	} {
		if got := stateOf(batchv1.Job{Spec: batchv1.JobSpec{Suspend: row.suspend}, Status: batchv1.JobStatus{Conditions: row.conditions}}); got != row.want {
			t.Errorf("%+v: %s, want %s", row, got, row.want)
		}
	}
}

func TestProductionOfADeployment(t *testing.T) {
	d := appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{UID: "u"}}
	d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "proxy", Args: []string{"x"}}, {Name: "vllm", Args: []string{"--max-num-seqs", "8"}}}
	got := productionOf(d, "vllm", make([]corev1.Pod, 2))
	if got.UID != "u" || got.Replicas != 1 || !got.Serves || got.Alive != 2 || !slices.Equal(got.Args, []string{"--max-num-seqs", "8"}) {
		t.Errorf("%+v", got)
	}
	if productionOf(d, "vlm", nil).Serves {
		t.Error("a container with another name serves")
	}
}

func TestProblemsOfTheAPI(t *testing.T) {
	of := schema.GroupResource{Group: "apps", Resource: "deployments"}
	for _, row := range []struct {
		err, want error
	}{
		{apierrors.NewConflict(of, "vllm", errors.New("changed")), guard.ErrConflict},
		{apierrors.NewAlreadyExists(of, "vllm"), guard.ErrConflict},
		{apierrors.NewForbidden(of, "vllm", errors.New("no")), guard.ErrForbidden},
	} {
		if got := problem(row.err); !errors.Is(got, row.want) || !strings.Contains(got.Error(), "vllm") {
			t.Errorf("%v becomes %v, want %v", row.err, got, row.want)
		}
	}
	for _, passing := range []error{apierrors.NewTimeoutError("slow", 1), apierrors.NewInternalError(errors.New("x")), nil} {
		if got := problem(passing); got != passing {
			t.Errorf("%v becomes %v", passing, got)
		}
	}
}
