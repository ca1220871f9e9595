package kubelab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A pods is a cluster whose nodes are tested with small pods.
type pods struct{ *Cluster }

// podLimit is how long a small pod may take: a second on idle cores.
const podLimit = time.Minute

// TestNode checks that a node does with a pod what a kubelet does.
func TestNode(t *testing.T) {
	t.Parallel()
	c := pods{Start(t)}
	images := map[string]Image{"tuner": c.TunerImage(t)}
	for _, name := range []string{"node-1", "node-2"} {
		c.AddNode(t, name, 0, NodeOptions{Images: images})
	}
	t.Run("all", func(t *testing.T) {
		for name, test := range map[string]func(*testing.T, pods){
			"a container gets what its pod says":            testContainerGetsWhatItsPodSays,
			"an init container fills a volume":              testInitContainerFillsAVolume,
			"a user who is not root has no rights":          testUserHasNoRights,
			"a container without liveness is killed":        testLivenessKills,
			"a pod is ready when its probes say so":         testReadiness,
			"a failed container starts again":               testRestart,
			"a grace period ends with SIGKILL":              testGracePeriod,
			"a shorter grace period wins":                   testShorterGracePeriod,
			"a deadline ends a pod":                         testDeadline,
			"a pod waits for its ConfigMap":                 testWaitsForConfigMap,
			"a service account has its token":               testToken,
			"nodes share a PersistentVolume":                testSharedVolume,
			"a command that does not exist fails the pod":   testNoSuchCommand,
			"kubectl shows logs and runs commands":          testLogsAndExec,
			"a pod that needs more than kubelab is refused": testUnsupported,

			"containers outlive their agent":         testAgentDies,
			"a forced deletion ends with the agent":  testOrphans,
			"a frozen agent loses its node":          testFrozenAgent,
			"a frozen machine goes on":               testFrozenMachine,
			"a power cut kills the containers":       testPowerCut,
			"a shutdown marks its pods as disrupted": testShutdown,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, c)
			})
		}
	})
}

// start starts a pod whose spec is given without its restartPolicy, which is Never unless the spec has one.
func (c pods) start(t *testing.T, name, spec string) {
	t.Helper()
	if !strings.Contains(spec, "restartPolicy:") {
		spec = "  restartPolicy: Never\n" + strings.TrimPrefix(spec, "\n")
	}
	text := "apiVersion: v1\nkind: Pod\nmetadata: {name: " + name + ", labels: {color: blue}}\nspec:\n" + spec
	if warnings := c.Apply(t, "default", []byte(text)); len(warnings) > 0 {
		t.Errorf("pod %s: %q", name, warnings)
	}
}

// wait waits until the pod is as wanted.
func (c pods) wait(t *testing.T, name, what string, is func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	c.Wait(t, podLimit, fmt.Sprintf("pod %s %s", name, what), func(ctx context.Context) (err error) {
		if pod, err = c.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !is(pod) {
			return fmt.Errorf("its status is %+v", pod.Status)
		}
		return nil
	})
	return pod
}

// waitForEnd waits until the pod has the last phase and returns how its first container ended.
func (c pods) waitForEnd(t *testing.T, name string, phase corev1.PodPhase) (*corev1.Pod, *corev1.ContainerStateTerminated) {
	t.Helper()
	pod := c.wait(t, name, "to be "+string(phase), func(p *corev1.Pod) bool { return p.Status.Phase == phase })
	ended := pod.Status.ContainerStatuses[0].State.Terminated
	if ended == nil {
		ended = new(corev1.ContainerStateTerminated)
	}
	return pod, ended
}

