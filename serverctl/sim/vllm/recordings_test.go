package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"vllmtuner/serverctl/sim"
)

// The tests of this file compare the simulated server with recordings of real vLLM (testdata/recordings/README.md).

// recordedArgs are the args of the recorded servers.
var recordedArgs = []string{"/models/tiny", "--served-model-name", "tiny", "--max-model-len", "128", "--max-num-seqs", "8",
	"--max-num-batched-tokens", "2048", "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager", "--api-key", "key", "--host", "127.0.0.1"}

// A recordedAnswer is the answer of a real server to one request of requests.json.
type recordedAnswer struct {
	Name   string
	Status int
	Type   string // content type; "" when there is no body
	Body   string
}

// A recordedRequest is one request of requests.json.
type recordedRequest struct {
	Name, Method, Path string
	Body               json.RawMessage
	Headers            map[string]*string // headers to set; nil removes the header
}

func readJSON[T any](t *testing.T, name string) (v T) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "recordings", name))
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}

// Answers have the same status, content type and JSON as the recorded ones, with all fields in the same order. The test
// does not compare ids, times, texts, and token counts of texts. A real model may end an answer early, and a busy real
// server joins some chunks of a stream; the test ignores both.
func TestAnswersAreThoseOfVLLM(t *testing.T) {
	t.Setenv("VLLM_SERVER_DEV_MODE", "1")
	requests := readJSON[[]recordedRequest](t, "requests.json")
	for _, version := range sim.Versions {
		t.Run(version, func(t *testing.T) {
			url := serveFast(t, version, recordedArgs...)
			recorded := readJSON[[]recordedAnswer](t, version+"/answers.json")
			same := 0
			for _, want := range recorded {
				i := slices.IndexFunc(requests, func(r recordedRequest) bool { return r.Name == want.Name })
				if i < 0 {
					t.Errorf("%s: requests.json lacks this request; record again", want.Name)
					continue
				}
				got := sendRecorded(t, url, requests[i])
				a, b := masked(got), masked(want)
				if !unfinished.MatchString(b) { // the real server joined all tokens into one chunk
					a = unfinished.ReplaceAllString(a, "")
				}
				if a != b {
					t.Errorf("%s:\n got %s\nwant %s", want.Name, a, b)
					continue
				}
				same++
			}
			t.Logf("%d of %d answers are the same as vLLM %s gave", same, len(recorded), version)
		})
	}
}

