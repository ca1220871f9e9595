package space

import (
	"regexp"
	"strings"
)

var plainRule = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// ShellWord quotes a word where a POSIX shell would read it otherwise.
func ShellWord(word string) string {
	if plainRule.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
