package prior

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/tuner/space"
)

// nameIn writes the name of a flag or of a searched variable as a study does. vLLM also accepts flags with underscores.
func nameIn(s *space.Space, name string) string {
	if s.Parameter(name) != nil {
		return name
	}
	return strings.ReplaceAll(strings.ToLower(strings.TrimLeft(name, "-")), "_", "-")
}

// ParseSet parses the FLAG=VALUE pairs of --set, which must name searched flags.
func ParseSet(s *space.Space, pairs []string) (map[string]string, error) {
	flags := map[string]string{}
	for _, pair := range pairs {
		name, value, ok := strings.Cut(pair, "=")
		name = nameIn(s, name)
		switch {
		case !ok || name == "" || value == "":
			return nil, fmt.Errorf("%s: write it as --set max-num-seqs=128", pair)
		case s.Parameter(name) == nil:
			names := lo.Map(s.Parameters(), func(p space.Parameter, _ int) string { return p.Name })
			return nil, fmt.Errorf("%s: this study does not search %s; %s", pair, name, space.DidYouMean(name, names))
		}
		flags[name] = value
	}
	return flags, nil
}

// point makes a point from the values of flags by name. If the study does not search a flag, the flag must have the
// value that the study sets for all servers. The study must allow the point.
func (r *Reader) point(flags map[string]string) (space.Point, error) {
	p := space.Point{}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		text := brief(flags[name])
		parameter := r.Space.Parameter(name)
		fixed, isFixed := r.Space.Defaults[name]
		switch {
		case parameter != nil:
			if parameter.Kind == space.Bool { // Python writes True and False
				text = strings.ToLower(text)
			}
			value, err := parameter.Read(text)
			errs = append(errs, err)
			p[name] = value
		case isFixed && !equalValues(fixed, text):
			errs = append(errs, fmt.Errorf("%s is %s in the source, but %s in the %s of this study", name, text, fixed, fixedIn(name)))
		case !isFixed && text == space.Unset && space.IsVariable(name): // no server of this study has it
		case !isFixed:
			errs = append(errs, fmt.Errorf("%s=%s is not searched in this study; search it, or set it in %s", name, text, fixedIn(name)))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if err := r.Space.Check(p); err != nil {
		return p, err
	}
	return r.round(p), nil
}

// fixedIn returns the key of a study file that fixes a flag or variable for all trials.
func fixedIn(name string) string {
	if space.IsVariable(name) {
		return "server.env"
	}
	return "server.args"
}

// round rounds the values of a point as the study's sampler does: Optuna's 0.8799999999999999 becomes 0.88.
func (r *Reader) round(p space.Point) space.Point {
	u, active := r.Space.Unit(p)
	nearest := r.Space.Sample(u)
	for i, parameter := range r.Space.Parameters() {
		if value, ok := nearest[parameter.Name]; ok && active[i] {
			p[parameter.Name] = value
		}
	}
	return p
}

// equalValues reports whether two values are equal, as texts or as numbers.
func equalValues(a, b string) bool {
	x, errX := strconv.ParseFloat(a, 64)
	y, errY := strconv.ParseFloat(b, 64)
	return a == b || strings.EqualFold(a, b) || errX == nil && errY == nil && x == y
}

// withSet adds the user's flags from --set to the flags of a source. If a flag is in --set and in the source, the value
// of the source wins.
func (r *Reader) withSet(flags map[string]string) map[string]string {
	all := maps.Collect(maps.All(r.Set)) // the map all is never nil
	maps.Copy(all, flags)
	return all
}

// knownFlags returns the words that are names of flags, with their values. A flag counts if the study searches it or
// fixes its value.
func (r *Reader) knownFlags(words map[string]string) map[string]string {
	flags := map[string]string{}
	for word, value := range words {
		name := nameIn(r.Space, word)
		_, isFixed := r.Space.Defaults[name]
		if isFixed || r.Space.Parameter(name) != nil {
			flags[name] = value
		}
	}
	return flags
}

// inPath returns the searched flags that it finds in the names of a file and its folders, such as
// max_num_seqs=128,gpu-memory-utilization=0.9/2qps.json.
func (r *Reader) inPath(path string) map[string]string {
	flags := map[string]string{}
	parameters := r.Space.Parameters()
	path = filepath.ToSlash(path)
	for i := range parameters {
		p := &parameters[i]
		name := strings.ReplaceAll(regexp.QuoteMeta(p.Name), "-", "[-_]") // QuoteMeta does not change dashes
		at := regexp.MustCompile(`(?:^|[^a-zA-Z0-9])(?i:` + name + `)=(` + values(p) + `)(?:$|[^a-zA-Z0-9]|\.[^0-9])`)
		if all := at.FindAllStringSubmatch(path, -1); len(all) > 0 {
			flags[p.Name] = all[len(all)-1][1] // the innermost name wins
		}
	}
	return flags
}

// values returns a regular expression for the values of a parameter.
func values(p *space.Parameter) string {
	switch p.Kind {
	case space.Bool:
		return `(?i:true|false)`
	case space.Float, space.Int:
		return `[0-9]+(?:\.[0-9]+)?`
	}
	words := make([]string, len(p.Choices))
	for i, c := range p.Choices {
		words[i] = regexp.QuoteMeta(c)
	}
	slices.SortFunc(words, func(a, b string) int { return len(b) - len(a) }) // the expression matches the first word that fits, so the longest comes first
	return strings.Join(words, "|")
}
