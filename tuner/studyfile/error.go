package studyfile

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// ErrUnreadable says that there is no study file, or none that this user may read.
var ErrUnreadable = errors.New("read study file")

// An Error is everything that is wrong with a study file.
type Error struct {
	Path     string
	Problems []Problem // by line and column
}

// A Problem is one thing that is wrong, with its place.
type Problem struct {
	Line, Column int    // from 1
	What         string // what is wrong; the remedy
	Source       string // the line, or "" where showing it could show a secret
}

// More problems than these are more than one wants to read at once.
const mostProblems = 20

// Error lists the problems as path:line:column, each with its line and a caret under the place.
func (e *Error) Error() string {
	var out strings.Builder
	for i, p := range e.Problems {
		if i == mostProblems {
			fmt.Fprintf(&out, "\n%s: and %d more", e.Path, len(e.Problems)-i)
			break
		}
		if i > 0 {
			out.WriteByte('\n')
		}
		fmt.Fprintf(&out, "%s:%d:%d: %s", e.Path, p.Line, p.Column, p.What)
		if p.Source != "" {
			fmt.Fprintf(&out, "\n    %s\n    %s^", p.Source, strings.Repeat(" ", p.Column-1))
		}
	}
	return out.String()
}

// problems collects what is wrong.
type problems struct {
	path  string
	lines []string
	found []Problem
}

func (p *problems) add(line, column int, what string) {
	problem := Problem{Line: max(line, 1), Column: max(column, 1), What: printable(what)}
	// A value may stand on the line after its name.
	afterSecret := problem.Line > 1 && problem.Line-1 <= len(p.lines) && mayShowSecret(p.lines[problem.Line-2])
	if problem.Line <= len(p.lines) && !afterSecret {
		problem.Source = shown(p.lines[problem.Line-1], problem.Column)
	}
	if !slices.Contains(p.found, problem) {
		p.found = append(p.found, problem)
	}
}

// err returns an *Error, or nil when nothing is wrong.
func (p *problems) err() error {
	if len(p.found) == 0 {
		return nil
	}
	slices.SortStableFunc(p.found, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return &Error{Path: p.path, Problems: p.found}
}

// A longer line would wrap, and the caret would stand anywhere.
const longestShown = 160

// mayBeSecret is a line that gives a value to something whose name sounds like a secret. The keys of a study file that end
// in tokens hold numbers; names of environment variables are written in capitals.
var mayBeSecret = regexp.MustCompile(
	`(?i:token|keys?|secrets?|password|passwd|credentials?)["']?\s*[:=,]|TOKENS["']?\s*[:=]|(?i:api[-_]?key|hf[-_]token)` +
		`|(?i:pass|passphrase|_pwd|cookies?|auth|authorization|auth_[a-z]+)["']?\s*[:=]`)

// mayShowSecret reports whether a line names or looks like a secret.
func mayShowSecret(line string) bool { return mayBeSecret.MatchString(line) || secretValue(line) }

// shown returns a line as it is shown below its problem, or "" when it should not be.
func shown(line string, column int) string {
	if column > utf8.RuneCountInString(line)+1 || len(line) > longestShown || mayShowSecret(line) {
		return ""
	}
	line = strings.ReplaceAll(line, "\t", " ")
	if strings.TrimSpace(line) == "" || printable(line) != line {
		return ""
	}
	return line
}

// printable replaces what would move a terminal's cursor.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}
