package kubelab

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// smallStudy takes 20 s. Its probes pass on a busy machine too: the TTFT limit is a minute, and each answer has one token, so
// there is no time between tokens that a busy machine could lengthen.
const smallStudy = `
version: 1
name: small
model: example/small-fast
server:
  command: [vllm, serve]
  args: [--max-model-len, "2048"]
  start_timeout: 2m
  stop_timeout: 10s
slo: {ttft_p95: 60s}
workload: {kind: random, input_tokens: 128, output_tokens: 1, requests: 500}
parameters:
  max-num-seqs: {int: [2, 12], log: true}
sampler: {name: random, seed: 3}
budget: {confirm: 0, trials: 3}
probe: {seconds: 1, min_requests: 20, lead_in: 1s, start_rate: 20, max_rate: 26, tolerance: 0.3, max_probes: 2, worst_case: false}
cache: {protocol: reset, prime_rate: 20}
`

// fakeVLLM is the command vllm in the image of vLLM: the simulated server, from the tuner that the init container installs.
const fakeVLLM = `#!/bin/sh
shift
exec /tuner/tuner sim serve --sim-profile=small-fast "$@"
`

// TestStudyJob runs the shipped Job with the real tuner.
func TestStudyJob(t *testing.T) {
	t.Parallel()
	c := Start(t)
	vllm := filepath.Join(t.TempDir(), "vllm")
	writeFile(t, vllm, fakeVLLM)
	images := map[string]Image{
		tunerImage: c.TunerImage(t),
		vllmImage:  c.MakeImage(t, map[string]string{"usr/local/bin/vllm": vllm}, 0),
	}
	t.Run("on a cluster", func(t *testing.T) {
		for name, test := range map[string]func(*testing.T, *Cluster, site, *Node){
			"completes":            testJobCompletes,
			"survives a kill":      testJobSurvivesAKill,
			"moves out of a drain": testJobSurvivesADrain,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newSite(t, strings.ReplaceAll(name, " ", "-"), smallStudy)
				node := c.AddNode(t, s.namespace, 1, NodeOptions{
					Labels: map[string]string{"nvidia.com/gpu.product": s.product},
					Taints: []string{"nvidia.com/gpu=present:NoSchedule"},
					Images: images,
					// The Job needs no network, and its port is the same in each of these tests.
					Isolated: true,
				})
				s.apply(t, c)
				test(t, c, s, node)
			})
		}
		t.Run("manifests are accepted", func(t *testing.T) {
			t.Parallel()
			testManifestsAreAccepted(t, c)
		})
	})
}

// studyLimit is how long a study may take. On two idle cores it takes half a minute, with its restarts.
const studyLimit = 4 * time.Minute

func testJobCompletes(t *testing.T, c *Cluster, s site, _ *Node) {
	job := waitForJob(t, c, s)
	if job.Status.Failed != 0 || job.Status.Succeeded != 1 {
		t.Errorf("the Job has %d failed and %d successful pods, want 0 and 1", job.Status.Failed, job.Status.Succeeded)
	}
	checkBest(t, c, s)
}

func testJobSurvivesAKill(t *testing.T, c *Cluster, s site, node *Node) {
	pod := waitForTrial(t, c, s)
	node.Signal(t, pod, "tuner", syscall.SIGKILL)
	job := waitForJob(t, c, s)
	if job.Status.Failed != 1 || job.Status.Succeeded != 1 {
		t.Errorf("the Job has %d failed and %d successful pods, want 1 of each", job.Status.Failed, job.Status.Succeeded)
	}
	first := podNamed(t, c, s, pod.Name)
	if ended := first.Status.ContainerStatuses[0].State.Terminated; ended == nil || ended.ExitCode != 137 {
		t.Errorf("the killed container ended as %+v, want code 137", ended)
	}
	checkResumed(t, c, s, pod)
	checkBest(t, c, s)
}

