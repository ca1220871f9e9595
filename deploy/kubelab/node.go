package kubelab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"vllmtuner/deploy/kubelab/machine"
)

// NodeOptions say what a node is like. The zero value is a node with 64 CPUs and 512 GiB, whatever this machine has.
type NodeOptions struct {
	Labels        map[string]string
	Taints        []string // as in kubectl: key=value:effect
	CPU, Memory   string
	Images        map[string]Image // by name, with or without the tag; any other image has the files of this machine
	Isolated      bool             // each pod has a network of its own with only loopback; else pods share this machine's ports
	ShutdownGrace time.Duration    // the longest grace period of a pod in Shutdown; 0 means 30 s
}

// A Node is a machine of the cluster with its node agent. Both are processes of this machine.
type Node struct {
	Name string

	cluster *Cluster
	dir     string
	args    []string // of the agent

	mu      sync.Mutex // held while an order is given
	machine *exec.Cmd  // nil while the power is off
	orders  *os.File
	answers *json.Decoder
	closing *os.File // the other end of answers
}

// nodeLimit is how long a node may take until it is ready.
const nodeLimit = time.Minute

// AddNode starts a node with a number of GPUs and waits until it is ready.
func (c *Cluster) AddNode(t testing.TB, name string, gpus int, o NodeOptions) *Node {
	t.Helper()
	n := &Node{Name: name, cluster: c, dir: filepath.Join(c.dir, "nodes", name)}
	n.args = append([]string{"agent", "-kubeconfig", c.Kubeconfig, "-node", name, "-gpus", strconv.Itoa(gpus),
		"-dir", n.dir, "-logs", filepath.Join(n.logs(), "logs"), "-volumes", c.Volumes}, o.flags()...)
	if err := errors.Join(os.MkdirAll(n.dir, 0o755), os.MkdirAll(n.logs(), 0o755)); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.nodes[name] = n
	c.mu.Unlock()
	n.Boot(t)
	return n
}

// flags are the options in the words of the agent's command.
func (o NodeOptions) flags() []string {
	flags := []string{"-isolated=" + strconv.FormatBool(o.Isolated)}
	for key, value := range o.Labels {
		flags = append(flags, "-label", key+"="+value)
	}
	for _, taint := range o.Taints {
		flags = append(flags, "-taint", taint)
	}
	for name, image := range o.Images {
		flags = append(flags, "-image", name+"="+string(image))
	}
	if o.CPU != "" {
		flags = append(flags, "-cpu", o.CPU)
	}
	if o.Memory != "" {
		flags = append(flags, "-memory", o.Memory)
	}
	if o.ShutdownGrace > 0 {
		flags = append(flags, "-shutdown-grace", o.ShutdownGrace.String())
	}
	return flags
}

// logs is where the node writes its log and those of its containers.
func (n *Node) logs() string { return filepath.Join(n.cluster.Logs, n.Name) }

// Boot starts the machine after AddNode or PowerOff, and waits until the node is ready.
func (n *Node) Boot(t testing.TB) {
	t.Helper()
	if err := n.boot(); err != nil {
		t.Fatalf("boot node %s: %v", n.Name, err)
	}
	n.startAgent(t)
}

func (n *Node) boot() (err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine != nil {
		return errors.New("it runs already")
	}
	log, err := os.OpenFile(filepath.Join(n.logs(), "machine.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	in, orders, err := os.Pipe()
	if err != nil {
		return err
	}
	defer in.Close()
	answers, out, err := os.Pipe()
	if err != nil {
		return errors.Join(err, orders.Close())
	}
	defer out.Close()
	cmd := exec.Command(n.cluster.NodeAgent, "machine")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, orders.Close(), answers.Close())
	}
	n.machine, n.orders, n.answers, n.closing = cmd, orders, json.NewDecoder(answers), answers
	return nil
}

// order gives the machine an order and waits until it has followed it.
func (n *Node) order(t testing.TB, o machine.Order) {
	t.Helper()
	if err := n.tryOrder(o); err != nil {
		t.Fatal(err)
	}
}

func (n *Node) tryOrder(o machine.Order) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine == nil {
		return fmt.Errorf("node %s has no power", n.Name)
	}
	var a machine.Answer
	err := errors.Join(json.NewEncoder(n.orders).Encode(o), n.closing.SetReadDeadline(time.Now().Add(orderLimit)))
	if err == nil {
		err = n.answers.Decode(&a)
	}
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	if err != nil {
		return fmt.Errorf("order %+v to node %s: %w", o, n.Name, err)
	}
	return nil
}

