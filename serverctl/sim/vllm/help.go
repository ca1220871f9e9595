package vllm

import (
	"embed"
	"slices"
	"strings"
)

// helpFiles are the help texts of each version of vLLM, as that version's parser printed them
// (serverctl/vllmlab/record.py).
//
//go:embed versions/*/help.txt versions/*/help-all.txt
var helpFiles embed.FS

// Help returns the help of `vllm serve`: the groups of flags for -h and --help, and all flags for --help=all or any
// other word. If the args do not ask for help, ok is false.
func (s *Server) Help(args []string) (text string, ok bool) {
	i := slices.IndexFunc(args, func(arg string) bool { return arg == "-h" || arg == "--help" || strings.HasPrefix(arg, "--help=") })
	if i < 0 {
		return "", false
	}
	name := "help.txt"
	if strings.Contains(args[i], "=") {
		name = "help-all.txt"
	}
	help, err := helpFiles.ReadFile("versions/" + s.version() + "/" + name)
	if err != nil {
		panic("vllm: the help of vLLM " + s.version() + ": " + err.Error()) // tests read the help of all versions
	}
	return string(help), true
}
