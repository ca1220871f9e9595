// Package agent is the node agent of a machine: it registers a node with GPUs and runs the pods of that node as processes
// of the machine. Through the API it shows what a kubelet shows. It never decides where a pod runs.
//
// README.md lists what it leaves out of a kubelet's work. It rejects a pod that needs any of that.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
)

// An Agent runs the pods of one node. Its fields must not change after Run has begun.
type Agent struct {
	Node     string            // name of the node
	GPUs     int               // number of nvidia.com/gpu that the node offers
	CPU      string            // what the node says it has, whatever the machine has
	Memory   string            // likewise
	Labels   map[string]string // labels of the node, besides those that every node has
	Taints   []corev1.Taint
	Images   map[string]Image // by name, with or without the tag; any other image has the files of this machine
	Isolated bool             // each pod has a network of its own with only loopback; else it has the machine's network

	Dir     string // files of this node; they must survive the agent
	Logs    string // the output of the containers; it outlives their pods
	Volumes string // directory with one directory for each PersistentVolume; nodes share it as they would share NFS

	ShutdownGrace time.Duration // the longest grace period of a pod when the machine shuts down
	Log           *slog.Logger

	kube   kubernetes.Interface
	events record.EventRecorder
	ip     string // address of the node and of its pods
	api    *url.URL
}

// heartbeat is the time between two signs of life. A kubelet takes 10 s; the tests of a lost node are shorter with 2 s.
const heartbeat = 2 * time.Second

// errShutdown ends an agent whose machine shuts down.
var errShutdown = errors.New("the machine shuts down")

// Run registers the node and runs its pods until ctx ends. Then the containers go on, and the next agent on this
// machine finds them. If shutdown delivers a signal, the agent first ends all pods, as the kubelet does when its machine
// shuts down.
func (a *Agent) Run(ctx context.Context, config *rest.Config, shutdown <-chan os.Signal) error {
	if err := a.connect(config); err != nil {
		return err
	}
	for _, dir := range []string{a.Volumes, a.podsDir(), a.Logs} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	broadcaster := record.NewBroadcaster()
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(eventSink(a.kube))
	a.events = broadcaster.NewRecorder(eventScheme, corev1.EventSource{Component: "kubelet", Host: a.Node})

	pods := newPods(a)
	server, err := newServer(pods)
	if err != nil {
		return err
	}
	n := newNode(a, server.port())
	if err := n.register(ctx); err != nil {
		return errors.Join(fmt.Errorf("register node %s: %w", a.Node, err), server.listener.Close())
	}
	a.Log.Info("registered", "node", a.Node, "ip", a.ip)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.run(ctx) })
	group.Go(func() error { return pods.run(ctx) })
	group.Go(func() error { return n.beat(ctx, pods.known) })
	group.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-shutdown:
			return a.shutDown(ctx, n, pods)
		}
	})
	if err := group.Wait(); err != nil && !errors.Is(err, errShutdown) {
		return err
	}
	return nil
}

// connect makes the client, and finds the addresses of the API server and of this machine.
func (a *Agent) connect(config *rest.Config) (err error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 50, 100 // what a kubelet has
	config.UserAgent = "kubelab-agent"
	if a.kube, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if a.api, _, err = rest.DefaultServerUrlFor(config); err != nil {
		return err
	}
	a.ip, err = address()
	return err
}

// shutDown ends all pods, and lets no new one begin.
func (a *Agent) shutDown(ctx context.Context, n *node, pods *pods) error {
	a.Log.Info("the machine shuts down")
	if err := n.notReady(ctx, "node is shutting down"); err != nil {
		a.Log.Error("report the shutdown", "error", err) // the pods must end all the same
	}
	if err := pods.shutDown(ctx); err != nil {
		return err
	}
	return errShutdown
}

func (a *Agent) podsDir() string { return filepath.Join(a.Dir, "pods") }

// address returns an address of this machine. Endpoints may not be on loopback, so that comes last.
func address() (string, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("find an address of this machine: %w", err)
	}
	for _, a := range all {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() && ip.IP.To4() != nil {
			return ip.IP.String(), nil
		}
	}
	return "127.0.0.1", nil
}
