// Package kubelab runs Kubernetes clusters for tests: a real control plane, and nodes whose pods are real processes of
// this machine. It never touches a cluster that it has not started.
//
// README.md says what a node does as a kubelet does, and what it leaves out.
package kubelab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
)

// A Cluster is a control plane and its nodes. Its methods may be called at the same time.
type Cluster struct {
	Binaries
	Client     *kubernetes.Clientset
	Config     *rest.Config // of an administrator
	Kubeconfig string       // file with the same
	Volumes    string       // has a directory for each PersistentVolume, with the volume's name
	Logs       string       // has a file for each program

	dir       string
	processes []*process
	mu        sync.Mutex
	nodes     map[string]*Node
}

// controllers are those of the controller manager that a Job, a Deployment or a drain needs. The others would take memory
// and time.
var controllers = []string{
	"cronjob-controller", "deployment-controller", "disruption-controller", "endpointslice-controller", "garbage-collector-controller",
	"horizontal-pod-autoscaler-controller", "job-controller", "namespace-controller", "node-lifecycle-controller",
	"persistentvolume-binder-controller", "pod-garbage-collector-controller", "replicaset-controller",
	"root-ca-certificate-publisher-controller", "service-cidr-controller", "serviceaccount-controller", "statefulset-controller",
	"taint-eviction-controller", "ttl-after-finished-controller",
}

// startLimit is how long the control plane may take to start: 4 s on two idle cores, ten times as long on busy ones.
const startLimit = 2 * time.Minute

// Start starts a cluster without nodes. It ends with the test; if the test fails, the last lines of the logs are shown.
func Start(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{Binaries: Built(t), dir: t.TempDir(), nodes: map[string]*Node{}}
	c.Volumes, c.Logs = filepath.Join(c.dir, "volumes"), t.ArtifactDir()
	t.Cleanup(func() {
		if t.Failed() {
			c.showState(t)
		}
		c.stop()
		if t.Failed() {
			c.showLogs(t)
		}
	})
	if err := c.start(t.Context()); err != nil {
		t.Fatalf("start a cluster: %v", err)
	}
	return c
}

// start starts the programs in their order.
func (c *Cluster) start(ctx context.Context) error {
	if err := os.MkdirAll(c.Volumes, 0o755); err != nil {
		return err
	}
	ports, release, err := reservePorts(3)
	if err != nil {
		return err
	}
	defer release()
	server := fmt.Sprintf("https://127.0.0.1:%d", ports[2])
	if err := c.writeCredentials(server); err != nil {
		return err
	}
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", ports[0]), fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	if err := c.run("etcd", "--data-dir", c.file("etcd"), "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer,
		"--socket-reuse-port", "--unsafe-no-fsync", "--log-level", "warn"); err != nil {
		return err
	}
	if err := c.run("kube-apiserver", "--etcd-servers", client, "--secure-port", fmt.Sprint(ports[2]), "--permit-port-sharing",
		"--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--external-hostname", "127.0.0.1", "--endpoint-reconciler-type", "none",
		"--tls-cert-file", c.file("server.crt"), "--tls-private-key-file", c.file("server.key"), "--cert-dir", c.dir,
		"--token-auth-file", c.file("tokens.csv"), "--authorization-mode", "RBAC", "--service-account-issuer", "https://kubernetes.default.svc",
		"--service-account-key-file", c.file("accounts.key"), "--service-account-signing-key-file", c.file("accounts.key"),
		"--service-cluster-ip-range", "10.96.0.0/24", "--allow-privileged", "--enable-priority-and-fairness=false",
		"--kubelet-preferred-address-types", "InternalDNS"); err != nil {
		return err
	}
	err = c.await(ctx, startLimit, "the API server to be ready", func(ctx context.Context) error {
		return c.Client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	if err != nil {
		return err
	}
	if err := c.run("kube-controller-manager", "--kubeconfig", c.file("controllers.kubeconfig"), "--secure-port", "0", "--leader-elect=false",
		"--use-service-account-credentials", // each controller then has the rights that it has in production
		"--service-account-private-key-file", c.file("accounts.key"), "--root-ca-file", c.file("server.crt"),
		// A lost node is noticed after 40 s in production. The nodes here beat every 2 s.
		"--node-monitor-period", "1s", "--node-monitor-grace-period", "12s",
		"--controllers", strings.Join(controllers, ",")); err != nil {
		return err
	}
	if err := c.run("kube-scheduler", "--kubeconfig", c.file("scheduler.kubeconfig"), "--secure-port", "0", "--leader-elect=false"); err != nil {
		return err
	}
	return c.await(ctx, startLimit, "the default service account", func(ctx context.Context) error {
		_, err := c.Client.CoreV1().ServiceAccounts("default").Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// run starts a program of the control plane.
func (c *Cluster) run(name string, args ...string) error {
	p, err := startProcess(c.ControlPlane, name, filepath.Join(c.Logs, name+".log"), args)
	if err != nil {
		return err
	}
	c.processes = append(c.processes, p)
	return nil
}

// writeCredentials writes the keys, the tokens and a kubeconfig for each user.
func (c *Cluster) writeCredentials(server string) error {
	certificate, key, err := cert.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{net.IPv4(127, 0, 0, 1)}, nil)
	if err != nil {
		return fmt.Errorf("make the certificate of the API server: %w", err)
	}
	accounts, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return fmt.Errorf("make the key of the service accounts: %w", err)
	}
	users := []struct{ file, name, groups string }{
		{"admin", "admin", "system:masters"},
		{"controllers", "system:kube-controller-manager", ""},
		{"scheduler", "system:kube-scheduler", ""},
	}
	var tokens strings.Builder
	for _, u := range users {
		fmt.Fprintf(&tokens, "%s-token,%s,%s,%q\n", u.file, u.name, u.file, u.groups)
	}
	for name, text := range map[string][]byte{
		"server.crt": certificate, "server.key": key, "accounts.key": accounts, "tokens.csv": []byte(tokens.String()),
	} {
		if err := os.WriteFile(c.file(name), text, 0o600); err != nil {
			return err
		}
	}
	for _, u := range users {
		config := clientcmdapi.NewConfig()
		config.Clusters["kubelab"] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: certificate}
		config.AuthInfos["kubelab"] = &clientcmdapi.AuthInfo{Token: u.file + "-token"}
		config.Contexts["kubelab"] = &clientcmdapi.Context{Cluster: "kubelab", AuthInfo: "kubelab"}
		config.CurrentContext = "kubelab"
		if err := clientcmd.WriteToFile(*config, c.file(u.file+".kubeconfig")); err != nil {
			return err
		}
	}
	c.Kubeconfig = c.file("admin.kubeconfig")
	if c.Config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig); err != nil {
		return err
	}
	c.Config.QPS = -1 // no limit: a test asks often while it waits
	c.Client, err = kubernetes.NewForConfig(c.Config)
	return err
}

