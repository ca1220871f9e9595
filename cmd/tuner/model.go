package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"vllmtuner/render"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/weights"
	"vllmtuner/tuner/plan"
)

// prepareModel copies the model's weights to a local disk if the study asks for this. It reads the weights into the
// page cache, so that no server waits for the disk. It reports its progress to w.
func prepareModel(ctx context.Context, p *plan.Plan, w io.Writer) error {
	if !p.Server.NeedsWeights() {
		return nil
	}
	files, dir, err := p.Server.Weights()
	if errors.Is(err, weights.ErrUnknown) { // the server will download the model
		if p.File.Server.ModelCopy != "" {
			fmt.Fprintln(w, "warning: the model is not copied, because it is not on this machine yet; the server downloads it")
		}
		return nil
	}
	if err != nil {
		return err
	}
	if p.File.Server.ModelCopy != "" {
		if files, err = copyModel(ctx, p, dir, w); err != nil {
			return err
		}
	}
	show, end := byteProgress(w, "reading the weights")
	report, err := weights.Warm(ctx, files, host.Reader{}.Read().Memory.Free, show)
	end()
	if err != nil {
		return fmt.Errorf("read the weights into the page cache: %w", err)
	}
	switch {
	case report.Skipped != "" && report.NowResident < report.Bytes:
		fmt.Fprintf(w, "the weights are not kept in the page cache: %s\n", report.Skipped)
	case report.Read > 0:
		fmt.Fprintf(w, "read %s of weights into the page cache in %s\n", render.Bytes(report.Read), render.Span(report.Took))
	}
	return nil
}

// copyModel copies the model from dir, makes the servers use the copy, and returns the copy's files.
func copyModel(ctx context.Context, p *plan.Plan, dir string, w io.Writer) ([]weights.File, error) {
	show, end := byteProgress(w, "copying the model")
	path, report, err := weights.Copy(ctx, dir, p.File.Server.ModelCopy, show)
	end()
	if err != nil {
		return nil, fmt.Errorf("%s: server.model_copy: %w", p.File.Path, err)
	}
	if report.Skipped == "" {
		fmt.Fprintf(w, "copied the model from %s to %s in %s\n", weights.Filesystem(dir), path, render.Span(report.Took))
	}
	return p.Server.UseCopy(path)
}

// byteProgress returns a function that shows how many bytes are done, and a function that ends the display.
func byteProgress(w io.Writer, name string) (show func(done, total int64), end func()) {
	shown := render.NewProgress(w).Quietly()
	return func(done, total int64) {
		if done > 0 && total > 0 {
			shown.ShowShare(fmt.Sprintf("%s: %s of %s", name, render.Bytes(done), render.Bytes(total)), float64(done)/float64(total))
		}
	}, shown.End
}