func (c pods) waitForRunning(t *testing.T, name string) *corev1.Pod {
	t.Helper()
	return c.wait(t, name, "to run", func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

// waitForLog waits until the pod's container has printed the text.
func (c pods) waitForLog(t *testing.T, pod *corev1.Pod, text string) {
	t.Helper()
	c.Wait(t, podLimit, fmt.Sprintf("pod %s to print %q", pod.Name, text), func(context.Context) error {
		if log := c.PodLog(t, pod, "main"); !strings.Contains(log, text) {
			return fmt.Errorf("it has printed %q", log)
		}
		return nil
	})
}

// waitForGone waits until the pod is removed.
func (c pods) waitForGone(t *testing.T, name string) {
	t.Helper()
	c.Wait(t, podLimit, "the end of pod "+name, func(ctx context.Context) error {
		_, err := c.Client.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(err, errors.New("it is still there"))
	})
}

// runs reports whether this machine has a process with this word in its command line.
func runs(word string) bool {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is correct
	return slices.ContainsFunc(all, func(path string) bool {
		text, err := os.ReadFile(path)
		return err == nil && bytes.Contains(text, []byte(word)) // an error: the process has ended meanwhile
	})
}

// checkState compares how a container ended.
func checkState(t *testing.T, is *corev1.ContainerStateTerminated, code int32, reason, message string) {
	t.Helper()
	if is.ExitCode != code || is.Reason != reason || !strings.Contains(is.Message, message) {
		t.Errorf("the container ended with code %d, reason %q and message %q, want %d, %q and %q",
			is.ExitCode, is.Reason, is.Message, code, reason, message)
	}
}

func testContainerGetsWhatItsPodSays(t *testing.T, c pods) {
	c.Apply(t, "default", []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: greeting}\ndata: {word: hello, file: content}\n"))
	c.start(t, "says", `
  hostname: box
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c]
      args:
        - |
          echo "$NAME $COLOR $CPUS $WORD $EXPANDED $(hostname) $(cat /config/file) $(stat -f -c %b*%S /dev/shm) $(pwd) $$$$"
          touch /config/new || echo "config is read-only"
          echo "last words" > /dev/termination-log
          exit 7
      workingDir: /usr
      env:
        - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: COLOR, valueFrom: {fieldRef: {fieldPath: "metadata.labels['color']"}}}
        - {name: CPUS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
        - {name: WORD, valueFrom: {configMapKeyRef: {name: greeting, key: word}}}
        - {name: EXPANDED, value: "$(WORD)-world"}
      resources: {limits: {cpu: "3", memory: 1Gi}}
      volumeMounts:
        - {name: config, mountPath: /config}
        - {name: memory, mountPath: /dev/shm}
  volumes:
    - {name: config, configMap: {name: greeting}}
    - {name: memory, emptyDir: {medium: Memory, sizeLimit: 16Mi}}
`)
	pod, ended := c.waitForEnd(t, "says", corev1.PodFailed)
	checkState(t, ended, 7, "Error", "last words")
	const want = "says blue 3 hello hello-world box content 4096*4096 /usr 1\n"
	if log := c.PodLog(t, pod, "main"); !strings.HasPrefix(log, want) || !strings.Contains(log, "config is read-only") {
		t.Errorf("the container says %q, want %q and that its config is read-only", log, want)
	}
}

func testInitContainerFillsAVolume(t *testing.T, c pods) {
	c.start(t, "init", `
  initContainers:
    - name: first
      image: none
      command: [/bin/sh, -c, echo one > /data/file]
      volumeMounts: [{name: data, mountPath: /data}]
    - name: second
      image: none
      command: [/bin/sh, -c, echo two >> /data/file]
      volumeMounts: [{name: data, mountPath: /data, subPath: .}]
  containers:
    - name: main
      image: none
      command: [/bin/cat, /data/file]
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
  volumes: [{name: data, emptyDir: {}}]
`)
	pod, ended := c.waitForEnd(t, "init", corev1.PodSucceeded)
	checkState(t, ended, 0, "Completed", "")
	if log := c.PodLog(t, pod, "main"); log != "one\ntwo\n" {
		t.Errorf("the main container finds %q, want the lines of both init containers", log)
	}
}

func testUserHasNoRights(t *testing.T, c pods) {
	c.start(t, "user", `
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c, "id -u; grep -E 'CapBnd|NoNewPrivs' /proc/self/status; touch /file || exit 5"]
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        runAsUser: 1234
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN]}
`)
	_, ended := c.waitForEnd(t, "user", corev1.PodFailed)
	checkState(t, ended, 5, "Error", "1234\nCapBnd:\t0000000000000001\nNoNewPrivs:\t1\n")
}

func testLivenessKills(t *testing.T, c pods) {
	c.start(t, "liveness", `
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c, "trap '' TERM; while :; do /bin/sleep 1; done"]
      ports: [{name: web, containerPort: 9}]
      livenessProbe: {httpGet: {path: /healthz, port: web}, periodSeconds: 1, failureThreshold: 2}
`)
	_, ended := c.waitForEnd(t, "liveness", corev1.PodFailed)
	checkState(t, ended, 137, "Error", "")
	events := c.Kubectl(t, "events", "--for", "pod/liveness")
	for _, want := range []string{"Liveness probe failed: ", "Container main failed liveness probe"} {
		if !strings.Contains(events, want) {
			t.Errorf("the events of the pod lack %q:\n%s", want, events)
		}
	}
}

func testReadiness(t *testing.T, c pods) {
	c.start(t, "readiness", `
  containers:
    - name: main
      image: tuner
      args: [sim, serve, example/small-fast, --sim-profile=small-fast, --host=0.0.0.0, --port=18765]
      startupProbe: {httpGet: {path: /health, port: 18765}, periodSeconds: 1, failureThreshold: 60}
      readinessProbe: {httpGet: {path: /health, port: 18765}, periodSeconds: 1}
      livenessProbe: {tcpSocket: {port: 18765}, periodSeconds: 1}
`)
	c.wait(t, "readiness", "to have begun", func(p *corev1.Pod) bool {
		if p.Status.Phase == corev1.PodRunning && !*p.Status.ContainerStatuses[0].Started && p.Status.ContainerStatuses[0].Ready {
			t.Error("the container is ready before it has started")
		}
		return p.Status.ContainerStatuses != nil && *p.Status.ContainerStatuses[0].Started
	})
	c.Kubectl(t, "wait", "--for=condition=Ready", "--timeout=60s", "pod/readiness")
	c.Kubectl(t, "delete", "pod", "readiness", "--timeout=60s")
}

func testRestart(t *testing.T, c pods) {
	c.start(t, "restart", `
  restartPolicy: OnFailure
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c, "echo start; test -e /data/file || { touch /data/file; exit 3; }"]
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, emptyDir: {}}]
`)
	pod, ended := c.waitForEnd(t, "restart", corev1.PodSucceeded)
	checkState(t, ended, 0, "Completed", "")
	s := pod.Status.ContainerStatuses[0]
	if s.RestartCount != 1 || s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.ExitCode != 3 {
		t.Errorf("the container has %d restarts after %+v, want 1 after code 3", s.RestartCount, s.LastTerminationState)
	}
	if log := c.PodLog(t, pod, "main"); log != "start\nstart\n" {
		t.Errorf("the log of both starts is %q", log)
	}
}

func testGracePeriod(t *testing.T, c pods) {
	// The word in the command line tells the processes from all others.
	c.start(t, "grace", `
  terminationGracePeriodSeconds: 2
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c, "trap 'echo got TERM' TERM; /bin/sh -c 'while :; do sleep 1; done' grace-child & echo ready; while :; do wait; done"]
`)
	pod := c.waitForRunning(t, "grace")
	c.waitForLog(t, pod, "ready")
	begin := time.Now()
	c.Kubectl(t, "delete", "pod", "grace", "--timeout=60s")
	if took := time.Since(begin); took < 2*time.Second {
		t.Errorf("the pod was gone after %v, want the grace period of 2 s", took)
	}
	if log := c.PodLog(t, pod, "main"); !strings.Contains(log, "got TERM") {
		t.Errorf("the container says %q, so it got no SIGTERM", log)
	}
	if runs("grace-child") {
		t.Error("a process of the container is left")
	}
}

func testShorterGracePeriod(t *testing.T, c pods) {
	c.start(t, "shorter", `
  terminationGracePeriodSeconds: 600
  containers:
    - {name: main, image: none, command: [/bin/sh, -c, "trap '' TERM; while :; do sleep 1; done"]}
`)
	c.waitForRunning(t, "shorter")
	c.Kubectl(t, "delete", "pod", "shorter", "--wait=false")
	c.Kubectl(t, "delete", "pod", "shorter", "--grace-period=1", "--timeout=60s")
}

func testDeadline(t *testing.T, c pods) {
	c.start(t, "deadline", `
  activeDeadlineSeconds: 5
  containers:
    - {name: main, image: none, command: [/bin/sh, -c, "trap 'exit 0' TERM; while :; do sleep 0.1; done"]}
`)
	pod, ended := c.waitForEnd(t, "deadline", corev1.PodFailed)
	checkState(t, ended, 0, "Completed", "")
	if pod.Status.Reason != "DeadlineExceeded" {
		t.Errorf("the pod failed because of %q, want its deadline", pod.Status.Reason)
	}
}

func testWaitsForConfigMap(t *testing.T, c pods) {
	c.start(t, "late", `
  containers:
    - name: main
      image: none
      command: [/bin/cat, /config/a/b]
      volumeMounts: [{name: config, mountPath: /config}]
  volumes: [{name: config, configMap: {name: late, items: [{key: word, path: a/b}]}}]
`)
	c.Wait(t, podLimit, "an event that says what is missing", func(context.Context) error {
		if events := c.Kubectl(t, "events", "--for", "pod/late"); !strings.Contains(events, `configmaps "late" not found`) {
			return fmt.Errorf("the events are\n%s", events)
		}
		return nil
	})
	c.Apply(t, "default", []byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: late}\ndata: {word: hello}\n"))
	pod, _ := c.waitForEnd(t, "late", corev1.PodSucceeded)
	if log := c.PodLog(t, pod, "main"); log != "hello" {
		t.Errorf("the file has %q", log)
	}
}

func testToken(t *testing.T, c pods) {
	c.start(t, "token", `
  containers:
    - name: main
      image: none
      command: [/kubernetes, kubectl, auth, whoami, -o, "jsonpath={.status.userInfo.username}"]
      volumeMounts: [{name: program, mountPath: /kubernetes}]
  volumes: [{name: program, hostPath: {path: `+c.ControlPlane+`, type: File}}]
`)
	pod, _ := c.waitForEnd(t, "token", corev1.PodSucceeded)
	if log := c.PodLog(t, pod, "main"); log != "system:serviceaccount:default:default" {
		t.Errorf("to the API server, the pod is %q", log)
	}
}

func testSharedVolume(t *testing.T, c pods) {
	c.Apply(t, "default", []byte(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: shared}
spec:
  capacity: {storage: 1Gi}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  nfs: {server: nfs.test, path: /any}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: shared}
spec: {accessModes: [ReadWriteMany], storageClassName: "", volumeName: shared, resources: {requests: {storage: 1Gi}}}
`))
	for name, args := range map[string]string{"writer": "nodeName: node-1", "reader": "nodeName: node-2"} {
		script := "echo shared > /data/file"
		if name == "reader" {
			script = "until test -s /data/file; do sleep 0.1; done; cat /data/file; touch /data/new || echo read-only"
		}
		c.start(t, name, fmt.Sprintf(`
  %s
  containers:
    - {name: main, image: none, command: [/bin/sh, -c, %q], volumeMounts: [{name: data, mountPath: /data}]}
  volumes: [{name: data, persistentVolumeClaim: {claimName: shared, readOnly: %v}}]
`, args, script, name == "reader"))
	}
	pod, _ := c.waitForEnd(t, "reader", corev1.PodSucceeded)
	if log := c.PodLog(t, pod, "main"); !strings.HasPrefix(log, "shared\n") || !strings.HasSuffix(log, "read-only\n") {
		t.Errorf("the reader says %q", log)
	}
}

func testNoSuchCommand(t *testing.T, c pods) {
	c.start(t, "no-command", "  containers: [{name: main, image: none, command: [no-such-program]}]\n")
	_, ended := c.waitForEnd(t, "no-command", corev1.PodFailed)
	checkState(t, ended, 128, "StartError", `"no-such-program": executable file not found in $PATH`)
}

func testLogsAndExec(t *testing.T, c pods) {
	c.start(t, "logs", `
  containers:
    - name: main
      image: none
      command: [/bin/sh, -c, "echo one; echo two; until test -e /done; do sleep 0.1; done; echo three"]
      securityContext: {capabilities: {drop: [ALL]}}
`)
	pod := c.waitForRunning(t, "logs")
	c.waitForLog(t, pod, "two")
	if last := c.Kubectl(t, "logs", "logs", "--tail=1"); last != "two\n" {
		t.Errorf("the last line of the log is %q", last)
	}
	const script = "read line; echo $line in $(hostname) of $(cat /proc/1/comm); grep CapBnd /proc/self/status; exit 5"
	stdout, stderr, err := c.TryKubectl(t.Context(), []byte("hello\n"), "exec", "-i", "logs", "--", "sh", "-c", script)
	if want := "hello in logs of sh\nCapBnd:\t0000000000000000\n"; stdout != want || err == nil || !strings.Contains(stderr, "exit code 5") {
		t.Errorf("kubectl exec prints %q and %q and ends with %v, want %q and code 5", stdout, stderr, err, want)
	}
	c.Kubectl(t, "exec", "logs", "--", "touch", "/done")
	if all := c.Kubectl(t, "logs", "--follow", "logs"); all != "one\ntwo\nthree\n" {
		t.Errorf("the log is %q", all)
	}
}

func testUnsupported(t *testing.T, c pods) {
	c.start(t, "unsupported", `
  containers:
    - {name: main, image: none, command: [/bin/true], livenessProbe: {exec: {command: [/bin/true]}}}
`)
	pod, _ := c.waitForEnd(t, "unsupported", corev1.PodFailed)
	if want := "probes by exec or gRPC"; !strings.Contains(pod.Status.Message, want) {
		t.Errorf("the pod failed with %q, want %q", pod.Status.Message, want)
	}
}
