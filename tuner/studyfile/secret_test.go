package studyfile

import (
	"fmt"
	"strings"
	"testing"
)

const longKey = "abcdefghijklmnopqrstuvwxyz012345"

// The rows say which literal values in server.env count as secrets.
func TestSecretsInTheEnvironment(t *testing.T) {
	for _, test := range []struct {
		name, value string
		refused     bool
	}{
		{"HF_TOKEN", "anything", true},
		{"HF_TOKEN", "1", true},
		{"HF_TOKEN", "${MY_TOKEN}", false},
		{"HF_TOKEN", "x${MY_TOKEN}", true},
		{"DATABASE_URL", "postgres://me:secret@db/x", true},
		{"DATABASE_URL", "postgres://me:${PW}@db/x", false},
		{"DATABASE_URL", "postgres://db/x", false},
		{"DATABASE_URL", "host=db user=me password=secret", true},
		{"DATABASE_URL", "host=db user=me password=${PW}", false},
		{"HTTPS_PROXY", "http://user:password@proxy:3128", true},
		{"HTTPS_PROXY", "http://proxy:3128", false},
		{"https_proxy", "user:password@proxy", false}, // accepted, because it is not a URL and an address may have this form
		{"PASSPHRASE", "open sesame", true},
		{"SSL_PASSPHRASE_FILE", "/run/x", true}, // not a secret, but refused to be safe; the user can write the path as a reference
		{"PGPASS", "secret", true},
		{"MYSQL_PWD", "secret", true},
		{"PWD", "/work", false},
		{"AUTH_HEADER", "Basic dXNlcjpwYXNz", true},
		{"AUTH_HEADER", "Bearer ${TOKEN}", false},
		{"COOKIE", "session=1234", true},
		{"AUTHOR", "me", false},
		{"ENABLE_FUSION_PASS", "1", false},
		{"BYPASS", "true", false},
		{"TOKENIZERS_PARALLELISM", "false", false},
		{"VLLM_ATTENTION_BACKEND", "FLASHINFER", false},
		{"HF_HUB_ENABLE_HF_TRANSFER", "1", false},
		{"EXTRA", "hf_" + longKey, true},
		{"EXTRA", "sk-" + longKey, true},
		{"EXTRA", "sk-proj-" + longKey, true},
		{"EXTRA", "Bearer " + longKey, true},
		{"EXTRA", "nvapi-" + longKey, true},
		{"EXTRA", "ghp_" + longKey, true},
		{"EXTRA", "https://example.com/?token=" + longKey, true},
		{"EXTRA", "disk-" + longKey, false},
		{"EXTRA", "hf_transfer", false},
		{"EXTRA", "git@github.com:me/repo", false},
		{"EXTRA", "https://example.com:8080/a@b", false},
	} {
		_, err := Parse("study.yaml", []byte(strings.Replace(full, "LEVEL: 3", fmt.Sprintf("%s: %q", test.name, test.value), 1)))
		if strings.HasPrefix(test.name, "HF_TOKEN") {
			_, err = Parse("study.yaml", []byte(strings.Replace(full, `HF_TOKEN: "${HF_TOKEN}"`, fmt.Sprintf("%s: %q", test.name, test.value), 1)))
		}
		checkRefused(t, test.name+": "+test.value, "server.env."+test.name, err, test.refused)
	}
}

// The rows say which words of a command or of args count as secrets.
func TestSecretsInWords(t *testing.T) {
	for _, test := range []struct {
		word    string
		refused bool
	}{
		{"HF_TOKEN=sk-1", true},
		{"HF_TOKEN=", false}, // unsets the variable
		{"DB_PASSPHRASE=open", true},
		{"CUDA_VISIBLE_DEVICES=0", false},
		{"PYTHONPATH=/opt/x", false},
		{"max_num_batched_tokens=auto", false},
		{"--max-num-batched-tokens=2048", false},
		{"hf_" + longKey, true},
		{"--header=Authorization: Bearer " + longKey, true},
		{"http://me:secret@proxy/", true},
		{"http://proxy/", false},
		{`{"hf_token":"hf_` + longKey + `"}`, true},
		{`{"method":"ngram","num_speculative_tokens":2}`, false},
		{"meta-llama/Llama-3.3-70B-Instruct", false},
		{"--load-format=hf_transfer", false},
	} {
		quoted := "'" + test.word + "'"
		for path, text := range map[string]string{
			"server.command[1]": strings.Replace(full, "[python3, ", "[env, "+quoted+", ", 1),
			"server.args[5]":    strings.Replace(full, "a, b]", "a, "+quoted+"]", 1),
		} {
			_, err := Parse("study.yaml", []byte(text))
			checkRefused(t, test.word, path, err, test.refused)
		}
	}
}

// checkRefused checks that a secret is refused, with its line and column, and that the message does not contain it.
func checkRefused(t *testing.T, what, path string, err error, refused bool) {
	t.Helper()
	message := fmt.Sprint(err)
	if got := strings.Contains(message, path+" looks like a secret"); got != refused {
		t.Errorf("%s is refused: %t, want %t: %v", what, got, refused, err)
	}
	if strings.Contains(message, longKey) {
		t.Errorf("%s: the message shows it: %v", what, err)
	}
}
