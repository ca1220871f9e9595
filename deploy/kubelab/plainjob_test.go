package kubelab

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// slowHelp is a vLLM that takes long to tell its flags.
const slowHelp = `#!/bin/sh
case "$*" in *--help*) sleep 20 ;; esac
` + "shift\n" + `exec /tuner/tuner sim serve --sim-profile=small-fast "$@"
`

// TestPlainJob does to the shipped Job what once ended it.
func TestPlainJob(t *testing.T) {
	t.Parallel()
	c := Start(t)
	script := func(text string) string {
		path := filepath.Join(t.TempDir(), "vllm")
		writeFile(t, path, text)
		return path
	}
	images := map[string]Image{tunerImage: c.TunerImage(t), vllmImage: c.MakeImage(t, map[string]string{"usr/local/bin/vllm": script(fakeVLLM)}, 0)}
	slow := map[string]Image{tunerImage: images[tunerImage], vllmImage: c.MakeImage(t, map[string]string{"usr/local/bin/vllm": script(slowHelp)}, 0)}
	node := func(t *testing.T, s site, name string, images map[string]Image) *Node {
		return c.AddNode(t, name, 1, NodeOptions{Labels: map[string]string{"nvidia.com/gpu.product": s.product}, Images: images, Isolated: true})
	}
	t.Run("all", func(t *testing.T) {
		t.Run("a command that is no server fails", func(t *testing.T) {
			t.Parallel()
			s := newSite(t, "no-server", strings.Replace(smallStudy, "[vllm, serve]", "[/bin/false]", 1))
			node(t, s, "no-server", images)
			s.apply(t, c)
			ended := waitForEnd(t, c, s)
			if ended.ExitCode != 1 || !strings.Contains(ended.Message, "/bin/false") {
				t.Errorf("the pod ends with %d and says %q, want 1 and the command", ended.ExitCode, ended.Message)
			}
			if job := jobOf(t, c, s); job.Status.Succeeded != 0 {
				t.Errorf("the Job has %d successful pods", job.Status.Succeeded)
			}
		})
		t.Run("a Job that is applied again waits for the old pod", func(t *testing.T) {
			t.Parallel()
			s := newSite(t, "again", smallStudy)
			// The new pod does not wait for the GPU of the old one.
			nodes := map[string]*Node{"again-1": node(t, s, "again-1", images), "again-2": node(t, s, "again-2", images)}
			s.apply(t, c)
			old := waitForLog(t, c, s, nil, "health and metrics at")
			waitForFile(t, c, filepath.Join(s.volume(c), studyName, "fence", "*"))
			nodes[old.Spec.NodeName].Signal(t, old, "tuner", syscall.SIGSTOP) // so that it takes long to end
			c.Kubectl(t, "delete", "job", jobName, "-n", s.namespace, "--wait=false")
			c.Kubectl(t, "apply", "-k", s.dir)
			waitForLog(t, c, s, old, "waiting up to 15 min for its end")
			nodes[old.Spec.NodeName].Signal(t, old, "tuner", syscall.SIGCONT)
			if job := waitForJob(t, c, s); job.Status.Failed != 0 {
				t.Errorf("the new Job has %d failed pods", job.Status.Failed)
			}
		})
		t.Run("a tuner that waits for its server's flags is alive", func(t *testing.T) {
			t.Parallel()
			s := newSite(t, "slow", smallStudy)
			s.change(t, "job.yaml", "initialDelaySeconds: 10", "initialDelaySeconds: 2")
			s.change(t, "job.yaml", "periodSeconds: 15", "periodSeconds: 2")
			s.change(t, "job.yaml", "failureThreshold: 8", "failureThreshold: 2")
			node(t, s, "slow", slow)
			s.apply(t, c)
			if job := waitForJob(t, c, s); job.Status.Failed != 0 {
				t.Errorf("the Job has %d failed pods", job.Status.Failed)
			}
		})
	})
}

// podsOf returns the pods of a Job, those that end too.
func podsOf(ctx context.Context, c *Cluster, s site, job string) ([]corev1.Pod, error) {
	pods, err := c.Client.CoreV1().Pods(s.namespace).List(ctx, metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job})
	if err != nil {
		return nil, err
	}
	return pods.Items, nil
}

func jobOf(t *testing.T, c *Cluster, s site) *batchv1.Job {
	t.Helper()
	job, err := c.Client.BatchV1().Jobs(s.namespace).Get(t.Context(), jobName, metav1.GetOptions{})
	must(t, err)
	return job
}

// waitForEnd waits until the first pod has ended, and returns how.
func waitForEnd(t *testing.T, c *Cluster, s site) (ended *corev1.ContainerStateTerminated) {
	t.Helper()
	c.Wait(t, studyLimit, "the end of a pod", func(ctx context.Context) error {
		pods, err := podsOf(ctx, c, s, jobName)
		for _, p := range pods {
			for _, status := range p.Status.ContainerStatuses {
				if ended = status.State.Terminated; ended != nil {
					return nil
				}
			}
		}
		return errors.Join(err, fmt.Errorf("%d pods run", len(pods)))
	})
	return ended
}

// waitForLog waits until a pod other than not has printed a text, and returns the pod.
func waitForLog(t *testing.T, c *Cluster, s site, not *corev1.Pod, text string) (found *corev1.Pod) {
	t.Helper()
	c.Wait(t, studyLimit, fmt.Sprintf("a pod that says %q", text), func(ctx context.Context) error {
		pods, err := podsOf(ctx, c, s, jobName)
		for i, p := range pods {
			if (not == nil || p.UID != not.UID) && p.Spec.NodeName != "" && strings.Contains(c.PodLog(t, &p, "tuner"), text) {
				found = &pods[i]
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("there are %d pods", len(pods)))
	})
	return found
}

// waitForFile waits until a file exists.
func waitForFile(t *testing.T, c *Cluster, pattern string) {
	t.Helper()
	c.Wait(t, time.Minute, pattern, func(context.Context) error {
		found, err := filepath.Glob(pattern)
		if len(found) > 0 {
			return nil
		}
		return errors.Join(err, errors.New("there is no such file"))
	})
}
