package serverctl

import (
	"os"
	"strings"
	"testing"
)

func TestHelpLearnsTheFlagsOfARealHelp(t *testing.T) {
	t.Setenv(roleVariable, "help testdata/help-0.14.1.txt")
	flags, err := Help(t.Context(), []string{os.Args[0], "serve"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"--max-num-seqs", "--enable-prefix-caching", "--no-enable-prefix-caching", "--api-server-count", "-asc",
		"--speculative-config", "-cc", "-h", "--help"} {
		if !flags.has(want) {
			t.Errorf("Help lacks %s", want)
		}
	}
	for _, wrong := range []string{"--json-arg", "--json-arg.key1"} {
		if flags.has(wrong) {
			t.Errorf("Help has %s, which is an example", wrong)
		}
	}
}

func TestHelpOfBothPythonLayouts(t *testing.T) {
	for _, row := range []struct{ name, text string }{
		{"up to Python 3.12", "  --tensor-parallel-size TP, -tp TP\n  --revision REVISION   The version, --not-a-flag\n"},
		{"from Python 3.13 on", "  -tp, --tensor-parallel-size TP\n  --revision REVISION   The version, --not-a-flag\n"},
	} {
		flags := parseHelp(row.text)
		if len(flags) != 3 || !flags.has("-tp") || !flags.has("--tensor-parallel-size") || !flags.has("--revision") {
			t.Errorf("%s: parseHelp = %v", row.name, flags)
		}
	}
}

func TestHelpThatFailsSaysHow(t *testing.T) {
	t.Setenv(roleVariable, "log testdata/death-flags-unknown-0.14.1.log 2")
	_, err := Help(t.Context(), []string{os.Args[0]}, nil)
	if err == nil || !strings.Contains(err.Error(), "exit status 2") || !strings.Contains(err.Error(), "unrecognized arguments") {
		t.Errorf("Help() = %v", err)
	}
	if _, err := Help(t.Context(), []string{"/bin/false"}, nil); err == nil || !strings.Contains(err.Error(), "it printed nothing; run it by hand") {
		t.Errorf("Help() = %v", err)
	}
	if _, err := Help(t.Context(), []string{"/no/such/vllm"}, nil); err == nil || !strings.Contains(err.Error(), "/no/such/vllm cannot be run") {
		t.Errorf("Help() = %v", err)
	}
}

func TestCheckFlags(t *testing.T) {
	accepted := parseHelp("  --max-num-seqs N\n  --max-num-batched-tokens N\n  --kv-cache-memory-bytes N\n" +
		"  --enable-prefix-caching, --no-enable-prefix-caching\n  --tensor-parallel-size N, -tp N\n  --speculative-config J\n  --optimization-level O\n" +
		"  --kv-cache-dtype {auto,bfloat16,fp8}\n")
	for _, row := range []struct {
		name string
		args string
		want string // empty means accepted
	}{
		{"known flags with values", "--max-num-seqs 8 --max-num-batched-tokens=1k --no-enable-prefix-caching -tp 2", ""},
		{"underscores are dashes", "--max_num_seqs 8", ""},
		{"a key of a JSON flag", "--speculative-config.method ngram", ""},
		{"JSON and negative values are no flags", `--speculative-config {"a":-1} --max-num-seqs -1`, ""},
		{"a beginning that only one flag has", "--kv-cache-memory 1", ""},
		{"an optimization level", "-O3", ""},
		{"a value among the choices", "--kv-cache-dtype fp8 --kv-cache-dtype=auto", ""},
		{"a value that is none of the choices", "--kv-cache-dtype fp9", `flag --kv-cache-dtype does not accept "fp9"; it accepts auto, bfloat16, fp8; did you mean fp8?`},
		{"such a value behind an equals sign", "--kv-cache-dtype=int4", `flag --kv-cache-dtype does not accept "int4"`},
		{"a flag that newer servers lack", "--swap-space 4", "longer has the flag --swap-space: vLLM V1 never uses swap space"},
		{"a beginning of several", "--max-num 8", "flag --max-num could be --max-num-batched-tokens or --max-num-seqs"},
		{"a misspelt flag", "--max-num-sequences 8", "this server has no flag --max-num-sequences; did you mean --max-num-seqs?"},
		{"a flag of another world", "--zzzzzzzzzz", "no flag --zzzzzzzzzz; its --help=all"},
		{"an unknown short flag", "-xyz 1", "no flag -xyz"},
	} {
		err := CheckFlags(accepted, strings.Fields(row.args))
		if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
			t.Errorf("%s: CheckFlags(%s) = %v, want %q", row.name, row.args, err, row.want)
		}
	}
	// A searched flag is repeated once for each of its values.
	err := CheckFlags(accepted, strings.Fields("--zzzzzzzzzz 1 --zzzzzzzzzz 2 --zzzzzzzzzz 3 --kv-cache-dtype fp9"))
	if lines := strings.Count(err.Error(), "\n") + 1; lines != 2 {
		t.Errorf("one unknown flag and one wrong value are told in %d lines: %v", lines, err)
	}
}

func FuzzParseHelp(f *testing.F) {
	f.Add("  --max-num-seqs N, -s N\n  -x  y, --z\n")
	f.Fuzz(func(t *testing.T, text string) {
		for name := range parseHelp(text) {
			if !strings.HasPrefix(name, "-") || strings.ContainsAny(name, " ={") {
				t.Errorf("parseHelp finds %q", name)
			}
		}
	})
}
