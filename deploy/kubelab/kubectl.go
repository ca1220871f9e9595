package kubelab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// kubectlLimit is the longest time of one kubectl. A drain waits for the grace period of the pods.
const kubectlLimit = 10 * time.Minute

// Kubectl runs kubectl as an administrator and returns what it prints on standard output. The test fails if kubectl does.
func (c *Cluster) Kubectl(t testing.TB, args ...string) string {
	t.Helper()
	stdout, _, err := c.TryKubectl(t.Context(), nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return stdout
}

// TryKubectl runs kubectl with an input. The error has what it prints on standard error.
func (c *Cluster) TryKubectl(ctx context.Context, input []byte, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, kubectlLimit)
	defer cancel()
	args = append([]string{"kubectl", "--kubeconfig", c.Kubeconfig, "--cache-dir", c.file("kubectl-cache")}, args...)
	cmd := exec.CommandContext(ctx, c.ControlPlane, args...)
	var out, errors bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &out, &errors
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		return out.String(), errors.String(), fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args[5:], " "), err, &errors)
	}
	return out.String(), errors.String(), nil
}

// Apply applies objects in YAML to a namespace. An unknown field is an error. It returns the warnings of the API server.
func (c *Cluster) Apply(t testing.TB, namespace string, objects []byte) (warnings []string) {
	t.Helper()
	return c.apply(t, namespace, objects)
}

// DryRun lets the API server check objects in YAML as Apply does, but it stores nothing.
func (c *Cluster) DryRun(t testing.TB, namespace string, objects []byte) (warnings []string) {
	t.Helper()
	return c.apply(t, namespace, objects, "--dry-run=server")
}

func (c *Cluster) apply(t testing.TB, namespace string, objects []byte, flags ...string) (warnings []string) {
	t.Helper()
	args := append([]string{"apply", "--namespace", namespace, "--validate=strict", "--filename", "-"}, flags...)
	_, stderr, err := c.TryKubectl(t.Context(), objects, args...)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(stderr) {
		if warning, ok := strings.CutPrefix(line, "Warning: "); ok {
			warnings = append(warnings, strings.TrimSpace(warning))
		}
	}
	return warnings
}

// PodLog returns what a container of a pod has printed so far, over all its starts. The log stays when the pod is removed.
func (c *Cluster) PodLog(t testing.TB, pod *corev1.Pod, container string) string {
	t.Helper()
	dir := filepath.Join(c.Logs, pod.Spec.NodeName, "logs", pod.Namespace+"_"+pod.Name+"_"+string(pod.UID), container)
	var all strings.Builder
	for start := 0; ; start++ {
		text, err := os.ReadFile(filepath.Join(dir, strconv.Itoa(start)+".log"))
		if os.IsNotExist(err) {
			return all.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		all.Write(text)
	}
}