func testJobSurvivesADrain(t *testing.T, c *Cluster, s site, node *Node) {
	pod := waitForTrial(t, c, s)
	c.Kubectl(t, "drain", node.Name, "--delete-emptydir-data", "--timeout=2m")
	// The pod that replaces the first one waits for the node.
	c.Wait(t, time.Minute, "a pod that nobody can run", func(ctx context.Context) error {
		pods, err := c.Client.CoreV1().Pods(s.namespace).List(ctx, metav1.ListOptions{})
		for _, p := range pods.Items {
			if p.UID != pod.UID && p.Spec.NodeName == "" && p.Status.Phase == corev1.PodPending {
				return err
			}
		}
		return errors.Join(err, fmt.Errorf("there are %d pods", len(pods.Items)))
	})
	c.Kubectl(t, "uncordon", node.Name)
	job := waitForJob(t, c, s)
	if job.Status.Failed != 0 || job.Status.Succeeded != 1 {
		t.Errorf("the Job has %d failed and %d successful pods, want the drained pod not to count", job.Status.Failed, job.Status.Succeeded)
	}
	checkResumed(t, c, s, pod)
	checkBest(t, c, s)
}

// waitForTrial waits until the study has stored its first trial, and returns the pod.
func waitForTrial(t *testing.T, c *Cluster, s site) *corev1.Pod {
	t.Helper()
	var found *corev1.Pod
	c.Wait(t, studyLimit, "the first trial", func(ctx context.Context) error {
		pods, err := podsOf(ctx, c, s, jobName)
		if err != nil {
			return err
		}
		if len(pods) == 0 {
			return errors.New("the Job has no pod")
		}
		found = &pods[0]
		log := c.PodLog(t, found, "tuner")
		if !strings.Contains(log, "\ntrial  0") {
			return fmt.Errorf("the pod is %s and says:\n%s", found.Status.Phase, log)
		}
		return nil
	})
	return found
}

// waitForJob waits until the Job is complete. It fails at once if the Job fails.
func waitForJob(t *testing.T, c *Cluster, s site) *batchv1.Job {
	t.Helper()
	var job *batchv1.Job
	c.Wait(t, studyLimit, "the Job to complete", func(ctx context.Context) (err error) {
		if job, err = c.Client.BatchV1().Jobs(s.namespace).Get(ctx, jobName, metav1.GetOptions{}); err != nil {
			return err
		}
		for _, condition := range job.Status.Conditions {
			switch {
			case condition.Type == batchv1.JobComplete && condition.Status == corev1.ConditionTrue:
				return nil
			case condition.Type == batchv1.JobFailed && condition.Status == corev1.ConditionTrue:
				return stopWaiting{fmt.Errorf("the Job has failed: %s: %s", condition.Reason, condition.Message)}
			}
		}
		return fmt.Errorf("its status is %+v", job.Status)
	})
	return job
}

func podNamed(t *testing.T, c *Cluster, s site, name string) *corev1.Pod {
	t.Helper()
	pod, err := c.Client.CoreV1().Pods(s.namespace).Get(t.Context(), name, metav1.GetOptions{})
	must(t, err)
	return pod
}

// checkResumed checks that the trial of the first pod was not measured again.
func checkResumed(t *testing.T, c *Cluster, s site, first *corev1.Pod) {
	t.Helper()
	pods, err := c.Client.CoreV1().Pods(s.namespace).List(t.Context(), metav1.ListOptions{})
	must(t, err)
	for _, p := range pods.Items {
		if p.UID == first.UID {
			continue
		}
		log := c.PodLog(t, &p, "tuner")
		if strings.Contains(log, "\ntrial  0") || !strings.Contains(log, "\ntrial  2") {
			t.Errorf("pod %s did not go on with trial 1 or 2:\n%s", p.Name, log)
		}
	}
}

// checkBest reads the result as somebody does who mounts the volume of the studies.
func checkBest(t *testing.T, c *Cluster, s site) {
	t.Helper()
	best := exec.CommandContext(t.Context(), c.Tuner, "best", "--root", s.volume(c), studyName)
	output, err := best.CombinedOutput()
	if want := "3 of 3 trials done"; err != nil || !strings.Contains(string(output), want) {
		t.Errorf("tuner best ends with %v, want %q in its report:\n%s", err, want, output)
	}
}
