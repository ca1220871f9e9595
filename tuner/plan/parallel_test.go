package plan

import (
	"strings"
	"testing"

	"vllmtuner/tuner/studyfile"
)

// fileWith returns a study file with the given lines under server and parameters, and further top-level lines.
func fileWith(t *testing.T, server, parameters, more string) *studyfile.File {
	t.Helper()
	text := "version: 1\nname: s\nmodel: m\nslo: {ttft_p99: 1s}\nworkload: {kind: production}\nserver:\n  command: [vllm, serve]\n  " +
		server + "\nparameters:\n  max-num-seqs: {int: [16, 64]}\n  " + parameters + "\n" + more
	file, err := studyfile.Parse("s.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// A study that asks for more GPUs than there are is refused. The error names the place in the file, and a remedy.
func TestAServerNeedsEnoughGPUs(t *testing.T) {
	const tp, both = "tensor-parallel-size: [1, 2, 4, 8]", "tensor-parallel-size: [1, 2, 4]\n  pipeline-parallel-size: {int: [1, 2]}"
	for _, row := range []struct {
		name, server, parameters, more string
		usable                         int
		want                           string // "" for no error
		text                           string // what the plan says
	}{
		{"one GPU", "port: 0", "async-scheduling: bool", "", 1, "", ""},
		{"enough for the largest value", "port: 0", tp, "", 8, "", "servers use 1 to 8 GPUs; the best has the highest capacity, whatever its number of GPUs (objective: capacity)"},
		{"too few for a value", "port: 0", tp, "", 4,
			"s.yaml:11:3: parameters.tensor-parallel-size: tensor-parallel-size=8 asks for 8 GPUs, and the server can use only 4 GPUs here; search only smaller values", ""},
		{"too few for a product", "port: 0", both, "", 4,
			"s.yaml:12:3: parameters.pipeline-parallel-size: pipeline-parallel-size=2 tensor-parallel-size=4 asks for 8 GPUs, and the server can use only 4 GPUs here; " +
				`search only smaller values, or add to constraints: "pipeline-parallel-size * tensor-parallel-size <= 4"`, ""},
		{"a constraint excludes the product", "port: 0", both, `constraints: ["pipeline-parallel-size * tensor-parallel-size <= 4"]`, 4, "", "servers use 1 to 4 GPUs"},
		{"fixed replicas count", `args: [-dp, "2"]`, both, "", 8,
			`add to constraints: "pipeline-parallel-size * tensor-parallel-size <= 4"`, "servers use 2 to 16 GPUs"},
		{"server.args", `args: [-tp, "2"]`, "async-scheduling: bool", "", 1, "s.yaml:8:3: server.args asks for 2 GPUs, and the server can use only 1 GPU here; lower the parallel sizes", ""},
		{"server.current", `current: [--tensor-parallel-size, "4"]`, tp, "", 2, "s.yaml:8:3: server.current asks for 4 GPUs", ""},
		{"a sweep's config", "port: 0", "async-scheduling: bool", `sweep: {rates: [1], configs: {one: {}, two: {args: [-tp, "2"]}}}`, 1, "two asks for 2 GPUs", ""},
		{"several machines", `args: [--distributed-executor-backend, ray]`, tp, "", 4, "", "servers use 1 to 8 GPUs"},
		{"per GPU", "port: 0", tp, "objective: capacity_per_gpu", 8, "", "servers use 1 to 8 GPUs; the best has the highest capacity per GPU"},
		{"per GPU with one number of GPUs", `args: [-tp, "2"]`, "async-scheduling: bool", "objective: capacity_per_gpu", 2, "",
			"every server uses 2 GPUs, so objective: capacity_per_gpu changes only the unit of the figures"},
	} {
		file := fileWith(t, row.server, row.parameters, row.more)
		all, err := layouts(file)
		if err != nil {
			t.Fatal(err)
		}
		m := Machine{server: &Server{file: file}}
		err = m.checkLayouts(all, row.usable)
		switch {
		case row.want == "" && err != nil:
			t.Errorf("%s: %v, want no error", row.name, err)
		case row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)):
			t.Errorf("%s: %v, want %s", row.name, err, row.want)
		}
		if text := gpusText(file); row.text != "" && !strings.Contains(text, row.text) || row.want == "" && row.text == "" && text != "" {
			t.Errorf("%s: the plan says %q, want %q", row.name, text, row.text)
		}
	}
}
