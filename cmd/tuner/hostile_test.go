package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"vllmtuner/foreign"
)

// attack would set a terminal's title, change its colour, reverse and hide text, and overwrite the start of its line.
const attack = "A\x1b]0;owned\x07\x1b[31mB\u009b1mC\u202eD\u2066E\u200bF\rG\x7f\u0085\ufeff\U000e0041\u2028H\xffI"

// attackName is attack without slashes, so that it can be a file name.
var attackName = strings.ReplaceAll(attack, "/", "")

// wild returns the handler of a hostile server. If the path of a request ends in failingPath, the answer is an error.
func wild(failingPath string) http.HandlerFunc {
	text, _ := json.Marshal(attack)
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header()["X-Attack"] = []string{"\u009b31m\u202e"}
		switch {
		case strings.HasSuffix(r.URL.Path, failingPath):
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = io.WriteString(w, `{"error":{"message":`+string(text)+`}}`+attack)
		case r.Method == http.MethodGet:
			_, _ = io.WriteString(w, `{"data":[{"id":`+string(text)+`}]}`)
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "data: {\"choices\":[{\"text\":%s}]}\n\n: %s\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}\n\n"+
				"data: {\"error\":{\"message\":%s}}\n\n", text, attack, text)
		}
	}
}

// checkHarmless fails the test if the output has control sequences, or if JSON or YAML output cannot be parsed.
func checkHarmless(t *testing.T, args []string, stdout, stderr string) {
	t.Helper()
	for name, got := range map[string]string{"standard output": stdout, "standard error": stderr} {
		if plain := foreign.Text(got); plain != got {
			t.Errorf("%q: %s has control sequences: %q", args, name, got)
		}
	}
	i := slices.Index(args, "-o")
	if i < 0 || stdout == "" {
		return
	}
	read := map[string]func([]byte, any) error{"json": json.Unmarshal, "yaml": func(text []byte, v any) error { return yaml.Unmarshal(text, v) }}[args[i+1]]
	if read == nil {
		return
	}
	for document := range strings.SplitSeq(stdout, "\n---\n") {
		var v any
		if err := read([]byte(document), &v); err != nil {
			t.Errorf("%q: standard output is not valid %s: %v\n%s", args, args[i+1], err, stdout)
		}
	}
}

// No output format passes a control sequence from a server to the terminal.
func TestAServerCannotControlTheTerminal(t *testing.T) {
	for _, fail := range []string{"/v1/models", "/v1/completions", "nothing"} {
		server := httptest.NewServer(wild(fail))
		for _, format := range []string{"text", "csv", "json", "yaml"} {
			for _, load := range [][]string{{"--rate", "50"}, {"--concurrency", "1,2"}} {
				args := append([]string{"bench", "--url", server.URL, "--requests", "3", "--lead-in", "0s", "--input-tokens", "8", "--output-tokens", "1",
					"--metadata", "note=" + strings.ReplaceAll(attack, "\xff", ""), "-o", format}, load...)
				stdout, stderr, code := inProcess(t, args...)
				if fail != "nothing" && code == 0 || stdout+stderr == "" {
					t.Errorf("%q ends with %d and says %q %q", args, code, stdout, stderr)
				}
				checkHarmless(t, args, stdout, stderr)
			}
		}
		server.Close()
	}
}

