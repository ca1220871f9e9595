package main

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"vllmtuner/realtime"
)

// goWords matches words from the errors of Go's standard library. Users must not see these words.
var goWords = regexp.MustCompile(`\b(open|lstat|stat|read|write|mkdir|unlinkat|fork/exec|readdirent|statfs) /|\b(open|lstat|stat|mkdir) [\w.]+: |strconv\.|(^|\s)(json|yaml): |goroutine|panic|` +
	`runtime error|flag provided but not defined|parse error|%!|<nil>|0x[0-9a-f]{6}|exec: "|dial tcp|lookup .* on |unexpected end of JSON|invalid character`)

// atLine matches the beginning of a message about a line of a study file. Such a message may be long: it lists all
// mistakes in the file.
var atLine = regexp.MustCompile(`^\S+:\d+(:\d+)?: `)

// hangTime is far longer than any command here takes on a busy machine.
const hangTime = 45 * time.Second

// wrongs has the files with which tests make mistakes: a valid study, and paths that commands must refuse.
type wrongs struct {
	dir      string
	study    string            // path of a valid study file
	root     string            // root directory; flagsRefuse runs the study named small in it
	noFiles  map[string]string // paths that do not lead to a regular file; the key says what they lead to
	badFiles []string          // paths of files with invalid contents
}

func newWrongs(t *testing.T) *wrongs {
	t.Helper()
	dir := t.TempDir()
	deep := filepath.Join(t.TempDir(), "a", "b", "c") // so deep that the wrong value "../.." does not lead to another test's folder
	must(t, os.MkdirAll(deep, 0o700))
	t.Chdir(deep) // a command may write a file whose name is a wrong value
	w := &wrongs{dir: dir, root: filepath.Join(dir, "root")}
	text := fmt.Sprintf(smallStudy, inVirtual, 1, 2.0)
	w.study = filepath.Join(dir, "study.yaml")
	w.noFiles = map[string]string{
		"nothing": filepath.Join(dir, "nowhere", "file.yaml"), "a directory": filepath.Join(dir, "folder.yaml"), "a pipe": filepath.Join(dir, "pipe.yaml"),
		"a device": "/dev/zero", "a file as a directory": filepath.Join(w.study, "x.yaml"), "a loop": filepath.Join(dir, "loop.yaml"), "a long name": filepath.Join(dir, strings.Repeat("x", 5000)+".yaml"),
	}
	w.badFiles = []string{filepath.Join(dir, "binary.yaml"), filepath.Join(dir, "empty.yaml"), filepath.Join(dir, "list.yaml")}
	must(t, os.WriteFile(w.study, []byte(text), 0o600), os.Mkdir(w.noFiles["a directory"], 0o700), unix.Mkfifo(w.noFiles["a pipe"], 0o600),
		os.Symlink("loop.yaml", w.noFiles["a loop"]),
		os.WriteFile(w.badFiles[0], []byte("\x00\x01\xff\xfe\x1b[31m"), 0o600),
		os.WriteFile(w.badFiles[1], nil, 0o600),
		os.WriteFile(w.badFiles[2], []byte("[1, 2"), 0o600))
	return w
}

// check runs a command line. If the command fails, its message must be helpful: it has at most three lines, no word of
// goWords, and one of the given names.
func (w *wrongs) check(t *testing.T, args []string, codes []int, names ...string) {
	t.Helper()
	var stdout, stderr string
	var code int
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		stdout, stderr, code = inProcess(t, args...)
	}()
	select {
	case <-ended:
	case <-time.After(hangTime):
		t.Errorf("tuner %.300q hangs", args)
		return
	}
	shown := fmt.Sprintf("tuner %s", strings.Join(args, " "))
	if len(shown) > 300 {
		shown = shown[:300] + "…"
	}
	_, last, failed := strings.Cut("\n"+stderr, "\ntuner: ")
	if !slices.Contains(codes, code) {
		t.Errorf("%s\n\tends with %d, want one of %d\n%.600s%.600s", shown, code, codes, stdout, stderr)
		return
	}
	if code == 0 {
		return
	}
	if !failed {
		t.Errorf("%s\n\tends with %d and does not say why: %q", shown, code, stderr)
		return
	}
	if found := goWords.FindString(last); found != "" {
		t.Errorf("%s\n\thas words of Go's, %q: %.600s", shown, found, last)
	}
	if n := strings.Count(strings.TrimSpace(last), "\n") + 1; n > 3 && !atLine.MatchString(last) {
		t.Errorf("%s\n\ttakes %d lines: %.900s", shown, n, last)
	}
	if !slices.ContainsFunc(names, func(name string) bool { return strings.Contains(last, name) }) {
		t.Errorf("%s\n\tnames none of %.200q: %.600s", shown, names, last)
	}
}

