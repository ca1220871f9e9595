package bench

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestASeriesIsStoredInColumns(t *testing.T) {
	for _, row := range []struct {
		name   string
		series Series
		want   string
	}{
		{"a list for each figure that is not always zero", Series{{Sent: 1, InFlight: 1}, {Sent: 2, Ended: 1, Chunks: 30, InFlight: 2}}, `{"chunks":[0,30],"ended":[0,1],"in_flight":[1,2],"sent":[1,2]}`},
		{"seconds in which nothing happened", Series{{}, {}}, `{"sent":[0,0]}`},
		{"no seconds", Series{}, `{"sent":[]}`},
	} {
		text, err := json.Marshal(row.series)
		if err != nil || string(text) != row.want {
			t.Errorf("%s: %s, %v, want %s", row.name, text, err, row.want)
		}
		var back Series
		if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(back, row.series) {
			t.Errorf("%s: read back as %+v, %v, want %+v", row.name, back, err, row.series)
		}
	}
	if text, err := json.Marshal(Measurement{}); err != nil || strings.Contains(string(text), "series") {
		t.Errorf("a measurement without a series: %s, %v", text, err)
	}
}

func TestAMeasurementSurvivesTheStore(t *testing.T) {
	run := Run{Samples: manySamples(200, 1), Series: Series{{Sent: 200, Chunks: 7}, {Ended: 150, InFlight: 50}}, Lateness: Lateness{CPU: 5}}
	m := Measure(run, Scope{Rate: 2, Length: time.Minute, Rules: Rules0141, Limits: allLimits})
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var back Measurement
	if err := json.Unmarshal(text, &back); err != nil || !reflect.DeepEqual(back, m) {
		t.Errorf("read back as %+v, %v, want %+v", back, err, m)
	}
}

func TestASeriesWithUnequalColumnsIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		`{"sent":[1],"ended":[1,2]}`: `series: the column "ended" has 2 seconds, but the column "sent" has 1`,
		`{"ended":[1]}`:              `series: the column "ended" has 1 seconds, but the column "sent" has 0`,
		`[1]`:                        "series: json: cannot unmarshal array",
	} {
		var s Series
		if err := json.Unmarshal([]byte(text), &s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
}