// No command passes a control sequence from files, file names, arguments or the environment to the terminal.
func TestFilesAndNamesCannotControlTheTerminal(t *testing.T) {
	dir := filepath.Join(t.TempDir(), attackName)
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o644))
		return path
	}
	quoted := strings.NewReplacer("\x1b", `\x1b`, "\a", `\a`, "\x7f", `\x7f`, "\r", `\r`, "\u0085", `\x85`, "\u009b", `\x9b`, "\ufeff", `\ufeff`, "\xff", "").Replace(attack)
	study := write("study.yaml", fmt.Sprintf(smallStudy, inVirtual, 2, 2.0))
	broken := write("broken.yaml", "version: 1\n\""+quoted+"\": 1\n")
	raw := write("raw.yaml", "version: 1\n"+attack+": 1\n")
	server := write("server.yaml", strings.Replace(fmt.Sprintf(smallStudy, overHTTP, 2, 2.0), "command: [tuner,", "command: [\""+quoted+"\",", 1))
	profile := write("profile.yaml", "\""+quoted+"\": 1\n")
	data := write("data.jsonl", "{\"prompt\": 1, \""+attack+"\n")
	result := write("runs/"+attackName+".json", `{"model_id": "`+strings.ToValidUTF8(strings.NewReplacer("\x1b", `\u001b`, "\a", `\u0007`, "\r", `\r`).Replace(attack), "")+`"}`)
	write(filepath.Join("root", attackName, "slots", "000000000001"), attack)
	root := filepath.Join(dir, "root")
	if stdout, stderr, code := inProcess(t, "run", study, "--root", root); code != 0 {
		t.Fatalf("run ends with %d: %s%s", code, stdout, stderr)
	}
	write(filepath.Join("root", "small", "logs", "trial-0000.log"), attack+"\n"+attack)
	write(filepath.Join("root", attackName, "current"), attack)
	t.Setenv("CUDA_VISIBLE_DEVICES", attack)
	t.Setenv("TUNER_SIM_PROFILE", attack)
	var all [][]string
	for _, format := range []string{"text", "json", "yaml"} {
		all = append(all, []string{"list", "--root", root, "-o", format}, []string{"list", "--root", attack, "-o", format},
			[]string{"status", "small", "--root", root, "-o", format}, []string{"best", "small", "--root", root, "-o", format}, []string{"best", attack, "-o", format},
			[]string{"doctor", "--root", root, "-o", format}, []string{"doctor", "--nvidia-smi", attack, "-o", format})
	}
	all = append(all, []string{attack}, []string{"run", "--" + attack}, []string{"run", attack}, []string{"check", broken}, []string{"check", raw}, []string{"run", server, "--root", root},
		[]string{"check", server, "--root", root}, []string{"logs", "small", "0", "--root", root}, []string{"logs", "small", attack, "--root", root}, []string{"delete", attack, "--root", root},
		[]string{"delete", filepath.Join(root, attackName)}, []string{"import", study, result, "--root", root}, []string{"import", study, "--set", attack + "=1", result, "--root", root},
		[]string{"import", study, filepath.Join(dir, "runs"), "--root", root, "--dry-run"},
		[]string{"export", "small", "--root", root, "-f", "csv"}, []string{"export", "small", "--root", root, "-f", "json"}, []string{"export", "small", "--root", root, "-f", attack},
		[]string{"export", "small", "--root", root, "-f", "json", "-o", filepath.Join(dir, "none", "x")}, []string{"sweep", study, "--root", root}, []string{"demo", "--sampler", attack},
		[]string{"sim", "serve", "m", "--sim-profile", profile}, []string{"sim", "serve", "m"}, []string{"sim", "serve", attack, "--" + attack}, []string{"sim", "calibrate", attack},
		[]string{"bench", "--url", "http://127.0.0.1:1/" + attack, "--rate", "1"}, []string{"bench", "--url", "http://127.0.0.1:1", "--rate", attack},
		[]string{"bench", "--url", "http://127.0.0.1:1", "--rate", "1", "--workload", "jsonl", "--path", data},
		[]string{"bench", "--url", "http://127.0.0.1:1", "--rate", "1", "--workload", attack}, []string{"init"})
	for _, args := range all {
		stdout, stderr, _ := inProcess(t, args...)
		if stdout+stderr == "" {
			t.Errorf("%q says nothing", args)
		}
		checkHarmless(t, args, stdout, stderr)
	}
}

// Only main.go uses the standard streams, so all output goes through the foreign.Writers of app and printError.
func TestOnlyMainUsesTheStandardStreams(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || file == "main.go" {
			continue
		}
		text, err := os.ReadFile(file)
		must(t, err)
		for _, stream := range []string{"os.Stdout", "os.Stderr", "println(", "fmt.Print(", "fmt.Printf(", "fmt.Println(", "log.Print"} {
			if strings.Contains(strings.ReplaceAll(string(text), "fmt.Fprint", ""), stream) {
				t.Errorf("%s has %s: print through the writers of cli.App, which remove control sequences", file, stream)
			}
		}
	}
}
