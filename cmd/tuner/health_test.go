package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
)

// Kubernetes restarts a tuner that does not answer. So it answers from its first moment, here while the server does not tell
// its flags.
func TestATunerAnswersBeforeItOwnsTheStudy(t *testing.T) {
	silent := filepath.Join(t.TempDir(), "vllm")
	must(t, os.WriteFile(silent, []byte("#!/bin/sh\nexec sleep 600\n"), 0o755))
	study, root := writeStudy(t, "command: ["+silent+"]", 1, 1), t.TempDir()
	run := launch(t, tunerCommand(t.Context(), t, "run", study, "--root", root, "--listen", "0.0.0.0:0"))
	run.waitFor(t, ", and at every other address of this machine\n")
	url := regexp.MustCompile(`http://127\.0\.0\.1:\d+`).FindString(run.String())
	for _, path := range []string{"/healthz", "/metrics"} {
		answer, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(io.Discard, answer.Body)
		must(t, err, answer.Body.Close())
		if answer.StatusCode != http.StatusOK {
			t.Errorf("%s answers %s", path, answer.Status)
		}
	}
	must(t, run.cmd.Process.Signal(syscall.SIGTERM))
	if text, code := run.end(t); code != exitInterrupted {
		t.Errorf("the run ends with %d: %s", code, text)
	}
	if _, err := os.Stat(filepath.Join(root, "small")); !os.IsNotExist(err) {
		t.Errorf("the study began before the server told its flags (%v)", err)
	}
}