// wrongValues returns values that no flag of f's kind accepts, and values that only some flags of that kind accept.
func wrongValues(f cli.Flag) (never, perhaps []string) {
	switch f.(type) {
	case *cli.IntFlag:
		return []string{"abc", "", "1.5", "NaN", "99999999999999999999", "1e3", "٣"}, []string{"-1", "-9223372036854775808", "9223372036854775807", "2000000000000"}
	case *cli.Uint64Flag:
		return []string{"abc", "", "-1", "1.5", "99999999999999999999"}, nil
	case *cli.Float64Flag:
		return []string{"abc", "", "1e400", "1,5"}, []string{"NaN", "Inf", "-Inf", "-1", "1e300"}
	case *cli.DurationFlag:
		return []string{"abc", "", "5", "1d", "999999999h"}, []string{"-1s", "0s", "2500000h"}
	case *cli.BoolFlag:
		return []string{"=maybe", "="}, nil
	}
	return nil, []string{"", " ", "-", "--", "nope", "\xff", "🙂", "NaN", "-1", "a,b", "1:2000000000000:1", "0:1:1e-12", "=", ":", "://", "../..", "/dev/zero", strings.Repeat("x", 5000)}
}

// Each flag of each command refuses each value that it cannot take.
func TestEachFlagRefusesWhatItCannotTake(t *testing.T) {
	realtime.Only(t, "thousands of command lines")
	flagsRefuse(t, func(_ string, values []string) []string { return values })
}

// Each flag of each command refuses one value from each list of wrongValues, and one of its misspellings. The length of
// the flag's name picks them.
func TestEachFlagRefusesSomeOfWhatItCannotTake(t *testing.T) {
	flagsRefuse(t, func(flag string, values []string) []string {
		if len(values) == 0 {
			return nil
		}
		return values[len(flag)%len(values):][:1]
	})
}

