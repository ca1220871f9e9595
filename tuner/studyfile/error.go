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

// ErrUnreadable means that the study file does not exist, or that the user may not read it.
var ErrUnreadable = errors.New("read study file")

// An Error lists every problem of a study file.
type Error struct {
	Path     string
	Problems []Problem // sorted by line and column
}

// A Problem is one mistake in a study file, with its place.
type Problem struct {
	Line, Column int    // both count from 1
	What         string // the mistake, and what to write instead
	Source       string // text of the line; "" if it may hold a secret
}

// maxProblems is how many problems are printed. The others are only counted.
const maxProblems = 20

// Error returns a text with each problem: path:line:column, the mistake, and the line with a caret below the column.
func (e *Error) Error() string {
	var out strings.Builder
	for i, p := range e.Problems {
		if i == maxProblems {
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

// problems collects the problems of one file.
type problems struct {
	path  string
	lines []string
	found []Problem
}

func (p *problems) add(line, column int, what string) {
	problem := Problem{Line: max(line, 1), Column: max(column, 1), What: printable(what)}
	// The previous line may have the name of a secret, and this line its value.
	afterSecret := problem.Line > 1 && problem.Line-1 <= len(p.lines) && mayShowSecret(p.lines[problem.Line-2])
	if problem.Line <= len(p.lines) && !afterSecret {
		problem.Source = shown(p.lines[problem.Line-1], problem.Column)
	}
	if !slices.Contains(p.found, problem) {
		p.found = append(p.found, problem)
	}
}

// err returns an *Error, or nil if there are no problems.
func (p *problems) err() error {
	if len(p.found) == 0 {
		return nil
	}
	slices.SortStableFunc(p.found, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return &Error{Path: p.path, Problems: p.found}
}

// maxShown is the longest line that is printed, in bytes. A terminal would wrap a longer line, and the caret would be
// in the wrong place.
const maxShown = 160

// mayBeSecret matches a line that gives a value to a name that sounds like a secret. Keys of the study file that end in
// lower-case "tokens" have numbers as values, so only TOKENS in capitals matches.
var mayBeSecret = regexp.MustCompile(
	`(?i:token|keys?|secrets?|password|passwd|credentials?)["']?\s*[:=,]|TOKENS["']?\s*[:=]|(?i:api[-_]?key|hf[-_]token)` +
		`|(?i:pass|passphrase|_pwd|cookies?|auth|authorization|auth_[a-z]+)["']?\s*[:=]`)

// mayShowSecret reports whether a line may contain a secret, because of a name in the line or the form of its text.
func mayShowSecret(line string) bool { return mayBeSecret.MatchString(line) || secretValue(line) }

// shown returns the text of a line for printing below its problem; "" if it must not be printed.
func shown(line string, column int) string {
	if column > utf8.RuneCountInString(line)+1 || len(line) > maxShown || mayShowSecret(line) {
		return ""
	}
	line = strings.ReplaceAll(line, "\t", " ")
	if strings.TrimSpace(line) == "" || printable(line) != line {
		return ""
	}
	return line
}

// printable replaces each unprintable character by a space, because some of these characters would move the cursor of a
// terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}