func (c *Cluster) file(name string) string { return filepath.Join(c.dir, name) }

// stop ends the nodes and then the control plane, in the reverse order of their start.
func (c *Cluster) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.nodes {
		n.powerOff()
	}
	for _, p := range slices.Backward(c.processes) {
		p.stop()
	}
}

// await calls is until it returns nil. It gives up after limit, or when a program of the control plane has ended.
func (c *Cluster) await(ctx context.Context, limit time.Duration, what string, is func(context.Context) error) error {
	return await(ctx, limit, what, func(ctx context.Context) error {
		for _, p := range c.processes {
			if err := p.ended(); err != nil {
				return stopWaiting{err}
			}
		}
		return is(ctx)
	})
}

// Wait calls is, ten times a second, until it returns nil. After limit, or if a program of the control plane has ended, the
// test fails with the last error.
func (c *Cluster) Wait(t testing.TB, limit time.Duration, what string, is func(context.Context) error) {
	t.Helper()
	if err := c.await(t.Context(), limit, what, is); err != nil {
		t.Fatal(err)
	}
}

// stopWaiting is an error that does not pass.
type stopWaiting struct{ error }

func await(ctx context.Context, limit time.Duration, what string, is func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("waited %v for %s", limit, what))
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	var err error
	for {
		now := is(ctx)
		if now == nil {
			return nil
		}
		if err == nil || ctx.Err() == nil { // the end of the wait is no reason why it was in vain
			err = now
		}
		if stop, ok := errors.AsType[stopWaiting](err); ok {
			return fmt.Errorf("wait for %s: %w", what, stop.error)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// showState prints what the API server knows.
func (c *Cluster) showState(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second) // the API server may be what has failed
	defer cancel()
	state, _, err := c.TryKubectl(ctx, nil, "get", "nodes,jobs,pods,persistentvolumes,persistentvolumeclaims,events", "-A", "-o", "wide")
	t.Logf("the state of the cluster (error %v):\n%s", err, state)
}

// showLogs prints the ends of all logs.
func (c *Cluster) showLogs(t testing.TB) {
	t.Helper()
	_ = filepath.WalkDir(c.Logs, func(path string, entry os.DirEntry, err error) error { // what cannot be read is not shown
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err == nil && len(text) > 0 {
			t.Logf("end of %s:\n%s", strings.TrimPrefix(path, c.Logs+"/"), lastLines(text, 30))
		}
		return err
	})
}