// flagsRefuse gives each flag of each command wrong values, and misspells the flag. It uses what pick chooses from each
// list of wrongValues and from the misspellings.
func flagsRefuse(t *testing.T, pick func(flag string, values []string) []string) {
	t.Helper()
	w := newWrongs(t)
	if out, errs, code := inProcess(t, "run", w.study, "--root", w.root); code != 0 {
		t.Fatalf("run ends with %d: %s%s", code, out, errs)
	}
	missing := w.noFiles["nothing"]
	t.Setenv("KUBECONFIG", missing) // no command may reach a real cluster
	bases := map[string][]string{
		"init": {}, "check": {missing}, "run": {missing}, "demo": {"--print"}, "list": {"--root", w.root}, "status": {"small", "--root", w.root}, "best": {"small", "--root", w.root},
		"bench": {"--url", "http://127.0.0.1:1", "--rate", "1"}, "sweep": {missing}, "logs": {"small", "0", "--root", w.root}, "doctor": {},
		"export": {"small", "--root", w.root, "--format", "csv"}, "import": {w.study, missing, "--root", w.root}, "delete": {"nothing", "--root", w.root},
		"restore":       {"nothing"},
		"guard":         {"--deployment", "vllm", "--container", "vllm", "--job", "tune-small"},
		"sim calibrate": {missing, "-o", filepath.Join(w.dir, "profile.yaml")},
	}
	all := map[string]*cli.Command{}
	for _, c := range commands(nil) {
		if len(c.Subcommands) == 0 {
			all[c.Name] = c
		}
		for _, s := range c.Subcommands {
			if !s.Hidden && !s.SkipFlagParsing {
				all[c.Name+" "+s.Name] = s
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		base, ok := bases[name]
		if !ok {
			t.Errorf("no row for tuner %s", name)
			continue
		}
		for _, f := range all[name].Flags {
			flag := f.Names()[0]
			with := func(value string) []string {
				word := strings.Fields(name)
				if _, isBool := f.(*cli.BoolFlag); isBool {
					return slices.Concat(word, base, []string{"--" + flag + value})
				}
				return slices.Concat(word, base, []string{"--" + flag, value})
			}
			never, perhaps := wrongValues(f)
			for _, value := range pick(flag, never) {
				w.check(t, with(value), []int{exitUsage}, "--"+flag)
			}
			for _, value := range pick(flag, perhaps) {
				w.check(t, with(value), []int{0, exitFailed, exitUsage, exitNothingMet}, "--"+flag, strings.ReplaceAll(flag, "-", " "), value, strings.ToValidUTF8(value, "\ufffd"), missing, "127.0.0.1:1", "nothing", "no study", "not ready", "no Kubernetes cluster is configured")
			}
			for _, alike := range pick(flag, []string{"-" + flag + "x", "--" + flag + "x", "--x" + flag}) {
				w.check(t, slices.Concat(strings.Fields(name), base, []string{alike}), []int{exitUsage}, "x")
			}
		}
	}
}

// Commands refuse each file that is missing, is no regular file, or has contents of another kind.
func TestEachFileMayBeSomethingElse(t *testing.T) {
	realtime.Only(t, "gives each command dozens of files")
	w := newWrongs(t)
	bench := func(flags ...string) func(path string) []string {
		return func(path string) []string {
			return append([]string{"bench", "--url", "http://127.0.0.1:1", "--rate", "1"}, append(slices.Clip(flags), path)...)
		}
	}
	readers := map[string]func(path string) []string{
		"check":           func(path string) []string { return []string{"check", path, "--root", w.root} },
		"run":             func(path string) []string { return []string{"run", path, "--root", w.root} },
		"sweep":           func(path string) []string { return []string{"sweep", path, "--root", w.root} },
		"status":          func(path string) []string { return []string{"status", path, "--root", w.root} },
		"best":            func(path string) []string { return []string{"best", path, "--root", w.root} },
		"logs":            func(path string) []string { return []string{"logs", path, "0", "--root", w.root} },
		"export":          func(path string) []string { return []string{"export", path, "--root", w.root, "-f", "csv"} },
		"delete":          func(path string) []string { return []string{"delete", path, "--root", w.root} },
		"import, study":   func(path string) []string { return []string{"import", path, w.study, "--root", w.root} },
		"import, results": func(path string) []string { return []string{"import", w.study, path, "--root", w.root} },
		"calibrate": func(path string) []string {
			return []string{"sim", "calibrate", path, "-o", filepath.Join(w.dir, "p.yaml")}
		},
		"profile":  func(path string) []string { return []string{"sim", "serve", "m", "--sim-profile", path} },
		"jsonl":    bench("--workload", "jsonl", "--path"),
		"sharegpt": bench("--workload", "sharegpt", "--path"),
		"trace":    bench("--workload", "trace", "--path"),
		"capture":  bench("--workload", "capture", "--path"),
		"arrivals": bench("--arrivals", "trace", "--trace"),
		"key":      bench("--api-key-file"),
		"authority": func(path string) []string {
			return []string{"bench", "--url", "https://127.0.0.1:1", "--rate", "1", "--ca-file", path}
		},
		"root":       func(path string) []string { return []string{"status", "small", "--root", path} },
		"list":       func(path string) []string { return []string{"list", "--root", path} },
		"run's root": func(path string) []string { return []string{"run", w.study, "--root", path} },
	}
	for _, name := range slices.Sorted(maps.Keys(readers)) {
		for _, what := range slices.Sorted(maps.Keys(w.noFiles)) {
			path := w.noFiles[what]
			if name == "list" && what == "a directory" || name == "run's root" && (what == "a directory" || what == "nothing") {
				continue // the command list accepts an empty root directory, and the command run makes its root directory
			}
			w.check(t, readers[name](path), []int{exitFailed, exitUsage}, path, filepath.Base(path), filepath.Dir(path))
		}
		for _, path := range w.badFiles {
			if name != "key" { // the file of an API key may contain any text
				w.check(t, readers[name](path), []int{exitFailed, exitUsage}, path)
			}
		}
	}
}

// Messages about mistakes in a study file, or in a whole command line, name the mistake and its remedy.
func TestMistakesAreNamedWithTheirRemedy(t *testing.T) {
	w := newWrongs(t)
	text, err := os.ReadFile(w.study)
	must(t, err)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close()
	changed := func(old, new string) string {
		t.Helper()
		if !strings.Contains(string(text), old) {
			t.Fatalf("the study has no %q", old)
		}
		path := filepath.Join(t.TempDir(), "changed.yaml")
		must(t, os.WriteFile(path, []byte(strings.ReplaceAll(string(text), old, new)), 0o600))
		return path
	}
	served := "command: [sh, -c, 'exit 1']"
	fresh := filepath.Join(w.dir, "fresh")
	grid := strings.NewReplacer("int: [2, 12], log: true", "int: [2, 2000000000000]", "name: tpe", "name: grid", inVirtual, served).Replace(string(text))
	gridded, sweep := filepath.Join(w.dir, "grid.yaml"), filepath.Join(w.dir, "sweep.yaml")
	for path, text := range map[string]string{gridded: grid, sweep: "version: 1\nname: s\nmodel: m\nserver: {simulate: small-fast}\nslo: {ttft_p99: 1s}\nworkload: {kind: random}\n" +
		"sweep: {rates: {from: 1, to: 2000000000000, step: 1}, configs: {a: {}}}\n"} {
		must(t, os.WriteFile(path, []byte(text), 0o600))
	}
	for _, row := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"a grid of 2,000,000,000,000 points", []string{"check", gridded, "--skip-help", "--root", fresh}, 0, ""},
		{"a sweep of 2,000,000,000,000 rates", []string{"sweep", sweep, "--root", fresh}, exitUsage, "rates"},
		{"a byte order mark", []string{"check", changed("version: 1", "\ufeffversion: 1"), "--root", fresh}, 0, ""},
		{"a word for a number in fixed args", []string{"check", changed(inVirtual+"\n  args: [--max-model-len, \"2048\"]", served+"\n  args: [--max-model-len, abc]"), "--skip-help", "--root", fresh},
			exitUsage, "argument --max-model-len"},
		{"a port that is a word", []string{"run", w.study, "--root", fresh, "--listen", "127.0.0.1:http!"}, exitUsage, "--listen 127.0.0.1:http!: write HOST:PORT"},
		{"a port that is too large", []string{"run", w.study, "--root", fresh, "--listen", ":99999"}, exitUsage, "with a port from 0 (any that is free) to 65535"},
		{"no port", []string{"run", w.study, "--root", fresh, "--listen", "localhost"}, exitUsage, "--listen localhost: write HOST:PORT"},
		{"a port that is taken", []string{"run", w.study, "--root", fresh, "--listen", taken.Addr().String()}, exitUsage, "another program listens there; choose another port"},
		{"an address of another machine", []string{"run", w.study, "--root", fresh, "--listen", "192.0.2.1:9090"}, exitUsage, "give an address of this machine"},
		{"a guard without a Job", []string{"guard", "--deployment", "vllm", "--container", "vllm"}, exitUsage, "--job is missing"},
		{"a guard with an argument", []string{"guard", "vllm"}, exitUsage, "takes no argument"},
		{"a guard that does not wait", []string{"guard", "--drain-timeout", "0s"}, exitUsage, "--drain-timeout 0s: write a time such as 15m"},
		{"a wait of less than nothing", []string{"run", w.study, "--root", fresh, "--wait-for-owner", "-1s"}, exitUsage, "--wait-for-owner -1s: write a time such as 15m"},
		{"a command misspelled", []string{"stauts", "small"}, exitUsage, `did you mean "status"?`},
		{"a command of sim misspelled", []string{"sim", "calibrat", "small"}, exitUsage, `did you mean "calibrate"?`},
		{"a flag misspelled", []string{"list", "--rooot", "x"}, exitUsage, `--rooot: there is no such flag; did you mean --root?`},
		{"a flag before the command", []string{"--rooot", "x"}, exitUsage, "--rooot"},
		{"a flag without its value", []string{"list", "--root"}, exitUsage, "--root needs a value"},
		{"a range of 2,000,000,000,000 rates", []string{"bench", "--url", "http://127.0.0.1:1", "--rate", "1:2000000000000:1"}, exitUsage, "rate"},
		{"a range of 2,000,000,000,000 streams", []string{"bench", "--url", "http://127.0.0.1:1", "--concurrency", "1:2000000000000:1"}, exitUsage, "concurrency"},
		{"more requests than a run has", []string{"bench", "--url", "http://127.0.0.1:1", "--rate", "100000", "--seconds", "31000000"}, exitUsage, "lower the rate, --seconds or --lead-in"},
		{"a parameter of 2,000,000,000,000 values", []string{"check", changed("int: [2, 12], log: true", "int: [2, 2000000000000]"), "--root", fresh}, exitUsage, "max_num_seqs"},
		{"a float parameter of 8,500,000,000,000 values", []string{"check", changed("float: [0.60, 0.95], step: 0.05", "float: [0.1, 0.95], step: 0.0000000000001"), "--root", fresh}, 0, ""},
		{"2,000,000,000,000 trials", []string{"check", changed("trials: 1", "trials: 2000000000000"), "--root", fresh}, exitUsage, "trials"},
		{"2,000,000,000,000 requests of a probe", []string{"check", changed("min_requests: 50", "min_requests: 2000000000000"), "--root", fresh}, exitUsage, "min_requests"},
		{"a window of 2,000,000,000,000 seconds", []string{"check", changed("seconds: 2", "seconds: 2e12"), "--root", fresh}, exitUsage, "seconds"},
		{"a workload of 2,000,000,000,000 requests", []string{"check", changed("requests: 500", "requests: 2000000000000"), "--root", fresh}, exitUsage, "requests"},
		{"too few requests for a verdict", []string{"bench", "--url", "http://127.0.0.1:1", "--rate", "1", "--requests", "50", "--slo", "ttft_p99=1s"}, exitUsage, "take --requests 100"},
		{"too few requests for the verdicts of a study", []string{"check", changed("ttft_p95: 120ms", "ttft_p99: 120ms"), "--root", fresh}, exitUsage, "min_requests"},
	} {
		t.Run(row.name, func(t *testing.T) { w.check(t, row.args, []int{row.code}, row.says) })
	}
	if _, err := os.Stat(fresh); err == nil {
		t.Errorf("a refused command made %s", fresh)
	}
}
