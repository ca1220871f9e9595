package kubelab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// production is a Deployment that holds the GPU of its node.
const production = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm}
spec:
  selector: {matchLabels: {app: vllm}}
  template:
    metadata: {labels: {app: vllm}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 20
      nodeSelector: {nvidia.com/gpu.product: PRODUCT}
      tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
      containers:
        - name: vllm
          image: production
          command: [vllm, serve]
          args: [example/small-fast, --port, "8000", --max-num-seqs, "256"]
          readinessProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 1}
          resources: {limits: {nvidia.com/gpu: "1"}}
`

const guardName, recordName = jobName + "-guard", "tuner-restore-vllm"

// A loanRig is a cluster with one node for guards. Each loan has a namespace and a node with one GPU.
type loanRig struct {
	*Cluster
	images map[string]Image
	guards *Node
}

// A loan is production with its GPU, and a study that is about to borrow it.
type loan struct {
	*loanRig
	site
}

// TestLoan lets the shipped guard borrow the GPU of a Deployment, with only the rights in the manifests.
func TestLoan(t *testing.T) {
	t.Parallel()
	c := Start(t)
	vllm := filepath.Join(t.TempDir(), "vllm")
	writeFile(t, vllm, fakeVLLM)
	served := map[string]string{"usr/local/bin/vllm": vllm}
	rig := &loanRig{Cluster: c, images: map[string]Image{tunerImage: c.TunerImage(t), vllmImage: c.MakeImage(t, served, 0)}}
	served["tuner/tuner"] = c.Tuner
	rig.images["production"] = c.MakeImage(t, served, 0)
	// The guard uses the API, so its node has the network of this machine.
	rig.guards = c.AddNode(t, "guards", 0, NodeOptions{Images: rig.images})
	t.Run("needs each right", func(t *testing.T) {
		t.Parallel()
		testEachRightIsNeeded(t, rig)
	})
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		for name, test := range map[string]func(*testing.T, loan){
			"gives the GPU back":                 testLoanEnds,
			"survives kills of its guard":        testLoanSurvivesKills,
			"ends with its guard":                testLoanEndsWithItsGuard,
			"ends with its manifests":            testLoanEndsWithItsManifests,
			"obeys somebody who scales up":       testLoanObeys,
			"is restored without guard or study": testLoanIsRestored,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, rig.borrow(t, strings.ReplaceAll(name, " ", "-")))
			})
		}
	})
}

// borrow starts production, and then the study that borrows its GPU.
func (r *loanRig) borrow(t *testing.T, namespace string) loan {
	t.Helper()
	l := loan{r, newSite(t, strings.ToLower(namespace), smallStudy)}
	l.change(t, "kustomization.yaml", "# components:\n#   - borrow\n", "components:\n  - borrow\n")
	r.AddNode(t, l.namespace, 1, NodeOptions{
		Labels: map[string]string{"nvidia.com/gpu.product": l.product, "nvidia.com/gpu.present": "true"}, Taints: []string{"nvidia.com/gpu=present:NoSchedule"},
		Images: r.images, Isolated: true,
	})
	l.makeNamespace(t, r.Cluster)
	r.Apply(t, l.namespace, []byte(strings.ReplaceAll(production, "PRODUCT", l.product)))
	l.waitForProduction(t, 1)
	l.change(t, "rights/kustomization.yaml", "namespace: default", "namespace: "+l.namespace)
	for _, dir := range []string{"volumes", "rights", "."} {
		r.Kubectl(t, "apply", "--validate=strict", "--warnings-as-errors", "-k", filepath.Join(l.dir, dir))
	}
	return l
}

func (l loan) deployment(ctx context.Context) (*appsv1.Deployment, error) {
	return l.Client.AppsV1().Deployments(l.namespace).Get(ctx, "vllm", metav1.GetOptions{})
}

// waitForReady waits until production has this number of replicas, and all are ready.
func (l loan) waitForReady(t *testing.T, replicas int32) {
	t.Helper()
	l.Wait(t, 2*time.Minute, "production", func(ctx context.Context) error {
		d, err := l.deployment(ctx)
		switch {
		case err != nil:
			return err
		case *d.Spec.Replicas != replicas || d.Status.ReadyReplicas != replicas:
			return fmt.Errorf("%d replicas are wanted, %d are ready, %d should be", *d.Spec.Replicas, d.Status.ReadyReplicas, replicas)
		}
		return nil
	})
}

// waitForProduction waits until production serves with its own args and this number of replicas.
func (l loan) waitForProduction(t *testing.T, replicas int32) {
	t.Helper()
	l.waitForReady(t, replicas)
	d, err := l.deployment(t.Context())
	must(t, err)
	if args := d.Spec.Template.Spec.Containers[0].Args; !slices.Equal(args, []string{"example/small-fast", "--port", "8000", "--max-num-seqs", "256"}) {
		t.Errorf("production has the args %q", args)
	}
}

// waitForNoRecord waits until nothing is borrowed any more.
func (l loan) waitForNoRecord(t *testing.T) {
	t.Helper()
	l.Wait(t, time.Minute, "the end of the loan", func(ctx context.Context) error {
		_, err := l.Client.CoreV1().ConfigMaps(l.namespace).Get(ctx, recordName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("the record is left"))
	})
}

// guardPod returns the pod of the guard that runs, or nil.
func (l loan) guardPod(ctx context.Context) (*corev1.Pod, error) {
	pods, err := podsOf(ctx, l.Cluster, l.site, guardName)
	for _, p := range pods {
		if s := p.Status.ContainerStatuses; p.DeletionTimestamp == nil && len(s) == 1 && s[0].State.Running != nil {
			return &p, nil
		}
	}
	return nil, err
}

// downs counts how often production was scaled down, by the Deployment controller's own record of it.
func (l loan) downs(t *testing.T) (n int32) {
	t.Helper()
	events, err := l.Client.CoreV1().Events(l.namespace).List(t.Context(), metav1.ListOptions{FieldSelector: "reason=ScalingReplicaSet"})
	must(t, err)
	for _, e := range events.Items {
		if strings.Contains(e.Message, "Scaled down") {
			n += max(1, e.Count)
		}
	}
	return n
}

// ended checks that a study was complete and production has its GPU.
func (l loan) ended(t *testing.T) {
	t.Helper()
	waitForJob(t, l.Cluster, l.site)
	l.waitForProduction(t, 1)
	l.waitForNoRecord(t)
	checkBest(t, l.Cluster, l.site)
	if n := l.downs(t); n != 1 {
		t.Errorf("production was scaled down %d times, want once", n)
	}
	l.Wait(t, time.Minute, "the end of the guard", func(ctx context.Context) error {
		g, err := l.Client.BatchV1().Jobs(l.namespace).Get(ctx, guardName, metav1.GetOptions{})
		if err == nil && g.Status.Succeeded == 1 {
			return nil
		}
		return errors.Join(err, errors.New("the guard's Job is not complete"))
	})
}

// over reports whether the study is complete and nothing is borrowed.
func (l loan) over(t *testing.T) bool {
	t.Helper()
	_, err := l.Client.CoreV1().ConfigMaps(l.namespace).Get(t.Context(), recordName, metav1.GetOptions{})
	return apierrors.IsNotFound(err) && jobOf(t, l.Cluster, l.site).Status.Succeeded == 1
}

// tuner runs a command of the tuner as an administrator of the cluster.
func (l loan) tuner(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, l.Tuner, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+l.Kubeconfig)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func testLoanEnds(t *testing.T, l loan) { l.ended(t) }

// testLoanSurvivesKills kills the guard again and again until the loan is over.
func testLoanSurvivesKills(t *testing.T, l loan) {
	most, kills := 5, 0 // after each kill, Kubernetes waits twice as long before it starts the guard again
	if n, err := strconv.Atoi(os.Getenv("KUBE_KILLS")); err == nil {
		most = n
	}
	for end := time.Now().Add(4 * time.Minute); !l.over(t); {
		if time.Now().After(end) {
			t.Fatalf("after %d kills the loan is not over within 4 minutes", kills)
		}
		if p, err := l.guardPod(t.Context()); kills < most && err == nil && p != nil && l.guards.TrySignal(p, "tuner", syscall.SIGKILL) == nil {
			kills++
		}
		time.Sleep(700 * time.Millisecond) // so that a guard can do something before it dies
	}
	l.ended(t)
	t.Logf("the guard was killed %d times", kills)
	if kills < 2 {
		t.Error("the guard was hardly killed, so this test proves nothing")
	}
}

// testLoanEndsWithItsGuard deletes the guard while the study runs.
func testLoanEndsWithItsGuard(t *testing.T, l loan) {
	waitForTrial(t, l.Cluster, l.site)
	begin := time.Now()
	l.Kubectl(t, "delete", "job", guardName, "-n", l.namespace, "--cascade=foreground")
	d, err := l.deployment(t.Context())
	must(t, err)
	if *d.Spec.Replicas != 1 {
		t.Errorf("the guard is gone after %s, and production has %d replicas", time.Since(begin), *d.Spec.Replicas)
	}
	l.returned(t, "the guard was told to end", 1)
}

// testLoanEndsWithItsManifests deletes all that was applied, but the rights and the volumes.
func testLoanEndsWithItsManifests(t *testing.T, l loan) {
	waitForTrial(t, l.Cluster, l.site)
	l.Kubectl(t, "delete", "-k", l.dir, "--wait=false")
	l.waitForNoRecord(t)
	l.waitForProduction(t, 1)
}

// returned checks that the study was ended early, with a reason, and that production has its GPU.
func (l loan) returned(t *testing.T, why string, replicas int32) {
	t.Helper()
	l.waitForNoRecord(t)
	l.waitForProduction(t, replicas)
	study := jobOf(t, l.Cluster, l.site)
	if got := study.Annotations["tuner.dev/outcome"]; got != "returned: "+why || !*study.Spec.Suspend {
		t.Errorf("the study is suspended: %v, with the outcome %q, want %q", *study.Spec.Suspend, got, why)
	}
}

func testLoanObeys(t *testing.T, l loan) {
	waitForTrial(t, l.Cluster, l.site)
	l.Kubectl(t, "scale", "deployment/vllm", "--replicas=1", "-n", l.namespace)
	l.returned(t, "somebody scaled production to 1", 1)
}

// testLoanIsRestored takes everything of the tuner away but the record.
func testLoanIsRestored(t *testing.T, l loan) {
	waitForTrial(t, l.Cluster, l.site)
	// Without its rights, the guard cannot give the GPU back when it is deleted.
	l.Kubectl(t, "delete", "rolebinding", guardName, "-n", l.namespace)
	for _, name := range []string{guardName, jobName} {
		l.Kubectl(t, "delete", "job", name, "-n", l.namespace, "--cascade=background", "--wait=false")
	}
	begin := time.Now()
	out, err := l.tuner(t.Context(), "restore", "vllm", "--namespace", l.namespace)
	if took := time.Since(begin); err != nil || !strings.Contains(out, "Deployment vllm has its replicas back") || took > 10*time.Second {
		t.Errorf("tuner restore ends with %v after %s:\n%s", err, took, out)
	}
	l.waitForNoRecord(t)
	l.waitForProduction(t, 1)
}