// orderLimit is the longest time for an order. A Shutdown waits for the grace period of the pods.
const orderLimit = 15 * time.Minute

// startAgent starts the agent and waits for its first heartbeat, which comes when the agent knows its pods.
func (n *Node) startAgent(t testing.TB) {
	t.Helper()
	before := time.Now()
	n.order(t, machine.Order{Start: n.args, Log: filepath.Join(n.logs(), "agent.log")})
	n.cluster.Wait(t, nodeLimit, "a heartbeat of node "+n.Name, func(ctx context.Context) error {
		lease, err := n.cluster.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if lease.Spec.RenewTime.Before(&metav1.MicroTime{Time: before}) {
			return fmt.Errorf("the last one was at %v", lease.Spec.RenewTime)
		}
		return nil
	})
	n.cluster.Wait(t, nodeLimit, "node "+n.Name+" to be ready", func(ctx context.Context) error {
		node, err := n.cluster.Client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("its conditions are %+v", node.Status.Conditions)
	})
}

// Kill kills the agent. The containers go on, as those of a killed kubelet do.
func (n *Node) Kill(t testing.TB) {
	t.Helper()
	n.order(t, machine.Order{Signal: syscall.SIGKILL, To: machine.ToAgent})
}

// Restart starts the agent again after Kill. It finds the containers that run.
func (n *Node) Restart(t testing.TB) {
	t.Helper()
	n.startAgent(t)
}

// Freeze stops the agent, but not the containers, until Thaw. The control plane then loses the node.
func (n *Node) Freeze(t testing.TB) {
	t.Helper()
	n.order(t, machine.Order{Signal: syscall.SIGSTOP, To: machine.ToAgent})
}

// Thaw ends Freeze.
func (n *Node) Thaw(t testing.TB) {
	t.Helper()
	n.order(t, machine.Order{Signal: syscall.SIGCONT, To: machine.ToAgent})
}

// FreezeAll stops the agent and all processes of all containers until ThawAll, as when a virtual machine is paused.
func (n *Node) FreezeAll(t testing.TB) {
	t.Helper()
	n.order(t, machine.Order{Signal: syscall.SIGSTOP, To: machine.ToAll})
}

// ThawAll ends FreezeAll.
func (n *Node) ThawAll(t testing.TB) {
	t.Helper()
	n.order(t, machine.Order{Signal: syscall.SIGCONT, To: machine.ToAll})
}

// Signal sends a signal to the first process of a pod's container.
func (n *Node) Signal(t testing.TB, pod *corev1.Pod, container string, s syscall.Signal) {
	t.Helper()
	if err := n.TrySignal(pod, container, s); err != nil {
		t.Fatal(err)
	}
}

// TrySignal is Signal for a container that may not have started.
func (n *Node) TrySignal(pod *corev1.Pod, container string, s syscall.Signal) error {
	dir := filepath.Join(n.dir, "pods", string(pod.UID), "containers", container)
	starts, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("node %s has started no container %s of pod %s: %w", n.Name, container, pod.Name, err)
	}
	last := filepath.Join(dir, strconv.Itoa(len(starts)-1))
	return n.tryOrder(machine.Order{Signal: s, To: machine.ToContainer, Container: last})
}

// Shutdown shuts the machine down as a kubelet does: pods end within the grace period and are marked as disrupted. Then
// the power is off.
func (n *Node) Shutdown(t testing.TB) {
	t.Helper()
	n.order(t, machine.Order{Signal: syscall.SIGPWR, To: machine.ToAgent})
	n.powerOff()
}

// PowerOff ends the agent and all containers at once, and nobody reports it.
func (n *Node) PowerOff(t testing.TB) {
	t.Helper()
	n.powerOff()
}

func (n *Node) powerOff() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.machine == nil {
		return
	}
	_ = n.machine.Process.Kill() // the kernel ends all processes of its namespace with it
	_ = n.machine.Wait()         // we killed it, so its status says nothing
	_ = n.orders.Close()         // nobody reads the orders
	_ = n.closing.Close()        // everything worth reading has been read
	n.machine = nil
}
