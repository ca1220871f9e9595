package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"runtime"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// gpu is the resource that NVIDIA's device plugin offers.
const gpu corev1.ResourceName = "nvidia.com/gpu"

// A node is the agent's node in the API, and its Lease.
type node struct {
	*Agent
	port int32 // of the server for logs and commands
	uid  types.UID
	down chan struct{} // closed when the machine shuts down

	mu    sync.Mutex // held while the status is posted, so that a heartbeat does not undo notReady
	ready corev1.NodeCondition
}

func newNode(a *Agent, port int32) *node {
	return &node{
		Agent: a, port: port, down: make(chan struct{}),
		ready: readiness(corev1.ConditionTrue, "KubeletReady", "the agent posts ready status"),
	}
}

// readiness returns the condition Ready, as it becomes now.
func readiness(status corev1.ConditionStatus, reason, message string) corev1.NodeCondition {
	return corev1.NodeCondition{
		Type: corev1.NodeReady, Status: status, Reason: reason, Message: message,
		LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
	}
}

// register makes the node, or takes over the one that an earlier life of the agent made.
func (n *node) register(ctx context.Context) error {
	labels := map[string]string{
		corev1.LabelHostname: n.Node, corev1.LabelOSStable: runtime.GOOS, corev1.LabelArchStable: runtime.GOARCH,
	}
	if n.GPUs > 0 {
		labels["nvidia.com/gpu.present"] = "true"
	}
	maps.Copy(labels, n.Labels)
	nodes := n.kube.CoreV1().Nodes()
	made, err := nodes.Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Node, Labels: labels},
		Spec:       corev1.NodeSpec{Taints: n.Taints},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		made, err = nodes.Get(ctx, n.Node, metav1.GetOptions{})
	}
	if err != nil {
		return err
	}
	n.uid = made.UID
	return n.post(ctx)
}

// post writes the node's status.
func (n *node) post(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	cpu, err := resource.ParseQuantity(n.CPU)
	if err != nil {
		return fmt.Errorf("CPU %s: %w", n.CPU, err)
	}
	memory, err := resource.ParseQuantity(n.Memory)
	if err != nil {
		return fmt.Errorf("memory %s: %w", n.Memory, err)
	}
	n.ready.LastHeartbeatTime, n.ready.LastTransitionTime = metav1.Now(), metav1.Now() // it is posted only when it changes
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	offer := corev1.ResourceList{
		corev1.ResourceCPU: cpu, corev1.ResourceMemory: memory, gpu: *resource.NewQuantity(int64(n.GPUs), resource.DecimalSI),
		corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceEphemeralStorage: resource.MustParse("100Gi"),
	}
	status := corev1.NodeStatus{
		Capacity: offer, Allocatable: offer,
		Conditions: []corev1.NodeCondition{n.ready},
		Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: n.ip}, {Type: corev1.NodeHostName, Address: n.Node},
			{Type: corev1.NodeInternalDNS, Address: "localhost"}, // where the API server finds the agent
		},
		DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: n.port}},
		NodeInfo: corev1.NodeSystemInfo{
			BootID: string(boot[:len(boot)-1]), KubeletVersion: "v1.36.3-kubelab", ContainerRuntimeVersion: "kubelab://1",
			OperatingSystem: runtime.GOOS, Architecture: runtime.GOARCH,
		},
	}
	body, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return err
	}
	_, err = n.kube.CoreV1().Nodes().Patch(ctx, n.Node, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status")
	return err
}

// beat renews the node's Lease until ctx ends. It begins when the agent knows its pods.
func (n *node) beat(ctx context.Context, known <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return nil
	case <-known:
	}
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		if err := n.renew(ctx); err != nil && ctx.Err() == nil {
			n.Log.Error("heartbeat", "error", err) // the next one may succeed
		}
		select {
		case <-ctx.Done():
			return nil
		case <-n.down:
			return nil
		case <-ticker.C:
		}
	}
}

// renew renews the Lease. It posts the status again if the control plane has given the node up meanwhile.
func (n *node) renew(ctx context.Context) error {
	leases := n.kube.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	spec := coordinationv1.LeaseSpec{HolderIdentity: &n.Node, LeaseDurationSeconds: new(int32(40)), RenewTime: new(metav1.NowMicro())}
	lease, err := leases.Get(ctx, n.Node, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: n.Node, UID: n.uid}
		_, err = leases.Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: n.Node, OwnerReferences: []metav1.OwnerReference{owner}}, Spec: spec,
		}, metav1.CreateOptions{})
	case err == nil:
		lease.Spec = spec
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	}
	if err != nil {
		return err
	}
	node, err := n.kube.CoreV1().Nodes().Get(ctx, n.Node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown {
			return n.post(ctx)
		}
	}
	return nil
}

// notReady ends the heartbeats and says why.
func (n *node) notReady(ctx context.Context, message string) error {
	close(n.down)
	n.mu.Lock()
	n.ready = readiness(corev1.ConditionFalse, "KubeletNotReady", message)
	n.mu.Unlock()
	return n.post(ctx)
}
