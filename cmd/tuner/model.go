package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/weights"
)

// nearModel brings the model's weights near before the first server starts: into a copy on a local disk where the study wants one,
// and into the page cache, so that no start after the first waits for the disk. What it does is told to w.
func (p *plan) nearModel(ctx context.Context, w io.Writer) error {
	if p.file.Server.Simulate != "" || p.isDummy() {
		return nil
	}
	files, where, err := p.weightFiles()
	if errors.Is(err, weights.ErrUnknown) { // the server downloads it
		if p.file.Server.ModelCopy != "" {
			fmt.Fprintf(w, "warning: the model is not on this machine yet, so it is not copied: the server downloads it\n")
		}
		return nil
	}
	if err != nil {
		return err
	}
	tell := byteProgress(w)
	if to := p.file.Server.ModelCopy; to != "" {
		path, report, err := weights.Copy(ctx, where, to, tell("copying the model"))
		if err != nil {
			return fmt.Errorf("%s: server.model_copy: %w", p.file.Path, err)
		}
		if report.Skipped == "" {
			fmt.Fprintf(w, "copied the model from %s to %s in %s\n", weights.Filesystem(where), path, render.Span(report.Took))
		}
		p.model = path
		if info, err := os.Stat(p.file.Model); err == nil && !info.IsDir() { // a GGUF file: its folder was copied
			p.model = filepath.Join(path, filepath.Base(p.file.Model))
		}
		if files, _, err = weights.Files(weights.Model{Name: p.model}); err != nil {
			return err
		}
	}
	report, err := weights.Warm(ctx, files, host.Reader{}.Read().Memory.Free, tell("reading the weights"))
	if err != nil {
		return fmt.Errorf("read the weights into the page cache: %w", err)
	}
	switch {
	case report.Skipped != "" && report.NowResident < report.Bytes:
		fmt.Fprintf(w, "the weights are not kept in the page cache: %s\n", report.Skipped)
	case report.Read > 0:
		fmt.Fprintf(w, "read %.1f GiB of weights into the page cache in %s\n", float64(report.Read)/(1<<30), render.Span(report.Took))
	}
	return nil
}

// weightFiles returns the files of the model's weights, and their folder. It wraps weights.ErrUnknown where the server downloads them.
func (p *plan) weightFiles() ([]weights.File, string, error) {
	files, where, err := weights.Files(p.weights())
	if err != nil && !errors.Is(err, weights.ErrUnknown) {
		err = usageError{fmt.Errorf("%s: model: %w; complete it, or measure with weights that are made up (server.args: [--load-format, dummy])", p.file.Path, err)}
	}
	return files, where, err
}

// weights says which model the servers load.
func (p *plan) weights() weights.Model {
	m := weights.Model{Name: p.file.Model, Env: func(name string) string { value, _ := p.lookup(name); return value }}
	m.Revision = p.file.FixedArg("revision")
	m.CacheDir = p.file.FixedArg("download-dir")
	return m
}

// isDummy reports whether the servers make their weights up.
func (p *plan) isDummy() bool { return p.file.FixedArg("load-format") == "dummy" }

// tellEvery is how often progress in bytes is told.
const tellEvery = 10 * time.Second

// byteProgress tells now and then how much of something is done, and how long the rest will take.
func byteProgress(w io.Writer) func(what string) func(done, total int64) {
	return func(what string) func(done, total int64) {
		began := time.Now()
		last := began
		return func(done, total int64) {
			now := time.Now()
			if now.Sub(last) < tellEvery || done == 0 || total == 0 {
				return
			}
			last = now
			left := time.Duration(float64(now.Sub(began)) * float64(total-done) / float64(done))
			at := render.Stage{Head: fmt.Sprintf("%s: %.1f of %.1f GiB", what, float64(done)/(1<<30), float64(total)/(1<<30)), Until: now.Add(left)}
			fmt.Fprintln(w, at.Text())
		}
	}
}
