package sim

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// commands.json has command lines with the answers of vLLM's own parser (vllm/testdata/recordings/README.md).
func TestCommandLinesAreRefusedAsByVLLM(t *testing.T) {
	address := regexp.MustCompile(` at 0x[0-9a-f]+`)
	for _, version := range Versions {
		text, err := os.ReadFile(filepath.Join("testdata", "recordings", version, "commands.json"))
		if err != nil {
			t.Fatal(err)
		}
		var commands []struct {
			Args   []string
			Code   int
			Stderr string
		}
		if err := json.Unmarshal(text, &commands); err != nil {
			t.Fatal(err)
		}
		for _, want := range commands {
			if strings.HasPrefix(want.Args[0], "-h") || strings.HasPrefix(want.Args[0], "--help") {
				continue
			}
			_, err := profile(t, "small-fast").ParseArgsOf(version, want.Args)
			refusal, refused := errors.AsType[*UsageError](err)
			if refused != (want.Code == 2) {
				t.Errorf("%s: %v: %v, want exit code %d", version, want.Args, err, want.Code)
				continue
			}
			if !refused {
				continue
			}
			_, said, _ := strings.Cut(want.Stderr, ": error: ")
			if got, said := address.ReplaceAllString(refusal.Text, ""), address.ReplaceAllString(strings.TrimSpace(said), ""); got != said {
				t.Errorf("%s: %v: %q, want %q", version, want.Args, got, said)
			}
		}
	}
}

// These command lines are not among the recordings. The parser of vLLM 0.32.0 refuses them too.
func TestCommandLinesAreRefused(t *testing.T) {
	for _, row := range []struct{ name, args, want string }{
		{"a second model behind a separator", "m -- x", "vllm serve: error: unrecognized arguments: x"},
		{"two separators", "-- m --", "vllm serve: error: unrecognized arguments: --"},
		{"a separator away from the model", "m --enforce-eager -- x", "vllm serve: error: unrecognized arguments: x"},
		{"a flag behind a separator is no flag", "--max-num-seqs 8 -- m n --port 1", "vllm serve: error: unrecognized arguments: n --port 1"},
		{"a separator is no value", "m --served-model-name -- x", "vllm serve: error: argument --served-model-name: expected at least one argument"},
		{"keys of an unknown flag", "m --foo.bar 1", `vllm serve: error: unrecognized arguments: --foo {"bar":1}`},
		{"an unknown flag with a space", "m --no-such=a·b", "vllm serve: error: unrecognized arguments: --no-such=a b"},
		{"a hexadecimal number", "m --gpu-memory-utilization 0x1p-1", "invalid float value: '0x1p-1'"},
		{"a utilization above 1", "m --gpu-memory-utilization 1.2", "gpu_memory_utilization must be in (0, 1], got 1.2."},
		{"not a number", "m --gpu-memory-utilization nan", "gpu_memory_utilization must be in (0, 1], got NaN."},
		{"infinite", "m --gpu-memory-utilization infinity", "gpu_memory_utilization must be in (0, 1], got +Inf."},
		{"more than 64 bits", "m --max-model-len 99999999999t", "invalid human_readable_int_or_auto value: '99999999999t'"},
		{"more than 64 bits in binary units", "m --max-num-batched-tokens 8388608T", "invalid human_readable_int value: '8388608T'"},
	} {
		args := strings.Fields(row.args)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "·", " ")
		}
		if o, err := profile(t, "small-fast").ParseArgsOf("0.32.0", args); err == nil || !strings.HasSuffix(err.Error(), row.want) {
			t.Errorf("%s: %s is read as %+v, %v, want %s", row.name, row.args, o, err, row.want)
		}
	}
}
