package main

import (
	"encoding/csv"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"vllmtuner/realtime"
)

// manualTables is the directory with the tables of the sweeps that were run by hand.
const manualTables = repo + "/serverctl/sim/testdata/seed"

func readTable(t *testing.T, path string) [][]string {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	records, err := csv.NewReader(f).ReadAll()
	must(t, err)
	return records
}

// sweepExample runs the sweep of one study file in docs/examples. It returns the folder with the tables, and the
// printed output.
func sweepExample(t *testing.T, name string, flags ...string) (dir, printed string) {
	t.Helper()
	dir = t.TempDir()
	args := append([]string{"sweep", filepath.Join(repo, "docs", "examples", name+".yaml"), "--quiet", "--out", dir}, flags...)
	return dir, command(t, args...)
}

// sameLayout checks that a table has the same head and first column as the table of the manual sweep.
func sameLayout(t *testing.T, name string, got, want [][]string) {
	t.Helper()
	if strings.Join(got[0], ",") != strings.Join(want[0], ",") || len(got) < len(want) {
		t.Fatalf("%s has %d rows below %v, want %d below %v", name, len(got)-1, got[0], len(want)-1, want[0])
	}
	for r := range want {
		if got[r][0] != want[r][0] {
			t.Errorf("%s: row %d is %q, want %q", name, r, got[r][0], want[r][0])
		}
	}
}

// deviation returns the mean of |ln(got/want)| over the cells that were measured by hand.
func deviation(t *testing.T, name string, got, want [][]string) float64 {
	t.Helper()
	sum, n := 0.0, 0
	for r := 1; r < len(want); r++ {
		for c := 1; c < len(want[r]); c++ {
			if want[r][c] == "" {
				continue
			}
			x, errX := strconv.ParseFloat(got[r][c], 64)
			y, errY := strconv.ParseFloat(want[r][c], 64)
			if errX != nil || errY != nil || x <= 0 {
				t.Fatalf("%s: %q against %q", name, got[r][c], want[r][c])
			}
			sum += math.Abs(math.Log(x / y))
			n++
		}
	}
	return sum / float64(n)
}

// The example phase1 has the same layout as the manual sweep, and similar figures.
func TestPhase1IsNearTheManualSweep(t *testing.T) {
	realtime.Only(t, "simulates the whole manual sweep")
	t.Parallel()
	dir, printed := sweepExample(t, "phase1")
	for _, row := range []struct {
		table string
		limit float64 // largest mean deviation, in natural logarithms
	}{
		{"ttft_p99_ms", 0.16}, {"tpot_p99_ms", 0.08}, {"output_tok_s", 0.02}, {"max_concurrent", 0.08}, {"baseline_detail", 0.15},
	} {
		name := "phase1_" + row.table + ".csv"
		got, want := readTable(t, filepath.Join(dir, name)), readTable(t, filepath.Join(manualTables, name))
		if row.table == "baseline_detail" { // the last row counts failed requests, and 0 has no logarithm
			got, want = got[:len(want)-1], want[:len(want)-1]
		}
		sameLayout(t, name, got, want)
		off := deviation(t, name, got, want)
		if off > row.limit {
			t.Errorf("%s differs by %.1f %% on average, want at most %.0f %%", name, 100*off, 100*row.limit)
		}
		t.Logf("%-16s differs by %.1f %% on average", row.table, 100*off)
	}
	got, want := readTable(t, filepath.Join(dir, "phase1_slo.csv")), readTable(t, filepath.Join(manualTables, "phase1_slo.csv"))
	sameLayout(t, "phase1_slo.csv", got, want)
	same, cells := 0, 0
	for r := 1; r < len(want); r++ {
		for c := 1; c < len(want[r]); c++ {
			if want[r][c] != "" {
				cells++
				if got[r][c][:4] == want[r][c][:4] {
					same++
				}
			}
		}
	}
	t.Logf("%d of %d verdicts are the same", same, cells)
	if same < 75 || cells != 80 {
		t.Errorf("%d of %d verdicts agree with the manual sweep, want 75 of 80", same, cells)
	}
	simulated, manual := readTable(t, filepath.Join(dir, "phase1_winners.csv")), readTable(t, filepath.Join(manualTables, "phase1_winners.csv"))
	page, err := os.ReadFile(filepath.Join(repo, "docs", "sweep.md"))
	must(t, err)
	for r := 1; r < len(manual); r++ {
		if row := "\n| `" + manual[r][0] + "` | " + simulated[r][2] + " | " + manual[r][2] + " |\n"; !strings.Contains(string(page), row) {
			t.Errorf("docs/sweep.md has no row %q with the simulated and the measured highest rate", row)
		}
	}
	for _, name := range []string{"configs", "winners"} {
		name = "phase1_" + name + ".csv"
		sameLayout(t, name, readTable(t, filepath.Join(dir, name)), readTable(t, filepath.Join(manualTables, name)))
	}
	configs, measured := readTable(t, filepath.Join(dir, "phase1_configs.csv")), readTable(t, filepath.Join(manualTables, "phase1_configs.csv"))
	for r := 1; r < len(measured); r++ {
		x, errX := strconv.ParseFloat(configs[r][5], 64)
		y, errY := strconv.ParseFloat(measured[r][5], 64)
		if errX != nil || errY != nil || math.Abs(x-y) > 0.015 || strings.Join(configs[r][:5], ",") != strings.Join(measured[r][:5], ",") || configs[r][6] != measured[r][6] {
			t.Errorf("config %v, want %v", configs[r], measured[r])
		}
	}
	fits(t, printed)
}

