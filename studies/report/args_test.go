package report

import (
	"bytes"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	yamlutil "k8s.io/apimachinery/pkg/util/yaml"

	"vllmtuner/studies"
)

// awkward are args that a shell or YAML would misread without quotes.
var awkward = []string{
	"0.95", "128", "true", "no", "null", "~", "1e3", "0x1f", "0o7", "2026-03-01", ".inf", "", " ", " lead", "trail ", "-1", "-", "--", "---",
	"...", "it's", `"`, `\`, `\n`, "$HOME", "$(id)", "`id`", "a b", "*", "?", "[a]", "{a,b}", `{"method": "ngram", "n": [1, 2]}`, "#c", "a #c",
	"a: b", "a:", ": a", "- a", "&a", "*a", "!a", "%a", "@a", "|", ">", "=", "<<", "a,b", "tab\there", "two\nlines", "end\n", "\n",
	"cr\rhere", "é→…", "\u2028", "~user", "!x", ";", "a;b", "a&b", "a|b", "a>b", "\x01", "\x7f",
}

func TestShellReadsBackWhatWasWritten(t *testing.T) {
	study := studyOf(studies.Done, "", withArgs(exact(2), studies.Default, awkward...))
	var line bytes.Buffer
	if err := BestShell(&line, study); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "printf '%s\\0' "+line.String()).Output()
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	if !slices.Equal(got, awkward) {
		t.Errorf("the shell read %q", got)
	}
}

func TestYAMLReadsBackWhatWasWritten(t *testing.T) {
	for _, word := range awkward {
		checkYAML(t, word)
	}
}

// FuzzYAML compares our writer with the reader that Kubernetes uses.
func FuzzYAML(f *testing.F) {
	for _, word := range awkward {
		f.Add(word)
	}
	f.Fuzz(func(t *testing.T, word string) {
		if !utf8.ValidString(word) {
			t.Skip("args are UTF-8")
		}
		checkYAML(t, word)
	})
}

func checkYAML(t *testing.T, word string) {
	t.Helper()
	var text bytes.Buffer
	want := []string{"--flag", word, "--last"}
	if err := BestYAML(&text, studyOf(studies.Done, "", withArgs(exact(2), studies.Default, want...)), Options{}); err != nil {
		if !strings.ContainsFunc(word, unprintable) {
			t.Errorf("%q: %v", word, err)
		}
		return // BestYAML refuses an arg that cannot be printed; that is safe
	}
	var got struct{ Args []string }
	if err := yamlutil.Unmarshal(text.Bytes(), &got); err != nil {
		t.Errorf("%q: %v in\n%s", word, err, &text)
	} else if !slices.Equal(got.Args, want) {
		t.Errorf("%q was read as %q from\n%s", word, got.Args, &text)
	}
}

func unprintable(r rune) bool { return !unicode.IsGraphic(r) }

func TestFlagLines(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want []string
	}{
		{"a flag keeps its value", []string{"--max-num-seqs", "128", "--seed", "-1"}, []string{"--max-num-seqs 128", "--seed -1"}},
		{"a switch stands alone", []string{"--no-enable-prefix-caching", "-O3"}, []string{"--no-enable-prefix-caching", "-O3"}},
		{"several values stay together", []string{"--middleware", "a", "b c"}, []string{"--middleware a 'b c'"}},
		{"a stray first word is kept", []string{"x", "--y"}, []string{"x", "--y"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := flagLines(c.args); !slices.Equal(got, c.want) {
				t.Errorf("flagLines(%q) = %q, want %q", c.args, got, c.want)
			}
		})
	}
}

// The environment is printed apart from the args, in a form for a shell and in one for Kubernetes.
func TestTheEnvironmentOfTheBest(t *testing.T) {
	best := withArgs(exact(2), studies.Default, "--max-num-seqs", "8")
	best.Point = map[string]string{"NCCL_ALGO": "Ring,Tree", "LD_PRELOAD": "/a b.so", "VLLM_X": "unset", "OMP_NUM_THREADS": "1", "max-num-seqs": "8"}
	study := studyOf(studies.Done, "", best)
	for _, test := range []struct {
		write func(w io.Writer) error
		want  string
	}{
		{func(w io.Writer) error { return BestEnv(w, study) }, "-u VLLM_X LD_PRELOAD='/a b.so' NCCL_ALGO=Ring,Tree OMP_NUM_THREADS=1\n"},
		{func(w io.Writer) error { return BestShell(w, study) }, "--max-num-seqs 8\n"},
		{func(w io.Writer) error { return BestYAML(w, study, Options{}) }, "# not set: VLLM_X\n# Add your model, host and port: the study sets its own, and Kubernetes replaces the whole list.\nargs:\n- --max-num-seqs\n- \"8\"\nenv:\n- name: LD_PRELOAD\n  value: /a b.so\n"},
		{func(w io.Writer) error { return BestText(w, study, Options{}) }, "--max-num-seqs 8\n\nenvironment:\nLD_PRELOAD='/a b.so'\nNCCL_ALGO=Ring,Tree\nOMP_NUM_THREADS=1\n(not set: VLLM_X)\n\n"},
		{func(w io.Writer) error { return BestJSON(w, study, Options{}) }, `"env": {
      "LD_PRELOAD": "/a b.so",
      "NCCL_ALGO": "Ring,Tree",
      "OMP_NUM_THREADS": "1"
    }`},
	} {
		var out strings.Builder
		if err := test.write(&out); err != nil || !strings.Contains(out.String(), test.want) {
			t.Errorf("%v\n%swant\n%s", err, out.String(), test.want)
		}
	}
}
