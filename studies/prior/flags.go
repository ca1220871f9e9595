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

// flagName writes the name of a flag as a study does. vLLM also accepts underscores.
func flagName(name string) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimLeft(name, "-")), "_", "-")
}

// ParseSet parses the FLAG=VALUE pairs of --set, which must name searched flags.
func ParseSet(s *space.Space, pairs []string) (map[string]string, error) {
	flags := map[string]string{}
	for _, pair := range pairs {
		name, value, ok := strings.Cut(pair, "=")
		name = flagName(name)
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

// point makes a point of flags, given by name. If the study does not search a flag, the flag must have the value that
// the study sets for all servers. The study must allow the point.
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
		case isFixed && !same(fixed, text):
			errs = append(errs, fmt.Errorf("%s is %s in the source, but %s in the server.args of this study", name, text, fixed))
		case !isFixed:
			errs = append(errs, fmt.Errorf("%s=%s is not searched in this study; search it, or set it in server.args", name, text))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if err := r.Space.Check(p); err != nil {
		return p, err
	}
	return r.legal(p), nil
}

// legal rounds the values of a point as the study's sampler does: Optuna's 0.8799999999999999 becomes 0.88.
func (r *Reader) legal(p space.Point) space.Point {
	u, active := r.Space.Unit(p)
	nearest := r.Space.Sample(u)
	for i, parameter := range r.Space.Parameters() {
		if value, ok := nearest[parameter.Name]; ok && active[i] {
			p[parameter.Name] = value
		}
	}
	return p
}

// same reports whether two values are equal, as texts or as numbers.
func same(a, b string) bool {
	x, errX := strconv.ParseFloat(a, 64)
	y, errY := strconv.ParseFloat(b, 64)
	return a == b || strings.EqualFold(a, b) || errX == nil && errY == nil && x == y
}

// withSet adds the user's flags from --set to the flags of a source. If both have a flag, the value of the source wins.
func (r *Reader) withSet(flags map[string]string) map[string]string {
	all := maps.Collect(maps.All(r.Set)) // never nil
	maps.Copy(all, flags)
	return all
}

// known returns the words that are names of searched or fixed flags of the study, with their values.
func (r *Reader) known(words map[string]string) map[string]string {
	flags := map[string]string{}
	for word, value := range words {
		name := flagName(word)
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