// In this sweep no draft of EAGLE-3 is accepted. Drafting costs memory and time, so EAGLE-3 breaks the limits at a
// lower rate than the baseline.
func TestEagle3IsWorseThanTheBaseline(t *testing.T) {
	t.Parallel()
	plainTuner(t, "TestL4IsNearTheManualSweep runs the same code with the race detector")
	dir, printed := sweepExample(t, "eagle3")
	got, want := readTable(t, filepath.Join(dir, "eagle3_slo.csv")), readTable(t, filepath.Join(manualTables, "eagle3_ttft_p99_ms.csv"))
	sameLayout(t, "eagle3_slo.csv", got, want)
	if got[1][2] != "PASS" || got[8][2] != "FAIL (TTFT+TPOT)" {
		t.Errorf("EAGLE-3 gives %v and %v, want a pass at 0.5 req/s, and both limits broken at 3 req/s", got[1], got[8])
	}
	winners := readTable(t, filepath.Join(dir, "eagle3_winners.csv"))
	if percent, err := strconv.Atoi(winners[2][3]); err != nil || percent > -25 || winners[2][1] != "no" {
		t.Errorf("EAGLE-3 is %v, want at least a quarter less than the baseline", winners[2])
	}
	configs := readTable(t, filepath.Join(dir, "eagle3_configs.csv"))
	if kv, err := strconv.ParseFloat(configs[2][len(configs[2])-2], 64); err != nil || math.Abs(kv-50.09) > 0.02 {
		t.Errorf("with the drafter loaded the config is %v, want a KV cache of 50.09 GiB", configs[2])
	}
	if !strings.Contains(printed, "note: speculation was measured on a workload whose acceptance rate means nothing") {
		t.Error("the figures are not marked as meaningless for real prompts")
	}
	fits(t, printed)
}

// The simulated closed loop on the L4 has the same columns as the measured one, and similar figures. In the measurement
// a slow first request raised one p95; the simulation has no such request.
func TestL4IsNearTheManualSweep(t *testing.T) {
	t.Parallel()
	dir, printed := sweepExample(t, "l4")
	got, want := readTable(t, filepath.Join(dir, "l4_sweep.csv")), readTable(t, filepath.Join(manualTables, "l4_sweep.csv"))
	sameLayout(t, "l4_sweep.csv", got, want)
	for c, limit := range map[int]float64{1: 0.06, 2: 0.06, 3: 0.2, 5: 0.03, 6: 0.2, 7: 0.05, 8: 0.05} {
		column := func(table [][]string) (of [][]string) {
			for _, row := range table {
				of = append(of, []string{row[0], row[c]})
			}
			return of
		}
		if off := deviation(t, want[0][c], column(got), column(want)); off > limit {
			t.Errorf("%s differs by %.1f %% on average, want at most %.0f %%", want[0][c], 100*off, 100*limit)
		}
	}
	fits(t, printed)
}

// fits checks that every line fits into 80 columns and ends without blanks.
func fits(t *testing.T, printed string) {
	t.Helper()
	for line := range strings.Lines(printed) {
		line = strings.TrimSuffix(line, "\n")
		if utf8.RuneCountInString(line) > 80 || strings.HasSuffix(line, " ") {
			t.Errorf("a line is longer than 80 columns, or ends with blanks: %q", line)
		}
	}
}

// After Ctrl-C a sweep finishes the current rate, ends the server, and prints what it measured.
func TestAnInterruptedSweepPrintsWhatItHas(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "slow.yaml")
	text := `version: 1
name: slow
model: example/small-fast
server: {command: [tuner, sim, serve, --sim-profile=small-fast], args: [--max-model-len, "2048"], gpu: none}
slo: {ttft_p90: 10s}
workload: {kind: random, input_tokens: 64, output_tokens: 8}
sweep: {configs: {a: {}, b: {}}, rates: [10, 20], requests: 10, warm_up: {requests: 0}, cooldown: 10m}
`
	must(t, os.WriteFile(path, []byte(text), 0o644))
	r := launch(t, tunerCommand(t.Context(), t, "sweep", path, "--root", dir))
	r.waitFor(t, "a at 10 req/s: PASS")
	record, ok := serverRecord(filepath.Join(dir, "slow_sweep"))
	if !ok {
		t.Error("a server runs, but no record of it is kept")
	}
	other := exec.CommandContext(t.Context(), tunerPath(t), "sweep", path, "--root", dir, "--quiet")
	out, err := other.CombinedOutput()
	if other.ProcessState.ExitCode() != exitOwned || !strings.Contains(string(out), "another tuner uses this folder: pid ") || !strings.HasSuffix(string(out), "\nwait until it ends, or stop it there with Ctrl-C or SIGTERM\n") {
		t.Errorf("a second sweep of the same file ends with %v: %s", err, out)
	}
	must(t, r.cmd.Process.Signal(syscall.SIGINT))
	text, code := r.end(t) // much sooner than the cooldown would
	if code != exitInterrupted {
		t.Errorf("interrupted, the sweep ends with %d\n%s", code, text)
	}
	for _, want := range []string{"\n10.00 PASS -\n", "\n20.00    - -\n", "a (baseline)  10.00        -  not measured\nb                 -        -  not measured\n\nAt 10"} {
		if !strings.Contains(text, want) {
			t.Errorf("the tables have no %q:\n%s", want, text)
		}
	}
	if !strings.Contains(text, "the sweep was interrupted; the tables hold what was measured") {
		t.Errorf("after the interrupt the sweep says\n%s", text)
	}
	if err := syscall.Kill(record.PID, 0); err == nil {
		t.Errorf("server process %d still runs", record.PID)
	}
}
