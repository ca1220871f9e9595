package vllm

import (
	"embed"
	"strings"
)

// The help of each version, as its own parser printed it (serverctl/vllmlab/record.py).
//
//go:embed versions/*/help.txt versions/*/help-all.txt
var helpFiles embed.FS

// Help returns the help of `vllm serve`: the groups of flags for -h and --help, all flags for --help=all, one group for --help=GROUP,
// and the flags with a word in their names for --help=WORD. ok reports whether args ask for help.
func (s *Server) Help(args []string) (text string, ok bool) {
	for _, arg := range args {
		word, search := strings.CutPrefix(arg, "--help=")
		switch {
		case arg == "-h" || arg == "--help":
			return helpText(s.version(), "help.txt"), true
		case search && strings.EqualFold(word, "all"):
			return helpText(s.version(), "help-all.txt"), true
		case search:
			return searchHelp(helpText(s.version(), "help-all.txt"), strings.ReplaceAll(strings.ToLower(word), "_", "-")), true
		}
	}
	return "", false
}

// helpText returns one of the version's texts, which are part of the program.
func helpText(version, name string) string {
	text, err := helpFiles.ReadFile("versions/" + version + "/" + name)
	if err != nil {
		panic("vllm: the help of vLLM " + version + ": " + err.Error()) // tests read them all
	}
	return string(text)
}

// A helpSection is a group of flags in the whole help.
type helpSection struct {
	title, text string // text is everything below the title
	options     []string
}

// searchHelp returns the part of the help that matches a word (format_help in vllm/utils/argparse_utils.py).
func searchHelp(all, word string) string {
	sections, tip := cutHelp(all)
	var found strings.Builder
	for _, s := range sections {
		if strings.ToLower(s.title) == word {
			return s.title + ":\n" + s.text + "\n" + tip
		}
		for _, o := range s.options {
			names, _, _ := strings.Cut(strings.TrimSpace(o), "  ")
			if strings.Contains(strings.ToLower(strings.SplitN(names, "\n", 2)[0]), word) {
				found.WriteString(o)
			}
		}
	}
	if found.Len() > 0 {
		return "Arguments matching '" + word + "':\n" + found.String() + "\n" + tip
	}
	return "No group or arguments matching '" + word + "'.\nUse '--help' to see available groups or '--help=all' to see all available parameters.\n"
}

// cutHelp splits the help into sections. A title is not indented and ends with a colon, an option is indented by two spaces, and the
// description of an option by more.
func cutHelp(all string) (sections []helpSection, tip string) {
	const tipBegin = "When passing JSON CLI arguments"
	if i := strings.Index(all, tipBegin); i >= 0 {
		all, tip = all[:i], all[i:]
	}
	for line := range strings.Lines(all) {
		bare := strings.TrimSuffix(line, "\n")
		if bare != "" && bare[0] != ' ' && strings.HasSuffix(bare, ":") {
			sections = append(sections, helpSection{title: strings.TrimSuffix(bare, ":")})
			continue
		}
		if len(sections) == 0 {
			continue
		}
		s := &sections[len(sections)-1]
		s.text += line
		switch {
		case strings.HasPrefix(line, "  -"):
			s.options = append(s.options, line)
		case len(s.options) > 0 && strings.HasPrefix(line, "   "):
			s.options[len(s.options)-1] += line
		}
	}
	for i := range sections {
		sections[i].text = strings.TrimRight(sections[i].text, "\n") + "\n"
	}
	return sections, tip
}
