package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"vllmtuner/studies/report"
)

// TestDamage overwrites random bytes in the files of studies, and then runs each command. No command may change its
// answer silently, or print an error of SQLite or Go. tuner run must continue the study, or say how to continue it.
// `make soak-damage` runs this test. As a control, the test can run another tuner, which DAMAGE_TUNER names. With
// DAMAGE_CONTROL=1, bad results of this other tuner do not fail the test.
func TestDamage(t *testing.T) {
	cases, err := strconv.Atoi(os.Getenv("DAMAGE_CASES"))
	if err != nil {
		t.Skip("make soak-damage runs this test, which takes thousands of commands; TestDamageIsFound in studies tries a few dozen cases")
	}
	rig := newDamageRig(t)
	var text strings.Builder
	for _, of := range []struct {
		name  string
		bytes int
		files func(name string) bool
		cases int
	}{
		{"one byte of a database or a snapshot", 1, isData, cases},
		{"64 bytes of a database or a snapshot", 64, isData, cases},
		{"one byte of any other file", 1, func(name string) bool { return !isData(name) }, cases / 5},
	} {
		found := rig.run(t, of.bytes, of.files, of.cases)
		fmt.Fprintf(&text, "| %s | %d | %d | %d | %d | %d | %d | %d | %d |\n", of.name, of.cases, found["unharmed"], found["behind"], found["refused"],
			found["restored"], found["says how"], found["wrong"], found["raw"]+found["stuck"])
		for _, bad := range []string{"wrong", "raw", "stuck"} {
			if found[bad] > 0 && os.Getenv("DAMAGE_CONTROL") == "" {
				t.Errorf("%s: %d cases are %s", of.name, found[bad], bad)
			}
		}
	}
	t.Logf("seed %d\n%s", rig.seed, text.String())
	if path := os.Getenv("DAMAGE_FILE"); path != "" {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		must(t, err)
		fmt.Fprintf(f, "\n%s, seed %d, %s:\n\n| overwritten | cases | no command notices | a reader uses an older snapshot | a reader refuses | run continues from a snapshot | run says what to do | wrong answers | raw errors, or no remedy |\n|---|---|---|---|---|---|---|---|---|\n%s",
			os.Getenv("DAMAGE_COMMIT"), rig.seed, time.Now().Format(time.DateOnly), text.String())
		must(t, f.Close())
	}
}

// isData reports whether a file in a study's directory is a database or a snapshot.
func isData(name string) bool {
	return strings.HasSuffix(name, ".db") && !strings.HasPrefix(name, "backup/") || strings.HasSuffix(name, ".delta")
}

// A damageRig has the files of undamaged studies, and the answers that the commands give to these studies.
type damageRig struct {
	tuner   string
	seed    uint64
	victims []*damageVictim
}

type damageVictim struct {
	file    string                  // path of the study file
	files   map[string][]byte       // contents of the study's directory
	answers []map[string]commandEnd // outputs by command, one map for each snapshot; the newest snapshot comes first
	run     commandEnd              // end of the run that continues the undamaged study
}

// A commandEnd is the output of a command and its exit code.
type commandEnd struct {
	out, err string
	code     int
}

// damageReaders are the commands that read published snapshots.
var damageReaders = [][]string{
	{"best", "victim", "-o", "json"},
	{"status", "victim", "-o", "json"},
	{"status", "victim"},
	{"list", "-o", "json"},
	{"export", "victim", "--format", "json"},
	{"export", "victim", "--format", "csv", "--probes"},
}

const damageStudy = `version: 1
name: victim
model: example/small-fast
server: {simulate: small-fast, args: [--max-model-len, "2048"]}
slo: {ttft_p99: 120ms, tpot_p99: 25ms}
workload: {kind: random, input_tokens: 128, output_tokens: 32, range_ratio: 0.3}
parameters:
  gpu-memory-utilization: {float: [0.60, 0.98], step: 0.01}
  max-num-seqs: {int: [2, 64], log: true}
budget: {confirm: 0, trials: 6}
probe: {seconds: 5, min_requests: 100, lead_in: 1s, start_rate: 20, max_rate: 60, tolerance: 0.3, max_probes: 5}
cache: {protocol: reset}
`

