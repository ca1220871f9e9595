package vllm

import (
	"cmp"
	"slices"
	"strings"

	"vllmtuner/serverctl/sim"
)

// The simulator's own flags, and the environment variables that say the same.
const (
	faultsVariable = "TUNER_SIM_FAULTS" // several, separated by semicolons
	defaultProfile = "h200-llama70b-fp8"
)

// FromArgs takes the simulator's own flags out of a command line of vLLM's, and returns the server that they describe with
// the args that are left for Serve:
//
//	--sim-profile NAME    or TUNER_SIM_PROFILE; h200-llama70b-fp8 when nothing is said
//	--sim-fault FAULT     any number of them, besides those in TUNER_SIM_FAULTS
//	--sim-gpu DIR         or TUNER_SIM_GPU_DIR
//	--sim-engine-process  a process for the engine
//	--sim-version VERSION or TUNER_SIM_VERSION; the first of Versions when nothing is said
//
// Its error is the user's mistake.
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
		case !own || !inline: // without its value it is left for vLLM to refuse
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
	if s.Version = cmp.Or(s.Version, sim.Versions[0]); releases[s.Version] == nil {
		return nil, nil, &sim.VersionError{Version: s.Version}
	}
	for i, text := range faults {
		faults[i] = strings.TrimSpace(text)
	}
	s.Faults, err = ParseFaults(faults...)
	return s, rest, err
}

// ownArgs is the way back: the flags that describe the server.
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