// sendRecorded sends one request as record.py does.
func sendRecorded(t *testing.T, url string, r recordedRequest) (got recordedAnswer) {
	t.Helper()
	var body io.Reader
	headers := http.Header{"Authorization": {"Bearer key"}}
	if r.Body != nil {
		text := []byte(r.Body)
		var plain string
		if json.Unmarshal(text, &plain) == nil {
			text = []byte(plain)
		}
		body = bytes.NewReader(text)
		headers.Set("Content-Type", "application/json")
	}
	for name, value := range r.Headers {
		headers.Del(name)
		if value != nil {
			headers.Set(name, *value)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), r.Method, url+r.Path, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = headers
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return recordedAnswer{Name: r.Name, Status: resp.StatusCode, Type: resp.Header.Get("Content-Type"), Body: string(text)}
}

var masks = []struct {
	of *regexp.Regexp
	by string
}{
	{regexp.MustCompile(`"id":"(cmpl|chatcmpl|modelperm)-[0-9a-f]{16}"`), `"id":"$1"`},
	{regexp.MustCompile(`"created":\d+`), `"created":0`},
	{regexp.MustCompile(`"(text|content)":"(?:[^"\\]|\\.)+"`), `"$1":"words"`},
	{regexp.MustCompile(`"prompt":"(?:[^"\\]|\\.)*"`), `"prompt":"words"`},
	{regexp.MustCompile(`"system_fingerprint":"vllm-([\d.]+)-[0-9a-f]{8}"`), `"system_fingerprint":"$1"`},
	{regexp.MustCompile(`"finish_reason":"stop"`), `"finish_reason":"length"`}, // a real model may end an answer early
	{regexp.MustCompile(`"tokens":\[[\d,]*\]`), `"tokens":[]`},
}

// tokenCounts matches token counts, which depend on the tokenizer.
var tokenCounts = regexp.MustCompile(`("(?:prompt_tokens|total_tokens|completion_tokens|count)":)\d+`)

// ofTexts matches the names of requests whose prompt is a text, or whose answer a real model ended early.
var ofTexts = regexp.MustCompile(`^chat|^tokenize|no key, tokenize|of a text|two texts|too many tokens together`)

// masked returns an answer without the parts that may differ.
func masked(a recordedAnswer) string {
	body := a.Body
	for _, m := range masks {
		body = m.of.ReplaceAllString(body, m.by)
	}
	if ofTexts.MatchString(a.Name) {
		body = tokenCounts.ReplaceAllString(body, "${1}0")
	}
	if strings.Contains(a.Name, "stream") {
		body = chunksOnce(body)
	}
	return fmt.Sprintf("%d %s %s", a.Status, a.Type, body)
}

// unfinished matches every chunk of a completion except the last.
var unfinished = regexp.MustCompile(`(?m)^data: .*"text":"words","logprobs":null,"finish_reason":null.*\n`)

// chunksOnce removes repeated chunks from a stream, because a busy server may have joined some chunks. It also removes
// the token counts of single chunks, and sorts the chunks by the index of their answer.
func chunksOnce(body string) string {
	var kept []string
	for chunk := range strings.SplitSeq(body, "\n\n") {
		if strings.Contains(chunk, `"finish_reason"`) {
			chunk = tokenCounts.ReplaceAllString(chunk, "${1}0")
		}
		if !slices.Contains(kept, chunk) {
			kept = append(kept, chunk)
		}
	}
	slices.SortStableFunc(kept, func(a, b string) int { // chunks of several answers come in any order
		return strings.Compare(index.FindString(a), index.FindString(b))
	})
	return strings.Join(kept, "\n")
}

var index = regexp.MustCompile(`"index":\d+`)

// serveAs starts a server of a version of vLLM with the profile small-fast. The server is ready at once.
func serveAs(t *testing.T, version string, args ...string) (string, *logBuffer) {
	t.Helper()
	p := profile(t, "small-fast")
	p.StartUp = sim.StartUp{}
	return serveWith(t, &Server{Profile: p, Version: version}, args...)
}

// serveFast is like serveAs, but each step takes half a millisecond. It returns only the URL.
func serveFast(t *testing.T, version string, args ...string) string {
	t.Helper()
	p := profile(t, "small-fast")
	p.StartUp, p.Step = sim.StartUp{}, sim.StepCost{Fixed: 0.5, RooflineExponent: 1}
	url, _ := serveWith(t, &Server{Profile: p, Version: version}, args...)
	return url
}

// The samples of /metrics have the same names, labels and help texts as in the recording, in the same order. Only the
// metrics of the Python process and of its HTTP library are missing.
func TestMetricsAreThoseOfVLLM(t *testing.T) {
	notOfVLLM := regexp.MustCompile(`^(# HELP |# TYPE )?(python_|process_|http_)`)
	for _, version := range sim.Versions {
		t.Run(version, func(t *testing.T) {
			url := serveFast(t, version, recordedArgs...)
			for _, r := range readJSON[[]recordedRequest](t, "requests.json") {
				if strings.HasPrefix(r.Name, "completion") {
					sendRecorded(t, url, r)
				}
			}
			got := sendRecorded(t, url, recordedRequest{Method: "GET", Path: "/metrics"})
			text, err := os.ReadFile(filepath.Join("testdata", "recordings", version, "metrics.txt"))
			if err != nil {
				t.Fatal(err)
			}
			want := slices.DeleteFunc(linesOfMetrics(string(text)), notOfVLLM.MatchString)
			lines := linesOfMetrics(got.Body)
			for i := range min(len(lines), len(want)) {
				if lines[i] != want[i] {
					t.Fatalf("line %d of the metrics:\n got %s\nwant %s", i+1, lines[i], want[i])
				}
			}
			if len(lines) != len(want) {
				t.Fatalf("the metrics have %d lines, want %d", len(lines), len(want))
			}
		})
	}
}

// linesOfMetrics returns the lines of /metrics without values. It also removes the values of the labels of
// cache_config_info.
func linesOfMetrics(text string) (lines []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if !strings.HasPrefix(line, "#") {
			line = line[:strings.LastIndexByte(line, ' ')]
		}
		if strings.HasPrefix(line, "vllm:cache_config_info") {
			line = regexp.MustCompile(`="[^"]*"`).ReplaceAllString(line, "")
		}
		lines = append(lines, line)
	}
	return lines
}