func newDamageRig(t *testing.T) *damageRig {
	t.Helper()
	rig := &damageRig{tuner: os.Getenv("DAMAGE_TUNER"), seed: 1}
	if rig.tuner == "" {
		rig.tuner = tunerPath(t)
	}
	if seed, err := strconv.ParseUint(os.Getenv("DAMAGE_SEED"), 10, 64); err == nil {
		rig.seed = seed
	}
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	must := func(args ...string) {
		if a := rig.ask(t, args...); a.code != 0 {
			t.Fatalf("tuner %s: %s%s", args, a.out, a.err)
		}
	}
	source, file := write("source.yaml", strings.Replace(damageStudy, "name: victim", "name: source", 1)), write("victim.yaml", damageStudy)
	must("run", source, "--root", dir)
	for name, kill := range map[string]bool{"finished": false, "killed": true} {
		root := filepath.Join(dir, name)
		must("import", file, filepath.Join(dir, "source"), "--root", root)
		if kill {
			rig.kill(t, file, root)
		} else {
			must("run", file, "--root", root)
		}
		rig.victims = append(rig.victims, rig.newVictim(t, file, filepath.Join(root, "victim")))
	}
	return rig
}

// kill runs a study, and kills its tuner when the fourth trial is done.
func (r *damageRig) kill(t *testing.T, file, root string) {
	t.Helper()
	run := launch(t, exec.CommandContext(t.Context(), r.tuner, "run", file, "--root", root))
	run.waitFor(t, "\ntrial  3")
	must(t, run.cmd.Process.Kill())
	run.end(t)
}

// newVictim records the answers of the commands to the undamaged study. It records them for the newest snapshot and for
// each older one.
func (r *damageRig) newVictim(t *testing.T, file, dir string) *damageVictim {
	t.Helper()
	v := &damageVictim{file: file, files: map[string][]byte{}}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err == nil {
			v.files[name], err = os.ReadFile(path)
		}
		return err
	})
	must(t, err)
	var snaps []string
	for name := range v.files {
		if strings.HasPrefix(name, "snap/0") {
			snaps = append(snaps, name)
		}
	}
	slices.Sort(snaps)
	older := map[string][]byte{}
	maps.Copy(older, v.files)
	delete(older, "snap/CURRENT")
	for len(snaps) > 0 { // snaps is sorted by age, and its last name is the newest
		v.answers = append(v.answers, r.read(t, v.lay(t, older)))
		delete(older, snaps[len(snaps)-1])
		snaps = snaps[:len(snaps)-1]
	}
	root := v.lay(t, v.files)
	v.run = r.goOn(t, v, root)
	if v.run.code != 0 {
		t.Fatalf("the undamaged study does not continue: %s", v.run.err)
	}
	return v
}

// lay writes the study's files to a new root directory.
func (v *damageVictim) lay(t *testing.T, files map[string][]byte) (root string) {
	t.Helper()
	root, err := os.MkdirTemp(t.TempDir(), "")
	for name, content := range files {
		path := filepath.Join(root, "victim", name)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(path), 0o755)
		}
		if err == nil {
			err = os.WriteFile(path, content, 0o644)
		}
	}
	must(t, err)
	return root
}

// ask runs one command and returns its output and exit code.
func (r *damageRig) ask(t *testing.T, args ...string) commandEnd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), r.tuner, args...)
	var out, err bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &err
	runErr := cmd.Run()
	if cmd.ProcessState == nil {
		t.Fatalf("tuner %s: %v", args, runErr)
	}
	return commandEnd{out.String(), err.String(), cmd.ProcessState.ExitCode()}
}

func (r *damageRig) read(t *testing.T, root string) map[string]commandEnd {
	t.Helper()
	all := map[string]commandEnd{}
	for _, args := range damageReaders {
		a := r.ask(t, append(slices.Clone(args), "--root", root)...)
		a.out = stripped(a.out, root)
		all[strings.Join(args, " ")] = a
	}
	return all
}

var (
	oldAge   = regexp.MustCompile(`(?m)^.* ago.*$`)
	behindIs = regexp.MustCompile(`(?s),?\s*"behind": "(?:[^"\\]|\\.)*"`)
)

// restoredNote matches the note that the study was restored.
var restoredNote = regexp.MustCompile(`note      on [^\n]* the study was restored from\n(?: {10}[^\n]*\n)*`)

// stripped removes from an output the ages, the directory, and the note about an older snapshot.
func stripped(out, root string) string {
	out = strings.ReplaceAll(out, root, "ROOT")
	return oldAge.ReplaceAllString(behindIs.ReplaceAllString(out, ""), "")
}

func (r *damageRig) goOn(t *testing.T, v *damageVictim, root string, more ...string) commandEnd {
	t.Helper()
	a := r.ask(t, append([]string{"run", v.file, "--root", root}, more...)...)
	a.out = restoredNote.ReplaceAllString(answer(a.out), "")
	return a
}

