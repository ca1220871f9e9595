package kubelab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// idle is a Deployment and a study's Job that need no GPU and do nothing.
const idle = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm}
spec:
  selector: {matchLabels: {app: vllm}}
  template:
    metadata: {labels: {app: vllm}}
    spec:
      terminationGracePeriodSeconds: 0
      containers: [{name: vllm, image: idle, command: [/bin/sleep, "600"]}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: tune-llama70b}
spec:
  suspend: true
  template:
    spec:
      restartPolicy: Never
      containers: [{name: tuner, image: idle, command: [/bin/sleep, "2"]}]
`

// testEachRightIsNeeded takes one verb after the other out of the guard's role. Without it, the guard says what it lacks. With
// all of them, the guard does its work.
func testEachRightIsNeeded(t *testing.T, r *loanRig) {
	s := newSite(t, "rights", smallStudy)
	text, err := os.ReadFile(filepath.Join(s.dir, "rights/rbac.yaml"))
	must(t, err)
	role := readRole(t, r, text)
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		if out, code := r.guardWith(t, "rights-all", text, nil, "", false); code != 0 {
			t.Errorf("with all rights the guard ends with %d:\n%s", code, out)
		}
	})
	for i, rule := range role.Rules {
		for _, verb := range rule.Verbs {
			name := fmt.Sprintf("rights-%s-%s", verb, strings.ReplaceAll(rule.Resources[0], "/", "-"))
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				without := slices.Clone(role.Rules)
				without[i].Verbs = slices.DeleteFunc(slices.Clone(rule.Verbs), func(v string) bool { return v == verb })
				if len(without[i].Verbs) == 0 {
					without = slices.Delete(without, i, i+1)
				}
				// The record is only updated when the GPU is returned early.
				want := fmt.Sprintf("cannot %s resource %q", verb, rule.Resources[0])
				out, code := r.guardWith(t, name, text, without, want, verb == "update" && rule.Resources[0] == "configmaps")
				if code == 0 || !strings.Contains(out, want) {
					t.Errorf("the guard ends with %d, and does not say %q:\n%s", code, want, out)
				}
			})
		}
	}
}

// readRole lets the API server read the role in a manifest.
func readRole(t *testing.T, r *loanRig, text []byte) *rbacv1.Role {
	t.Helper()
	r.Kubectl(t, "create", "namespace", "rights")
	r.Apply(t, "rights", text)
	role, err := r.Client.RbacV1().Roles("rights").Get(t.Context(), guardName, metav1.GetOptions{})
	must(t, err)
	return role
}

// guardWith runs a guard in a namespace of its own, with the rules instead of those in the manifest if they are not nil. A guard
// that says the text lacks is killed, because it tries again while it owes something. If stop is true, the guard is told to end
// once the study runs.
func (r *loanRig) guardWith(t *testing.T, namespace string, manifest []byte, rules []rbacv1.PolicyRule, lacks string, stop bool) (out string, code int) {
	t.Helper()
	r.Kubectl(t, "create", "namespace", namespace)
	r.Apply(t, namespace, manifest)
	if rules != nil {
		role, err := r.Client.RbacV1().Roles(namespace).Get(t.Context(), guardName, metav1.GetOptions{})
		must(t, err)
		role.Rules = rules
		_, err = r.Client.RbacV1().Roles(namespace).Update(t.Context(), role, metav1.UpdateOptions{})
		must(t, err)
	}
	r.Apply(t, namespace, []byte(idle))
	l := loan{r, site{namespace: namespace}}
	l.waitForReady(t, 1)
	cmd := exec.CommandContext(t.Context(), r.Tuner, "guard", "--deployment", "vllm", "--container", "vllm", "--job", jobName)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+r.kubeconfigOf(t, namespace))
	signals := map[string]syscall.Signal{}
	if lacks != "" {
		signals[lacks] = syscall.SIGKILL
	}
	if stop {
		signals["the study runs"] = syscall.SIGTERM
	}
	w := &watchedOutput{signals: signals, seen: func(s syscall.Signal) { _ = cmd.Process.Signal(s) }} // it may have ended
	cmd.Stdout, cmd.Stderr = w, w
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return w.String(), exit.ExitCode()
	}
	must(t, err)
	return w.String(), 0
}

// kubeconfigOf returns a kubeconfig file of the guard's service account.
func (r *loanRig) kubeconfigOf(t *testing.T, namespace string) string {
	t.Helper()
	token, err := r.Client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), guardName, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	must(t, err)
	config, err := clientcmd.LoadFromFile(r.Kubeconfig)
	must(t, err)
	for _, user := range config.AuthInfos {
		*user = clientcmdapi.AuthInfo{Token: token.Status.Token}
	}
	for _, c := range config.Contexts {
		c.Namespace = namespace
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, clientcmd.WriteToFile(*config, path))
	return path
}

// A watchedOutput keeps what is written to it, and calls seen once for each text that has been written.
type watchedOutput struct {
	mu      sync.Mutex
	all     bytes.Buffer
	signals map[string]syscall.Signal
	seen    func(syscall.Signal)
}

func (w *watchedOutput) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all.Write(b)
	for text, signal := range w.signals {
		if bytes.Contains(w.all.Bytes(), []byte(text)) {
			delete(w.signals, text)
			w.seen(signal)
		}
	}
	return len(b), nil
}

func (w *watchedOutput) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all.String()
}
