package studyfile

import (
	"regexp"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/serverctl"
)

var (
	// outside is a value that is set where the tuner runs, and of which nothing but the way it is used stands in the file.
	outside = regexp.MustCompile(`^(?:(?:Bearer|Basic|Token) )?` + reference.String() + `$`)

	// secretValues look like secrets whatever they are called: the password of a URL, a key of Hugging Face, OpenAI (and what takes the
	// same form, vLLM's own too), NVIDIA or GitHub, a bearer token, and the password or token in a list of settings. Words such as hf_transfer are shorter.
	secretValues = regexp.MustCompile(`(?i:[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@` +
		`|\bbearer[\s:]+[a-z0-9._~+/-]{8,}` +
		`|(?:^|[?&;,\s])(?:password|passwd|pwd|secret|token|(?:access|api)[-_]?key)=[^\s&;]+)` +
		`|(?:^|[^A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,})`)
)

// secretByName reports whether a value is a secret by the name that it is given to.
func secretByName(name, value string) bool {
	return !outside.MatchString(value) && serverctl.LikelySecret(name, value)
}

// secretValue reports whether a text looks like a secret whatever it is called. References are none.
func secretValue(text string) bool {
	return secretValues.MatchString(reference.ReplaceAllString(text, ""))
}

// isSecret reports whether the value of a variable must be a reference. Of the names that leave no doubt, any value is.
func isSecret(name, value string) bool {
	return serverctl.SecretName(name) && !outside.MatchString(value) || secretByName(name, value) || secretValue(value)
}

// checkWord refuses a secret in a word of a command: NAME=VALUE, as env(1) takes it, or any text that looks like one.
func (d *decoder) checkWord(path string, n ast.Node, word string) {
	name, value, pair := strings.Cut(word, "=")
	pair = pair && envName.MatchString(name) && !strings.HasSuffix(name, "tokens") // a flag's name in a constraint
	if pair && secretByName(name, value) || secretValue(word) {
		d.failHidden(n, "%s looks like a secret, and the file is stored with the study; set it under server.env as a ${NAME}, or where the tuner runs", path)
	}
}