// rawWords matches error messages of SQLite, of Go, and of Go's packages.
var rawWords = regexp.MustCompile(`parsing time|invalid character|JSON|json:|sql|SQL|no such (table|column)|malformed|constraint|strconv|panic|goroutine|unmarshal|gzip|flate|unexpected EOF|disk I/O|disk image|syntax error|duplicate column|out of memory|unable to open|\*\*\*`)

// run tries a number of cases. In each case it damages n bytes of one file. The function mayDamage reports whether a
// file with that name may be damaged. run returns how many cases had each result.
func (r *damageRig) run(t *testing.T, n int, mayDamage func(name string) bool, cases int) map[string]int {
	t.Helper()
	var mu sync.Mutex
	total := map[string]int{}
	var work sync.WaitGroup
	next := make(chan int)
	for range 2 {
		work.Go(func() {
			for i := range next {
				found := r.runCase(t, rand.New(rand.NewPCG(r.seed, uint64(i)*1000+uint64(n))), r.victims[i%len(r.victims)], n, mayDamage)
				mu.Lock()
				for what := range found {
					total[what]++
				}
				mu.Unlock()
			}
		})
	}
	for i := range cases {
		next <- i
	}
	close(next)
	work.Wait()
	return total
}

// runCase damages n bytes of one file, and classifies the answers of the commands.
func (r *damageRig) runCase(t *testing.T, random *rand.Rand, v *damageVictim, n int, mayDamage func(name string) bool) (found map[string]bool) {
	found = map[string]bool{}
	var names []string
	size := 0
	for name, content := range v.files {
		if mayDamage(name) && len(content) > 0 {
			names = append(names, name)
			size += len(content)
		}
	}
	slices.Sort(names)
	at, name := random.IntN(size), ""
	for _, name = range names {
		if at < len(v.files[name]) {
			break
		}
		at -= len(v.files[name])
	}
	harmed := map[string][]byte{}
	maps.Copy(harmed, v.files)
	content := slices.Clone(v.files[name])
	for i := range min(n, len(content)-at) {
		content[at+i] ^= byte(1 + random.IntN(255))
	}
	harmed[name] = content
	root := v.lay(t, harmed)
	defer os.RemoveAll(filepath.Dir(root))
	where := fmt.Sprintf("%s at %d", name, at)
	say := func(what, command string, a commandEnd) {
		found[what] = true
		if what == "wrong" || what == "raw" || what == "stuck" {
			t.Logf("%s, %s: tuner %s, exit code %d: %.600s\n%.900s", what, where, command, a.code, a.err, a.out)
		}
	}
	for _, args := range damageReaders {
		command := strings.Join(args, " ")
		a := r.ask(t, append(slices.Clone(args), "--root", root)...)
		r.judge(v, command, a, root, say)
	}
	a := r.goOn(t, v, root)
	switch {
	case rawWords.MatchString(a.err):
		say("raw", "run", a)
	case a.code == v.run.code && a.out == v.run.out:
	case a.code == v.run.code:
		say("wrong", "run", a)
	case a.code == exitUsage && strings.Contains(a.err, "--from-snapshot"):
		b := r.goOn(t, v, root, "--from-snapshot")
		if say("restored", "run", b); b.code != v.run.code || b.out != v.run.out {
			say("stuck", "run --from-snapshot", b)
		}
	case a.code == exitUsage && (strings.Contains(a.err, "bring") || strings.Contains(a.err, "remove it") || strings.Contains(a.err, "To go on from there")):
		say("says how", "run", a)
	default:
		say("stuck", "run", a)
	}
	if len(found) == 0 {
		found["unharmed"] = true
	}
	return found
}

// judge classifies the answer of one reading command.
func (r *damageRig) judge(v *damageVictim, command string, a commandEnd, root string, say func(what, command string, a commandEnd)) {
	want := v.answers[0][command]
	printed := a.err
	if command == "list -o json" {
		var list report.List
		if json.Unmarshal([]byte(a.out), &list) == nil && len(list.Studies) == 1 {
			printed += list.Studies[0].Error + list.Studies[0].Behind
		}
	}
	out := stripped(a.out, root)
	is := func(one map[string]commandEnd) bool { return one[command].out == out && one[command].code == a.code }
	switch {
	case rawWords.MatchString(printed):
		say("raw", command, a)
	case out == want.out && a.code == want.code && printed == want.err:
	case command == "list -o json" && strings.Contains(printed, "it is damaged"), a.code == exitUsage && a.out == "":
		say("refused", command, a)
	case printed != want.err && slices.ContainsFunc(v.answers, is):
		say("behind", command, a)
	default:
		say("wrong", command, a)
	}
}