// Each version has its own flags. A test of serverctl compares all flags with the help.
func TestEachVersionHasItsOwnFlags(t *testing.T) {
	for _, row := range []struct {
		version, flag string
		taken         bool
	}{
		{"0.14.1", "--swap-space=4", true}, {"0.32.0", "--swap-space=4", false}, {"0.33.0", "--swap-space=4", false},
		{"0.14.1", "--shutdown-timeout=4", false}, {"0.33.0", "--shutdown-timeout=4", true},
		{"0.32.0", "--disable-prefix-caching", false}, {"0.33.0", "--disable-prefix-caching", true},
	} {
		_, err := profile(t, "small-fast").ParseArgsOf(row.version, []string{"m", row.flag})
		if (err == nil) != row.taken {
			t.Errorf("%s %s: %v", row.version, row.flag, err)
		}
	}
}

// All lines that a simulated server logs at its start and its end are lines of a real server, in the same order. The
// test logs how many lines of the real server are missing. These are lines about a CPU, lines about the configuration,
// and other lines that serverctl does not read.
func TestTheLogIsThatOfVLLM(t *testing.T) {
	// The recordings lack lines that begin with these texts. Only a server on a GPU, or a server with
	// VLLM_DISABLE_LOG_LOGO=1, logs them. The recorded servers ran on a CPU and logged a logo.
	unrecorded := []string{"Model loading took", "Using cache directory", "torch.compile t", "Available KV cache memory", "Graph capturing finished",
		"Starting to load model", "Loading model from scratch", "GPU KV cache size", "vLLM server version"}
	for _, version := range sim.Versions {
		t.Run(version, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", "recordings", version, "server.log"))
			if err != nil {
				t.Fatal(err)
			}
			recorded := logForms(string(text))
			said := slices.DeleteFunc(logForms(lifeOf(t, version)), func(line string) bool {
				return slices.ContainsFunc(unrecorded, func(begin string) bool { return strings.Contains(line, "] "+begin) })
			})
			common := slices.DeleteFunc(slices.Clone(recorded), func(line string) bool { return !slices.Contains(said, line) })
			if !slices.Equal(said, common) {
				t.Errorf("the lines are:\n%s\nof these the recording has:\n%s", strings.Join(said, "\n"), strings.Join(common, "\n"))
			}
			t.Logf("%d lines are recorded ones, %d recorded lines are missing", len(common), len(recorded)-len(common))
		})
	}
}

// lifeOf returns the log of a server that starts and is stopped at once.
func lifeOf(t *testing.T, version string) string {
	p := profile(t, "small-fast")
	p.StartUp = sim.StartUp{}
	log := new(logBuffer)
	s := &Server{Profile: p, Version: version, Out: log}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, slices.Concat(recordedArgs, []string{"--port", freePort(t)})) }()
	await(t, "the server is ready", func() bool { return strings.Contains(log.String(), "Application startup complete") })
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return log.String()
}

var (
	logSource = regexp.MustCompile(`\[[\w.]+:\d+\]`)
	logNumber = regexp.MustCompile(`pid=\d+|\d\d-\d\d \d\d:\d\d:\d\d|\d+(?:[.,:]\d+)*`)
	logModel  = regexp.MustCompile(`with config: .*`)
)

// logForms returns the lines of a log with their process, level and text. It leaves out times, sources, numbers and the
// model's values.
func logForms(text string) (forms []string) {
	for line := range strings.Lines(text) {
		line = logSource.ReplaceAllString(strings.TrimRight(line, " \n"), "[source]")
		line = logModel.ReplaceAllString(logNumber.ReplaceAllString(line, "#"), "model")
		if strings.HasPrefix(line, "(") || strings.HasPrefix(line, "INFO:") {
			forms = append(forms, line)
		}
	}
	return forms
}

