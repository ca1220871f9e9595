package report

import (
	"strings"
	"testing"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial"
)

func TestGPUTimeIsItemised(t *testing.T) {
	const s, m, h = time.Second, time.Minute, time.Hour
	for _, row := range []struct {
		name  string
		spent trial.Spent
		gpu   time.Duration // as the trials count it
		sim   bool
		want  string
	}{
		{"a study of an older tuner", nil, 3 * h, false, "GPU time  3 h 00 min"},
		{"hours have no seconds", trial.Spent{trial.Windows: 2*h + 29*s, trial.Starting: 50*m + 31*s, trial.Stopping: 60 * s, trial.Idling: 20 * s},
			2*h + 51*m, true, "GPU time  2 h 52 min simulated: starts 51 min, windows 2 h 00 min, other 1 min"},
		{"minutes have seconds", trial.Spent{trial.LeadIn: 65 * s, trial.Lost: 2 * m}, 3 * m, false, "GPU time  3 min 5 s: lead-in 1 min 5 s, lost 2 min"},
		{"an older tuner began the study", trial.Spent{trial.Windows: h}, 3 * h, false, "GPU time  3 h 00 min: windows 1 h 00 min, not itemised 2 h 00 min"},
		{"time without a server", trial.Spent{trial.Windows: h, trial.Choosing: 90 * s, trial.Predicting: 30 * s}, h, false,
			"GPU time  1 h 00 min: windows 1 h 00 min\n          and 2 min without a server: predicting 30 s, choosing 1 min 30 s"},
		{"a moment without a server", trial.Spent{trial.Windows: h, trial.Choosing: 900 * time.Millisecond}, h, false, "GPU time  1 h 00 min: windows 1 h 00 min"},
	} {
		l := lines{render.Text{Width: 120}}
		l.addGPUTime(row.spent, Summary{GPUSeconds: row.gpu.Seconds(), Simulated: row.sim})
		if got := strings.TrimSpace(l.String()); got != row.want {
			t.Errorf("%s:\n%s\nwant\n%s", row.name, got, row.want)
		}
	}
}

// Each part has words.
func TestEachPartHasWords(t *testing.T) {
	for _, part := range trial.Parts {
		if partNames[part] == "" {
			t.Errorf("%s has no words", part)
		}
	}
}
