package studyfile

import (
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/samber/lo"

	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/tuner/space"
)

// fixedVariables are variables that must be the same for all servers of a study. The text of each variable has the
// reason and the remedy.
var fixedVariables = map[string]string{
	"CUDA_VISIBLE_DEVICES":   otherGPUs,
	"CUDA_DEVICE_ORDER":      otherGPUs,
	"NVIDIA_VISIBLE_DEVICES": otherGPUs,
	"HIP_VISIBLE_DEVICES":    otherGPUs,
	"ROCR_VISIBLE_DEVICES":   otherGPUs,
	"VLLM_TARGET_DEVICE":     otherGPUs,

	"PATH":        otherProgram,
	"PYTHONPATH":  otherProgram,
	"PYTHONHOME":  otherProgram,
	"VIRTUAL_ENV": otherProgram,
	"HOME":        otherProgram,

	"HF_HOME":               otherModel,
	"HF_HUB_CACHE":          otherModel,
	"HUGGINGFACE_HUB_CACHE": otherModel,
	"TRANSFORMERS_CACHE":    otherModel,
	"HF_ENDPOINT":           otherModel,
	"VLLM_USE_MODELSCOPE":   otherModel,

	"VLLM_CACHE_ROOT":          "it moves the compile cache; write server.cache_dir, or set it in server.env",
	"VLLM_HOST_IP":             otherAddress,
	"VLLM_PORT":                otherAddress,
	"VLLM_LOGGING_LEVEL":       otherLog,
	"VLLM_LOGGING_CONFIG_PATH": otherLog,
	"VLLM_LOGGING_PREFIX":      otherLog,
	"VLLM_LOGGING_STREAM":      otherLog,
	"VLLM_CONFIGURE_LOGGING":   otherLog,
}

const (
	otherGPUs    = "it changes the GPUs, and servers on different GPUs are not compared; set it in server.env"
	otherProgram = "it changes the program that runs, and different programs are not compared; set it in server.env"
	otherModel   = "it changes where the model comes from; set it in server.env"
	otherAddress = "it changes the server's address, which the tuner chooses; remove it"
	otherLog     = "the tuner reads the server's log; remove it, or set it in server.env"
)

// checkVariables adds a problem for each searched variable that the user may not search.
func (c checker) checkVariables() {
	for _, p := range c.Parameters {
		if space.IsVariable(p.Name) {
			c.checkVariable(p)
		}
	}
}

func (c checker) checkVariable(p space.Parameter) {
	at := "parameters." + p.Name
	_, fixed := c.Server.Env[p.Name]
	switch why, own := fixedVariables[p.Name], serverctl.OwnVariable(p.Name); {
	case isSecretVariable(p):
		c.failHidden(c.keys[at], "%s looks like a secret, and the file is stored with the study; set it under server.env as a ${NAME}", at)
	case own != "":
		c.failAtKey(at, "%s cannot be searched: %s; remove it", p.Name, own)
	case why != "":
		c.failAtKey(at, "%s cannot be searched: %s", p.Name, why)
	case fixed:
		c.failAtKey(at, "%s is in server.env and under parameters; remove one of them", p.Name)
	case sim.Models(strings.ToLower(strings.ReplaceAll(p.Name, "_", "-"))):
		c.failAtKey(at, "%s is an environment variable, because its name is in capitals; write the flag as %s",
			p.Name, strings.ToLower(strings.ReplaceAll(p.Name, "_", "-")))
	}
	for i, choice := range p.Choices {
		if reference.MatchString(choice) {
			c.failAt(itemPath(at, i), "%s: %s is not replaced under parameters; write the value, or set the variable under server.env", at, choice)
		}
	}
}

// isSecretVariable reports whether the name of a variable says that the variable holds a secret. Numbers of tokens are
// no secrets.
func isSecretVariable(p space.Parameter) bool {
	if strings.Contains(p.Name, "TOKENS") && !slices.ContainsFunc(p.Choices, func(c string) bool { return serverctl.LikelySecret(p.Name, c) }) {
		return false
	}
	return serverctl.SecretName(p.Name) || slices.ContainsFunc(p.Choices, func(c string) bool { return secretByName(p.Name, c) })
}

// checkCurrentVariables checks the NAME=value words at the beginning of server.current.
func (c checker) checkCurrentVariables(s *space.Space) {
	for i, word := range c.Server.CurrentEnv {
		at := itemPath("server.current", i)
		name, _, _ := strings.Cut(word, "=")
		if _, given := c.Server.Env[name]; given && s.Parameter(name) == nil {
			c.failAt(at, "%s is in server.env, which every trial gets; remove it here", name)
		} else if _, _, err := s.ParseVariable(word); err != nil {
			c.failAt(at, "server.current: %v", err)
		}
	}
}

// splitCurrent reads server.current. Variables come before the flags, as in a shell.
func (d *decoder) splitCurrent(s *Server) reader {
	return func(path string, n ast.Node) {
		var words []string
		d.texts(&words)(path, n)
		s.CurrentEnv, s.Current = space.CutEnv(words)
		names := map[string]bool{}
		for i, word := range s.CurrentEnv {
			name, _, _ := strings.Cut(word, "=")
			if names[name] {
				d.failAt(itemPath(path, i), "%s: %s is given twice; remove one", path, name)
			}
			names[name] = true
		}
	}
}

// onlyVariables reports whether the study searches environment variables and no flag.
func (f *File) onlyVariables() bool {
	return len(f.Parameters) > 0 && lo.EveryBy(f.Parameters, func(p space.Parameter) bool { return space.IsVariable(p.Name) })
}

// given returns the values of flags and variables that are not in a point. It takes flags from server.args, and from
// server.env variables that are no references. A searched variable that may be unset has the value Unset.
func (f *File) given() map[string]string {
	values := space.FlagValues(f.Server.Args)
	if values == nil {
		values = map[string]string{}
	}
	for name, value := range f.Server.Env {
		if space.IsVariable(name) && !strings.Contains(value, "${") {
			values[name] = value
		}
	}
	for i := range f.Parameters {
		if p := &f.Parameters[i]; p.HasUnset() {
			values[p.Name] = space.Unset
		}
	}
	return values
}

// variableChoices reads the values of a variable. An empty value, such as YAML's null, becomes Unset.
func (d *decoder) variableChoices(p *space.Parameter) reader {
	return func(path string, n ast.Node) {
		p.Choices = []string{}
		for i, v := range d.list(path, n) {
			at := itemPath(path, i)
			if _, null := v.(*ast.NullNode); null {
				p.Choices = append(p.Choices, space.Unset)
				continue
			}
			if text, ok := d.scalar(at, v); ok {
				d.checkWord(at, v, text)
				p.Choices = append(p.Choices, text)
			}
		}
	}
}

// switchValues are the values of a variable of the form bool. vLLM reads its switches as numbers (vllm/envs.py).
var switchValues = []string{"0", "1"}
