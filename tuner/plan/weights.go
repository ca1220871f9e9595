package plan

import (
	"errors"

	"vllmtuner/render"
	"vllmtuner/serverctl/weights"
)

// Weights returns the files of the model's weights, and their directory. The error wraps weights.ErrUnknown when the server
// downloads them.
func (p *Plan) Weights() ([]weights.File, string, error) {
	files, dir, err := weights.Files(weights.Model{
		Name: p.File.Model, Revision: p.File.FixedArg("revision"), CacheDir: p.File.FixedArg("download-dir"),
		Env: func(name string) string { value, _ := p.Lookup(name); return value },
	})
	if err != nil && !errors.Is(err, weights.ErrUnknown) {
		err = inputf("%s: model: %w; complete it, or measure with made-up weights (server.args: [--load-format, dummy])", p.File.Path, err)
	}
	return files, dir, err
}

// NeedsWeights reports whether the servers load weights. Simulated servers and servers with made-up weights do not.
func (p *Plan) NeedsWeights() bool {
	return p.File.Server.Simulate == "" && p.File.FixedArg("load-format") != "dummy"
}

// checkWeights finds a model's directory without weights. A server downloads a model that is not on this machine.
func (p *Plan) checkWeights(say Say) error {
	if !p.NeedsWeights() {
		return nil
	}
	files, dir, err := p.Weights()
	switch {
	case errors.Is(err, weights.ErrUnknown):
		say("model", "%s is not on this machine: the server downloads it", p.File.Model)
		return nil
	case err != nil:
		return err
	}
	if to := p.File.Server.ModelCopy; to != "" {
		if err := weights.CheckCopy(dir, to); err != nil {
			return inputf("%s: server.model_copy: %w", p.File.Path, err)
		}
	}
	say("model", "%s of weights in %s", render.Count(len(files), "file"), dir)
	return nil
}
