package studyfile

import (
	"regexp"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"vllmtuner/serverctl"
)

var (
	// onlyReference matches a value that is only a reference, such as ${TOKEN} or Bearer ${TOKEN}. Then the secret
	// itself is not in the file.
	onlyReference = regexp.MustCompile(`^(?:(?:Bearer|Basic|Token) )?` + reference.String() + `$`)

	// secretValues matches texts that look like a secret, whatever the name of the variable is: a password in a URL, a
	// bearer token, and password=… or token=… in a list of settings. It also matches keys of Hugging Face, OpenAI (and
	// so of vLLM), NVIDIA and GitHub. A key must have at least 16 characters, so that words such as hf_transfer do not
	// match.
	secretValues = regexp.MustCompile(`(?i:[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@` +
		`|\bbearer[\s:]+[a-z0-9._~+/-]{8,}` +
		`|(?:^|[?&;,\s])(?:password|passwd|pwd|secret|token|(?:access|api)[-_]?key)=[^\s&;]+)` +
		`|(?:^|[^A-Za-z0-9_-])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,})`)
)

// secretByName reports whether the name of a variable shows that the value is a secret. A reference is not a secret.
func secretByName(name, value string) bool {
	return !onlyReference.MatchString(value) && serverctl.LikelySecret(name, value)
}

// secretValue reports whether a text looks like a secret. A reference is not a secret.
func secretValue(text string) bool {
	return secretValues.MatchString(reference.ReplaceAllString(text, ""))
}

// isSecret reports whether the value of a variable must be replaced by a reference. If the name is a clear sign of a
// secret, every value must be replaced.
func isSecret(name, value string) bool {
	return serverctl.SecretName(name) && !onlyReference.MatchString(value) || secretByName(name, value) || secretValue(value)
}

// checkWord adds a problem if a word of a command holds a secret. The word may be NAME=VALUE, as for env(1), or a text
// that looks like a secret.
func (d *decoder) checkWord(path string, n ast.Node, word string) {
	name, value, pair := strings.Cut(word, "=")
	pair = pair && envName.MatchString(name) && !strings.HasSuffix(name, "tokens") // max_num_batched_tokens=… in a constraint is a flag
	if pair && secretByName(name, value) || secretValue(word) {
		d.failHidden(n, "%s looks like a secret, and the file is stored with the study; set it under server.env as a ${NAME}, or where the tuner runs", path)
	}
}
