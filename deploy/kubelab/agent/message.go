package agent

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"

	"vllmtuner/deploy/kubelab/container"
)

// These are the kubelet's limits for what a container says at its end.
const (
	maxMessage     = 4096
	maxLogBytes    = 2048
	maxLogLines    = 80
	defaultMessage = "/dev/termination-log"
)

// message returns what the container said at its end: in its message file, or, if the pod allows it, in its log.
func (w *worker) message(pod *corev1.Pod, c *corev1.Container, attempt int, exit container.Exit) string {
	text, err := tail(filepath.Join(w.attemptDir(c.Name, attempt), container.MessageFile), maxMessage)
	if err == nil && len(text) == 0 && exit.Code != 0 && c.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError {
		if text, err = tail(logFile(w.Agent, pod, c.Name, attempt), maxLogBytes); err == nil {
			text = lastLines(text, maxLogLines)
		}
	}
	if err != nil {
		return "Error reading termination message: " + err.Error()
	}
	return cmp.Or(string(text), exit.Message)
}

// tail returns the last bytes of a file.
func tail(path string, limit int64) (text []byte, err error) {
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // the container never ran
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(file, max(0, info.Size()-limit), limit))
}

// lastLines returns the last lines of a text. The newline at its end begins no line.
func lastLines(text []byte, limit int) []byte {
	lines := bytes.SplitAfter(text, []byte("\n"))
	if len(lines[len(lines)-1]) == 0 {
		lines = lines[:len(lines)-1]
	}
	return bytes.Join(lines[max(0, len(lines)-limit):], nil)
}
