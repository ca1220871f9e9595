package kubelab

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// kubernetesVersion is the version that the programs report, that of k8s.io/kubernetes in go.mod.
const kubernetesVersion = "v1.36.3"

// Binaries are the programs of a cluster, and the tuner that runs in its pods.
type Binaries struct {
	ControlPlane string
	NodeAgent    string
	Tuner        string // static
}

// Built returns the programs. The first call builds those that are missing or old; it takes seconds with Go's build
// cache, and a quarter of an hour without. It skips the test if this machine cannot build or run them.
func Built(t testing.TB) Binaries {
	t.Helper()
	b, err := built()
	if lacks, ok := errors.AsType[*lackError](err); ok {
		t.Skip(lacks)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A lackError says what this machine lacks.
type lackError struct{ what string }

func (e *lackError) Error() string { return "this machine cannot run a cluster: " + e.what }

// built remembers the result for all tests of the process.
var built = sync.OnceValues(func() (Binaries, error) {
	// A test has a deadline of its own, and the next test needs the programs too.
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	return build(ctx)
})

// build builds what is missing or old.
func build(ctx context.Context) (_ Binaries, err error) {
	if runtime.GOOS != "linux" {
		return Binaries{}, &lackError{"it runs " + runtime.GOOS + ", not Linux"}
	}
	if os.Geteuid() != 0 {
		return Binaries{}, &lackError{"only root can mount the file trees of containers"}
	}
	dir, err := run(ctx, "", "go", "list", "-m", "-f", "{{.Dir}}", "vllmtuner/deploy/kubelab")
	if err != nil {
		return Binaries{}, err
	}
	cache, unlock, err := lockCache()
	if err != nil {
		return Binaries{}, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	// Checkouts in other directories may be at other commits, so each has programs of its own.
	own := filepath.Join(cache, digest([]byte(dir)))
	b := Binaries{NodeAgent: filepath.Join(own, "nodeagent"), Tuner: filepath.Join(own, "tuner")}
	if err := buildNodeAgent(ctx, dir, b.NodeAgent); err != nil {
		return b, err
	}
	if b.ControlPlane, err = buildControlPlane(ctx, dir, cache); err != nil {
		return b, err
	}
	if path := os.Getenv("KUBELAB_TUNER"); path != "" {
		b.Tuner = path
		return b, nil
	}
	_, err = run(ctx, dir, "make", "-C", "../..", "static", "STATIC="+b.Tuner, "VERSION=v0.0.0-kubelab")
	return b, err
}

// buildNodeAgent builds the node agent and tries whether it can make containers here.
func buildNodeAgent(ctx context.Context, dir, path string) error {
	if err := haveModules(ctx, dir, "./nodeagent"); err != nil {
		return err
	}
	if _, err := run(ctx, dir, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "./nodeagent"); err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "kubelab")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	if _, err := run(ctx, "", path, "try", scratch); err != nil {
		return &lackError{err.Error()}
	}
	return nil
}

// buildControlPlane builds the control plane, or finds it. It changes only with the files that are in its name.
func buildControlPlane(ctx context.Context, dir, cache string) (string, error) {
	text := []byte(runtime.Version())
	for _, name := range []string{"go.mod", "go.sum", "controlplane/main.go"} {
		file, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return "", err
		}
		text = append(text, file...)
	}
	path := filepath.Join(cache, "controlplane-"+digest(text))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := haveModules(ctx, dir, "./controlplane"); err != nil {
		return "", err
	}
	fmt.Fprintln(os.Stderr, "kubelab: building the control plane: a quarter of an hour without Go's build cache, half a minute with it")
	flags := "-s -w"
	for _, p := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		flags += fmt.Sprintf(" -X %[1]s.gitVersion=%[2]s -X %[1]s.gitMajor=1 -X %[1]s.gitMinor=36 -X %[1]s.gitTreeState=clean -X %[1]s.gitCommit=none",
			p, kubernetesVersion)
	}
	_, err := run(ctx, dir, "go", "build", "-trimpath", "-ldflags", flags, "-o", path, "./controlplane")
	return path, err
}

// haveModules downloads the modules of a package. Without them, the package cannot be built, which is no fault of the code.
func haveModules(ctx context.Context, dir, pkg string) error {
	if _, err := run(ctx, dir, "go", "list", "-deps", pkg); err != nil {
		return &lackError{"the Go modules of Kubernetes cannot be had: " + err.Error()}
	}
	return nil
}

// lockCache makes the directory of the programs and keeps other test processes out of it.
func lockCache() (dir string, unlock func() error, err error) {
	user, err := os.UserCacheDir()
	if err != nil {
		return "", nil, err
	}
	dir = filepath.Join(user, "tuner-kubelab")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", nil, err
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == syscall.EWOULDBLOCK {
		fmt.Fprintln(os.Stderr, "kubelab: waiting for another test that builds the programs")
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		return "", nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), file.Close())
	}
	return dir, file.Close, nil
}

// digest returns a short name for the text.
func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// run runs a program and returns what it prints. The error has its last lines.
func run(ctx context.Context, dir, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	// If make runs the test, its flags are in the environment. They are not for the make that is started here. Other flags of Go
	// would compile everything once more.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS") || strings.HasPrefix(v, "GOFLAGS=")
	})
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 10 * time.Second // a compiler that is left running would keep the pipe open
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, lastLines(stderr.Bytes(), 10))
	}
	return strings.TrimSpace(stdout.String()), nil
}

func lastLines(text []byte, limit int) []byte {
	lines := bytes.SplitAfter(bytes.TrimSpace(text), []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-limit):], nil)
}
