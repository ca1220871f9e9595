package kubelab

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// doomed keeps the pods of other tests off a node.
var doomed = []string{"doomed=true:NoSchedule"}

// tick starts a pod that counts aloud until SIGTERM, and then ends with code 9. A word in its command line tells its
// processes from all others.
func (c pods) tick(t *testing.T, n *Node, name string) *corev1.Pod {
	t.Helper()
	c.start(t, name, fmt.Sprintf(`
  nodeName: %s
  terminationGracePeriodSeconds: 5
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c, "trap 'exit 9' TERM; n=0; while :; do n=$((n+1)); echo tick $n; sleep 0.2; done", %s]
`, n.Name, word(name)))
	pod := c.waitForRunning(t, name)
	c.waitForTicks(t, pod, 1)
	return pod
}

func word(name string) string { return "word-of-" + name }

func (c pods) ticks(t *testing.T, pod *corev1.Pod) int {
	t.Helper()
	return strings.Count(c.PodLog(t, pod, "main"), "tick")
}

// waitForTicks waits until the pod has counted on.
func (c pods) waitForTicks(t *testing.T, pod *corev1.Pod, more int) {
	t.Helper()
	c.waitForLog(t, pod, fmt.Sprintf("tick %d\n", c.ticks(t, pod)+more))
}

// waitForReady waits until the node's readiness has this status.
func (c pods) waitForReady(t *testing.T, n *Node, status corev1.ConditionStatus) {
	t.Helper()
	c.Wait(t, podLimit, fmt.Sprintf("the readiness of node %s to be %s", n.Name, status), func(ctx context.Context) error {
		node, err := c.Client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status != status {
				return fmt.Errorf("it is %s", condition.Status)
			}
		}
		return nil
	})
}

func testAgentDies(t *testing.T, c pods) {
	n := c.AddNode(t, "dies", 0, NodeOptions{Isolated: true, Taints: doomed})
	goesOn, ends, deleted := c.tick(t, n, "goes-on"), c.tick(t, n, "ends"), c.tick(t, n, "deleted")
	n.Kill(t)
	c.waitForTicks(t, goesOn, 3)
	n.Signal(t, ends, "main", syscall.SIGTERM)
	c.Kubectl(t, "delete", "pod", deleted.Name, "--wait=false")
	c.waitForTicks(t, goesOn, 3)
	if pod := c.waitForRunning(t, "ends"); pod.Status.ContainerStatuses[0].State.Running == nil {
		t.Error("somebody reported the end of a container while no agent ran")
	}
	n.Restart(t)
	_, ended := c.waitForEnd(t, "ends", corev1.PodFailed)
	checkState(t, ended, 9, "Error", "")
	c.waitForGone(t, "deleted")
	if runs(word("deleted")) {
		t.Error("the deleted pod has a process left")
	}
	// The agent has found the container that goes on, and takes note of its end.
	c.waitForTicks(t, goesOn, 3)
	n.Signal(t, goesOn, "main", syscall.SIGKILL)
	pod, ended := c.waitForEnd(t, "goes-on", corev1.PodFailed)
	checkState(t, ended, 137, "Error", "")
	if restarts := pod.Status.ContainerStatuses[0].RestartCount; restarts != 0 {
		t.Errorf("the container has %d restarts, want none", restarts)
	}
}

func testOrphans(t *testing.T, c pods) {
	n := c.AddNode(t, "orphans", 0, NodeOptions{Taints: doomed})
	pod := c.tick(t, n, "orphan")
	n.Kill(t)
	c.Kubectl(t, "delete", "pod", "orphan", "--force", "--grace-period=0")
	c.waitForGone(t, "orphan")
	c.waitForTicks(t, pod, 3) // nobody knows it any more, and it goes on
	n.Restart(t)
	c.Wait(t, podLimit, "the end of a container whose pod is gone", func(context.Context) error {
		if runs(word("orphan")) {
			return fmt.Errorf("it has counted to %d", c.ticks(t, pod))
		}
		return nil
	})
}

func testFrozenAgent(t *testing.T, c pods) {
	n := c.AddNode(t, "frozen-agent", 0, NodeOptions{Taints: doomed})
	pod := c.tick(t, n, "with-frozen-agent")
	n.Freeze(t)
	c.waitForReady(t, n, corev1.ConditionUnknown)
	c.waitForTicks(t, pod, 3)
	n.Thaw(t)
	c.waitForReady(t, n, corev1.ConditionTrue)
	c.Kubectl(t, "delete", "pod", pod.Name, "--timeout=60s")
}

func testFrozenMachine(t *testing.T, c pods) {
	n := c.AddNode(t, "frozen-machine", 0, NodeOptions{Taints: doomed})
	pod := c.tick(t, n, "on-frozen-machine")
	n.FreezeAll(t)
	before := c.ticks(t, pod)
	c.waitForReady(t, n, corev1.ConditionUnknown)
	if now := c.ticks(t, pod); now != before {
		t.Errorf("a frozen container has counted from %d to %d", before, now)
	}
	n.ThawAll(t)
	c.waitForTicks(t, pod, 3)
	c.waitForReady(t, n, corev1.ConditionTrue)
}

func testPowerCut(t *testing.T, c pods) {
	n := c.AddNode(t, "power-cut", 0, NodeOptions{Isolated: true, Taints: doomed})
	pod := c.tick(t, n, "cut")
	n.PowerOff(t)
	if runs(word("cut")) {
		t.Error("a container runs on a machine without power")
	}
	n.Boot(t)
	_, ended := c.waitForEnd(t, pod.Name, corev1.PodFailed)
	checkState(t, ended, 137, "ContainerStatusUnknown", "could not be located")
}

func testShutdown(t *testing.T, c pods) {
	n := c.AddNode(t, "shutdown", 0, NodeOptions{ShutdownGrace: 3 * time.Second, Taints: doomed})
	c.tick(t, n, "disrupted")
	n.Shutdown(t)
	pod, ended := c.waitForEnd(t, "disrupted", corev1.PodFailed)
	checkState(t, ended, 9, "Error", "")
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.DisruptionTarget && condition.Status == corev1.ConditionTrue &&
			condition.Reason == corev1.PodReasonTerminationByKubelet {
			c.waitForReady(t, n, corev1.ConditionFalse)
			return
		}
	}
	t.Errorf("the conditions of the pod are %+v, want a disruption", pod.Status.Conditions)
}
