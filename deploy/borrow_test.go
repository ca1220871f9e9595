package deploy

import (
	"slices"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"vllmtuner/deploy/cluster"
)

// theGuard returns the only Job of borrow/guard.yaml.
func theGuard(t *testing.T) *batchv1.Job {
	t.Helper()
	job, ok := read(t, "borrow/guard.yaml")[0].(*batchv1.Job)
	if !ok {
		t.Fatal("borrow/guard.yaml holds no Job")
	}
	return job
}

// borrowed returns the names that the guard's args give.
func borrowed(t *testing.T) cluster.Names {
	t.Helper()
	args := theGuard(t).Spec.Template.Spec.Containers[0].Args
	if len(args) != 7 || args[0] != "guard" {
		t.Fatalf("the guard runs tuner %q", args)
	}
	after := func(flag string) string { return args[slices.Index(args, flag)+1] }
	return cluster.Names{Deployment: after("--deployment"), Container: after("--container"), Job: after("--job")}
}

// The guard must start again after any end of its pod, also if its node is lost.
func TestTheGuardAlwaysStartsAgain(t *testing.T) {
	spec := theGuard(t).Spec
	pod := spec.Template.Spec
	if spec.PodFailurePolicy != nil || spec.PodReplacementPolicy != nil || pod.RestartPolicy != corev1.RestartPolicyOnFailure {
		t.Error("a pod on a lost node would not be replaced, or a failed one not started again")
	}
	if spec.BackoffLimit == nil || *spec.BackoffLimit < 100 || spec.ActiveDeadlineSeconds != nil {
		t.Error("the Job gives up before the study ends")
	}
	if spec.TTLSecondsAfterFinished != nil {
		t.Error("the Job vanishes when it has ended, so the next apply takes the GPU once more")
	}
	for _, taint := range []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable} {
		if !slices.ContainsFunc(pod.Tolerations, func(l corev1.Toleration) bool { return l.Key == taint && *l.TolerationSeconds <= 30 }) {
			t.Errorf("the pod stays more than 30 s on a node that is %s", taint)
		}
	}
	if _, wants := pod.Containers[0].Resources.Limits["nvidia.com/gpu"]; wants {
		t.Error("the guard wants a GPU")
	}
	if security := pod.Containers[0].SecurityContext; !*pod.SecurityContext.RunAsNonRoot || *security.AllowPrivilegeEscalation || !*security.ReadOnlyRootFilesystem {
		t.Error("the guard has rights that it does not need")
	}
	if image := theJob(t).Spec.Template.Spec.InitContainers[0].Image; pod.Containers[0].Image != image {
		t.Errorf("the guard has image %s, the Job takes the tuner from %s", pod.Containers[0].Image, image)
	}
}

// The names in the role are those in the guard's args, and no rule gives more than the guard uses.
func TestTheGuardHasTheRightsThatItNeeds(t *testing.T) {
	names, objects := borrowed(t), read(t, "rights/rbac.yaml")
	if names.Job != theJob(t).Name {
		t.Errorf("the guard starts Job %s, the study's is %s", names.Job, theJob(t).Name)
	}
	account, role, binding := objects[0].(*corev1.ServiceAccount), objects[1].(*rbacv1.Role), objects[2].(*rbacv1.RoleBinding)
	if s := binding.Subjects; len(s) != 1 || s[0].Name != account.Name || binding.RoleRef.Name != role.Name || theGuard(t).Spec.Template.Spec.ServiceAccountName != account.Name {
		t.Errorf("account %s, role %s and binding %+v do not belong together", account.Name, role.Name, binding)
	}
	var got []string
	for _, rule := range role.Rules {
		got = append(got, strings.Join(rule.Verbs, ",")+" "+strings.Join(rule.APIGroups, ",")+"/"+strings.Join(rule.Resources, ",")+" "+strings.Join(rule.ResourceNames, ","))
	}
	want := []string{
		"get apps/deployments " + names.Deployment, "update apps/deployments/scale " + names.Deployment, "list /pods ",
		"create /configmaps ", "get,update,delete /configmaps " + names.Record(), "get,patch batch/jobs " + names.Job,
	}
	if !slices.Equal(got, want) {
		t.Errorf("the rules are %q, want %q", got, want)
	}
}
