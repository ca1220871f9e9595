package plan

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/serverctl/weights"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// A Server is the program that a study starts, with its environment and its model.
type Server struct {
	Env   map[string]string // environment with resolved references; may hold secrets
	Model string            // model argument: the file's model, or the path of a copy

	file *studyfile.File
}

// open reads the environment of the server, and makes the directories that it uses.
func (s *Server) open() (err error) {
	file := s.file
	if s.Env, err = file.Environment(os.LookupEnv); err != nil {
		return err
	}
	for key, dir := range map[string]string{"cache_dir": file.Server.CacheDir, "model_copy": file.Server.ModelCopy} {
		if err := CheckWritable(dir); err != nil {
			return fmt.Errorf("%s: server.%s: %w; give a directory that can be written", file.Path, key, err)
		}
	}
	if dir := file.Server.CacheDir; dir != "" {
		// vLLM keeps everything that it compiles and downloads below this directory (vllm/envs.py). A value from the
		// user is not replaced.
		if _, given := s.Env[cacheVariable]; !given {
			s.Env[cacheVariable] = dir
		}
	}
	return nil
}

// cacheVariable is the environment variable for vLLM's cache directory. Its subdirectory torch_compile_cache has the
// compiled graphs.
const cacheVariable = "VLLM_CACHE_ROOT"

// Lookup returns the value of a variable in the server's environment.
func (s *Server) Lookup(name string) (string, bool) {
	if value, ok := s.Env[name]; ok {
		return value, true
	}
	return os.LookupEnv(name)
}

// check returns an error if the server's binary or a local model is missing.
func (s *Server) check() error {
	server := s.file.Server
	if server.Simulate != "" {
		return s.checkSimulated()
	}
	if err := (serverctl.Config{Command: server.Command, Model: s.file.Model, Args: server.Args, Env: s.Env}).Check(); err != nil {
		return fmt.Errorf("%s: %w", s.file.Path, err)
	}
	model := s.file.Model
	if strings.HasPrefix(model, "/") || strings.HasPrefix(model, ".") {
		if _, err := os.Stat(filepath.Join(model, "config.json")); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: model: %s holds no config.json; a path must be a model's directory", s.file.Path, model)
		}
	}
	return nil
}

// checkSimulated returns an error if the profile is missing or wrong, or if the simulator does not model a searched
// flag.
func (s *Server) checkSimulated() error {
	if _, err := sim.LoadProfile(s.file.Server.Simulate); err != nil {
		return err
	}
	for _, parameter := range s.file.Parameters {
		if space.IsVariable(parameter.Name) {
			return fmt.Errorf("%s: parameters.%s: the simulated server reads no environment variable, so all its values would give the same figures; "+
				"remove it, or search it on a real server", s.file.Path, parameter.Name)
		}
		if parameter.Name != space.SpeculativeTokens && !sim.Models(parameter.Name) {
			remedy := "remove it, or search it on a real server"
			if near := space.Nearest(parameter.Name, sim.Modelled()); near != "" {
				remedy = fmt.Sprintf("did you mean %q? If not, %s", near, remedy)
			}
			return fmt.Errorf("%s: parameters.%s: the simulated server does not model --%s, so all its values would give the same figures; %s",
				s.file.Path, parameter.Name, parameter.Name, remedy)
		}
	}
	return nil
}

// checkFlags checks that the server knows the flags in args. If askServer is false, it does not ask a real server.
func (s *Server) checkFlags(ctx context.Context, args []string, say Say, askServer bool) error {
	if name := s.file.Server.Simulate; name != "" {
		profile, err := sim.LoadProfile(name)
		if err != nil {
			return err
		}
		if _, err := profile.ParseArgs(args); err != nil {
			return inputf("%s: the simulated server refuses: %w", s.file.Path, err)
		}
		say("server", "%s, simulated", name)
		return nil
	}
	if refused := slices.Compact(sim.RefusedValues(args)); len(refused) > 0 {
		return inputf("%s: vLLM accepts no such value: %s; correct it in server.args, server.current or parameters", s.file.Path, strings.Join(refused, "; "))
	}
	command := strings.Join(s.file.Server.Command, " ")
	if !askServer {
		say("server", "%s exists; its flags are not checked", command)
		return nil
	}
	accepted, err := serverctl.Help(ctx, s.file.Server.Command, s.Env)
	if err != nil {
		return fmt.Errorf("%s: server.command: %w", s.file.Path, err)
	}
	if err := serverctl.CheckFlags(accepted, args); err != nil {
		return inputf("%s: %w", s.file.Path, err)
	}
	flags, _ := space.Flags(args) // no error: studyfile has already parsed these args
	own := lo.UniqBy(flags, func(f space.Flag) string { return f.Name })
	say("server", "%s knows %s of the study (it has %s)", command, render.All(len(own), "flag"), render.Count(len(accepted), "flag"))
	return nil
}

// Weights returns the files of the model's weights, and their directory. The error wraps weights.ErrUnknown if the
// server will download them.
func (s *Server) Weights() ([]weights.File, string, error) {
	files, dir, err := weights.Files(weights.Model{
		Name: s.file.Model, Revision: s.file.FixedArg("revision"), CacheDir: s.file.FixedArg("download-dir"),
		Env: func(name string) string { value, _ := s.Lookup(name); return value },
	})
	if err != nil && !errors.Is(err, weights.ErrUnknown) {
		err = inputf("%s: model: %w; complete it, or measure with made-up weights (server.args: [--load-format, dummy])", s.file.Path, err)
	}
	return files, dir, err
}

// NeedsWeights reports whether the servers load weights. Simulated servers and servers with --load-format dummy do not.
func (s *Server) NeedsWeights() bool {
	return s.file.Server.Simulate == "" && s.file.FixedArg("load-format") != "dummy"
}

// UseCopy makes the servers load the model from the directory of its copy, and returns the copy's files. If the model is
// a GGUF file, the copy is the directory of this file, and the servers load the file with the same name in it.
func (s *Server) UseCopy(dir string) ([]weights.File, error) {
	s.Model = dir
	if info, err := os.Stat(s.file.Model); err == nil && !info.IsDir() {
		s.Model = filepath.Join(dir, filepath.Base(s.file.Model))
	}
	files, _, err := weights.Files(weights.Model{Name: s.Model})
	return files, err
}

// checkWeights returns an error if the model's directory lacks weights. A model that is not on this machine is no
// error, because the server downloads it.
func (s *Server) checkWeights(say Say) error {
	if !s.NeedsWeights() {
		return nil
	}
	files, dir, err := s.Weights()
	switch {
	case errors.Is(err, weights.ErrUnknown):
		say("model", "%s is not on this machine: the server downloads it", s.file.Model)
		return nil
	case err != nil:
		return err
	}
	if to := s.file.Server.ModelCopy; to != "" {
		if err := weights.CheckCopy(dir, to); err != nil {
			return inputf("%s: server.model_copy: %w", s.file.Path, err)
		}
	}
	say("model", "%s of weights in %s", render.Count(len(files), "file"), dir)
	return nil
}