// vLLM logs the values that it has read from its command line. The simulator must log the same values. In this table ·
// is a space within a word.
func TestCommandLinesAreReadAsByVLLM(t *testing.T) {
	for _, row := range []struct{ name, version, args, want string }{
		{"names and values", "0.14.1", "m --max_num_seqs 8 --max-num-batched-tokens=1k --max-model-len 2K", `{'model_tag': 'm', 'model': 'm', 'max_model_len': 2048, 'max_num_batched_tokens': 1000, 'max_num_seqs': 8}`},
		{"flags before the model", "0.14.1", "--max-num-seqs 8 m", `{'model_tag': 'm', 'model': 'm', 'max_num_seqs': 8}`},
		{"an abbreviation", "0.14.1", "m --gpu-mem 0.5", `{'model_tag': 'm', 'model': 'm', 'gpu_memory_utilization': 0.5}`},
		{"switches", "0.14.1", "m --no-enable-prefix-caching --enforce-eager", `{'model_tag': 'm', 'model': 'm', 'enforce_eager': True, 'enable_prefix_caching': False}`},
		{"a switch with its inverse", "0.33.0", "m --disable-prefix-caching", `{'model_tag': 'm', 'model': 'm', 'enable_prefix_caching': False}`},
		{"defaults are left out", "0.14.1", "m --port 8000 --gpu-memory-utilization 0.9", `{'model_tag': 'm', 'model': 'm'}`},
		{"several values", "0.14.1", "m --served-model-name a b --max-num-seqs 8", `{'model_tag': 'm', 'model': 'm', 'served_model_name': ['a', 'b'], 'max_num_seqs': 8}`},
		{"a flag that may come again", "0.14.1", "m --middleware a --middleware b", `{'model_tag': 'm', 'middleware': ['a', 'b'], 'model': 'm'}`},
		{"keys of a JSON flag", "0.14.1", "m --compilation-config.mode 3", `{'model_tag': 'm', 'model': 'm', 'compilation_config': {'mode': 3}}`},
		{"several keys of one flag", "0.14.1", "m --speculative-config.method=eagle3 --port 1 --speculative_config.num_speculative_tokens 3", `{'model_tag': 'm', 'port': 1, 'model': 'm', 'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 3}}`},
		{"JSON with a space", "0.14.1", `m --speculative-config={"method":·"eagle3",·"num_speculative_tokens":·3}`, `{'model_tag': 'm', 'model': 'm', 'speculative_config': {'method': 'eagle3', 'num_speculative_tokens': 3}}`},
		{"JSON with a space behind an abbreviation", "0.14.1", `--speculative-c={"method":·"ngram","num_speculative_tokens":·3} m`, `{'model_tag': 'm', 'model': 'm', 'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 3}}`},
		{"a name with a space", "0.14.1", "m --served-model-name=a·b", `{'model_tag': 'm', 'model': 'm', 'served_model_name': ['a b']}`},
		{"an unknown flag with a space is the model", "0.14.1", "--no-such=a·b", `{'model_tag': '--no-such=a b', 'model': '--no-such=a b'}`},
		{"a separator", "0.14.1", "--port 1 -- m", `{'model_tag': 'm', 'port': 1, 'model': 'm'}`},
		{"not a number", "0.14.1", "m --swap-space nan", `{'model_tag': 'm', 'model': 'm', 'swap_space': nan}`},
		{"JSON behind an equals sign", "0.14.1", `m --speculative-config={"method":"ngram","num_speculative_tokens":3}`, `{'model_tag': 'm', 'model': 'm', 'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 3}}`},
		{"an optimization level", "0.14.1", "m -O1", `{'model_tag': 'm', 'model': 'm', 'optimization_level': '1'}`},
		{"API keys are shown in 0.14.1", "0.14.1", "m --api-key k", `{'model_tag': 'm', 'api_key': ['k'], 'model': 'm'}`},
		{"API keys are hidden since 0.32.0", "0.32.0", "m --api-key k", `{'model_tag': 'm', 'api_key': '***', 'model': 'm'}`},
	} {
		args := strings.Fields(row.args)
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "·", " ")
		}
		o, err := profile(t, "small-fast").ParseArgsOf(row.version, args)
		if got := nonDefault(o); err != nil || got != row.want {
			t.Errorf("%s: %s is read as %s, %v, want %s", row.name, row.args, got, err, row.want)
		}
	}
}

// Prometheus's own parser reads the metrics of every version.
func TestMetricsAreReadByPrometheus(t *testing.T) {
	for _, version := range sim.Versions {
		t.Run(version, func(t *testing.T) {
			url, _ := serveAs(t, version, "--speculative-config", `{"method":"ngram","num_speculative_tokens":2}`)
			text := sendRecorded(t, url, recordedRequest{Method: "GET", Path: "/metrics"}).Body
			problems, err := promlint.New(strings.NewReader(text)).Lint() // Lint parses the text first
			if err != nil {
				t.Errorf("the parser fails: %v", err)
			}
			t.Logf("the linter has %d remarks on vLLM's names", len(problems))
			if !strings.Contains(text, "\nvllm:spec_decode_num_drafts_total{") {
				t.Error("no counter of drafts although speculation is on")
			}
		})
	}
}
