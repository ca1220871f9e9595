package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"vllmtuner/deploy/kubelab/container"
)

// A server answers the API server's requests for logs and commands: kubectl logs and kubectl exec. It listens on
// loopback only, because it asks nobody for credentials.
type server struct {
	pods     *pods
	listener net.Listener
}

func newServer(p *pods) (*server, error) {
	certificate, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("make the certificate of the agent: %w", err)
	}
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}})
	if err != nil {
		return nil, err
	}
	return &server{p, listener}, nil
}

// selfSigned makes a certificate. The API server does not check it.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour), DNSNames: []string{"localhost"}}
	text, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	return tls.Certificate{Certificate: [][]byte{text}, PrivateKey: key}, err
}

func (s *server) port() int32 { return int32(s.listener.Addr().(*net.TCPAddr).Port) }

// run serves until ctx ends.
func (s *server) run(ctx context.Context) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /containerLogs/{namespace}/{pod}/{container}", s.logs)
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", s.exec)
	web := &http.Server{
		Handler: mux, ReadHeaderTimeout: time.Minute, BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog: slog.NewLogLogger(s.pods.Log.Handler(), slog.LevelError),
	}
	stop := context.AfterFunc(ctx, func() { _ = web.Close() }) // there is nothing to save
	defer stop()
	if err := web.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve logs and commands: %w", err)
	}
	return nil
}

// find returns the worker of the pod that a request names, and answers the request if there is none.
func (s *server) find(w http.ResponseWriter, r *http.Request) *worker {
	s.pods.mu.Lock()
	defer s.pods.mu.Unlock()
	for _, worker := range s.pods.workers {
		if pod := worker.newest(); pod.Namespace == r.PathValue("namespace") && pod.Name == r.PathValue("pod") {
			return worker
		}
	}
	http.Error(w, fmt.Sprintf("pod %q does not exist", r.PathValue("pod")), http.StatusNotFound)
	return nil
}

// logs writes the output of a container, and, if asked, follows it until the container ends.
func (s *server) logs(w http.ResponseWriter, r *http.Request) {
	worker, name := s.find(w, r), r.PathValue("container")
	if worker == nil {
		return
	}
	query := r.URL.Query()
	for _, option := range []string{"sinceSeconds", "sinceTime", "timestamps", "limitBytes"} {
		if query.Has(option) {
			http.Error(w, "kubelab does not support "+option, http.StatusBadRequest)
			return
		}
	}
	attempt, _ := worker.status.attempt(name)
	if query.Get("previous") == "true" {
		attempt--
	}
	file, err := os.Open(logFile(worker.Agent, worker.newest(), name, attempt))
	if err != nil {
		http.Error(w, fmt.Sprintf("container %q has no log of start %d", name, attempt), http.StatusBadRequest)
		return
	}
	defer file.Close()
	if lines, err := strconv.Atoi(query.Get("tailLines")); err == nil {
		err = seekLines(file, lines)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
	}
	worker.copyLog(r.Context(), w, file, name, attempt, query.Get("follow") == "true")
}

// copyLog writes the log to the answer. The client is gone if a write fails, so there is nobody to tell.
func (w *worker) copyLog(ctx context.Context, answer http.ResponseWriter, file *os.File, name string, attempt int, follow bool) {
	for {
		// The container may end after the copy. So this question comes first.
		now, running := w.status.attempt(name)
		if _, err := io.Copy(answer, file); err != nil || !follow || !running || now != attempt {
			return
		}
		if err := http.NewResponseController(answer).Flush(); err != nil || !pause(ctx, 100*time.Millisecond) {
			return
		}
	}
}

// seekLines moves to the last lines of a file.
func seekLines(file *os.File, lines int) error {
	text, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	_, err = file.Seek(int64(len(text)-len(lastLines(text, lines))), io.SeekStart)
	return err
}

// exec runs a command in a container.
func (s *server) exec(w http.ResponseWriter, r *http.Request) {
	worker := s.find(w, r)
	if worker == nil {
		return
	}
	options, err := remotecommand.NewOptions(r)
	if err == nil && options.TTY {
		err = errors.New("kubelab has no terminals: use kubectl exec without -t")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	remotecommand.ServeExec(w, r, executor{worker}, r.PathValue("pod"), "", r.PathValue("container"), r.URL.Query()["command"], options,
		4*time.Hour, remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
}

// An executor runs commands in the containers of a pod.
type executor struct{ *worker }

// ExecInContainer runs one command.
func (e executor) ExecInContainer(ctx context.Context, _, _, name string, args []string, in io.Reader, out, errs io.WriteCloser,
	_ bool, _ <-chan remotecommand.TerminalSize, _ time.Duration) error {
	attempt, running := e.status.attempt(name)
	if !running {
		return fmt.Errorf("container %s does not run", name)
	}
	err := container.Exec(ctx, e.attemptDir(name, attempt), args, in, out, errs)
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return utilexec.CodeExitError{Err: err, Code: exit.ExitCode()}
	}
	return err
}

// attempt returns the number of a container's newest start, and whether it runs.
func (s *status) attempt(name string) (number int, running bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, list := range [][]corev1.ContainerStatus{s.s.InitContainerStatuses, s.s.ContainerStatuses} {
		for _, c := range list {
			if c.Name == name {
				return int(c.RestartCount), c.State.Running != nil
			}
		}
	}
	return 0, false
}
