package vllm

import (
	"cmp"
	"slices"
	"strings"

	"vllmtuner/serverctl/sim"
)

// Environment variables and defaults of the simulator's own flags.
const (
	faultsVariable = "TUNER_SIM_FAULTS" // has any number of faults, separated by semicolons
	defaultProfile = "h200-llama70b-fp8"
)

// FromArgs removes the simulator's own flags from a command line of vLLM. It returns the server that these flags
// describe, and the rest of the args for Serve:
//
//	--sim-profile NAME    or TUNER_SIM_PROFILE; the default is h200-llama70b-fp8
//	--sim-fault FAULT     any number of times, in addition to TUNER_SIM_FAULTS
//	--sim-gpu DIR         or TUNER_SIM_GPU_DIR
//	--sim-engine-process  runs the engine in its own process
//	--sim-version VERSION or TUNER_SIM_VERSION; the default is the first of sim.Versions
//
// An error is a mistake of the user.
func FromArgs(args []string, getenv func(string) string) (s *Server, rest []string, err error) {
	s = &Server{GPU: getenv("TUNER_SIM_GPU_DIR"), Version: getenv("TUNER_SIM_VERSION")}
	profile := getenv("TUNER_SIM_PROFILE")
	faults := slices.DeleteFunc(strings.Split(getenv(faultsVariable), ";"), func(text string) bool {
		return strings.TrimSpace(text) == ""
	})
	for i := 0; i < len(args); i++ {
		if args[i] == "--sim-engine-process" {
			s.EngineProcess = true
			continue
		}
		name, value, inline := strings.Cut(args[i], "=")
		own := slices.Contains([]string{"--sim-profile", "--sim-fault", "--sim-gpu", "--sim-version"}, name)
		if own && !inline && i+1 < len(args) {
			i++
			value, inline = args[i], true
		}
		switch {
		case !own || !inline: // a flag of vLLM, or an own flag without its value, which vLLM's parser refuses
			rest = append(rest, args[i])
		case name == "--sim-profile":
			profile = value
		case name == "--sim-gpu":
			s.GPU = value
		case name == "--sim-version":
			s.Version = value
		default:
			faults = append(faults, value)
		}
	}
	if s.Profile, err = sim.LoadProfile(cmp.Or(profile, defaultProfile)); err != nil {
		return nil, nil, err
	}
	s.Version = s.version()
	if err := sim.CheckVersion(s.Version); err != nil {
		return nil, nil, err
	}
	for i, text := range faults {
		faults[i] = strings.TrimSpace(text)
	}
	s.Faults, err = parseFaults(faults...)
	return s, rest, err
}

// ownArgs returns the flags from which FromArgs makes the same server.
func (s *Server) ownArgs() []string {
	args := []string{"--sim-profile=" + s.Profile.Name}
	if s.version() != sim.Versions[0] {
		args = append(args, "--sim-version="+s.Version)
	}
	if s.GPU != "" {
		args = append(args, "--sim-gpu="+s.GPU)
	}
	for _, f := range s.Faults {
		args = append(args, "--sim-fault="+f.String())
	}
	return args
}
