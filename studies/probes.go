package studies

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// A probeRow is the stored form of a probe. The figures are JSON, because people query them by SQL. The series and the
// sketches are long, so they are compressed.
type probeRow struct {
	figures  string
	series   []byte // nil if the probe has no series
	sketches []byte
}

// A longPart is the content of the column named series: the values of a probe for each second and each request.
type longPart struct {
	Client bench.Series      `json:"client,omitempty"`
	Server *serverctl.Series `json:"server,omitempty"`
	Each   []string          `json:"each,omitempty"` // the field Each of every slo.Check of the verdict, in order
}

// rowOf splits a probe into the parts of its row.
func rowOf(p trial.Probe) (r probeRow, err error) {
	long := longPart{Client: p.Measurement.Series, Server: p.Server}
	checks := slices.Clone(p.Verdict.Checks)
	for i := range checks {
		long.Each = append(long.Each, checks[i].Each)
		checks[i].Each = ""
	}
	if len(long.Client) > 0 || long.Server != nil || strings.Join(long.Each, "") != "" {
		if r.series, err = compress(long); err != nil {
			return r, err
		}
	}
	if p.Measurement.Sketches != (bench.Sketches{}) {
		if r.sketches, err = compress(p.Measurement.Sketches); err != nil {
			return r, err
		}
	}
	p.Verdict.Checks, p.Measurement.Series, p.Measurement.Sketches, p.Server = checks, nil, bench.Sketches{}, nil
	r.figures, err = encode(p)
	return r, err
}

// probe returns the probe that rowOf has split.
func (r probeRow) probe() (p trial.Probe, err error) {
	if err := decode(r.figures, &p); err != nil {
		return p, err
	}
	if r.sketches != nil {
		if err := expand(r.sketches, &p.Measurement.Sketches); err != nil {
			return p, fmt.Errorf("sketches: %w", err)
		}
	}
	if r.series == nil { // before schema 3, the series was a part of the figures
		return p, nil
	}
	var long longPart
	if err := expand(r.series, &long); err != nil {
		return p, fmt.Errorf("series: %w", err)
	}
	if len(long.Each) != len(p.Verdict.Checks) {
		return p, fmt.Errorf("series: it has the requests judged by %s, but the verdict has %d", render.Count(len(long.Each), "limit"), len(p.Verdict.Checks))
	}
	p.Measurement.Series, p.Server = long.Client, long.Server
	for i, each := range long.Each {
		p.Verdict.Checks[i].Each = each
	}
	return p, nil
}

// compress returns v as gzipped JSON.
func compress(v any) ([]byte, error) {
	text, err := encode(v)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err = io.WriteString(w, text)
	if err := errors.Join(err, w.Close()); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// expand is the inverse of compress.
func expand(from []byte, v any) error {
	r, err := gzip.NewReader(bytes.NewReader(from))
	if err != nil {
		return err
	}
	text, err := io.ReadAll(io.LimitReader(r, maxExpanded+1))
	if err != nil {
		return err
	}
	if len(text) > maxExpanded {
		return fmt.Errorf("it expands to more than %s", render.Bytes(maxExpanded))
	}
	return json.Unmarshal(text, v)
}

// maxExpanded is the size limit of an expanded column, in bytes. A probe of an hour with ten thousand requests needs
// about 1.3 MB.
const maxExpanded = 64 << 20

// Record stores one probe of a running trial; it is on the disk when Record returns nil. An equal probe may be recorded
// twice. A different probe with the same Seq is an error.
func (s *Store) Record(number int, p trial.Probe) error {
	return s.write(fmt.Sprintf("record probe %d of trial %d", p.Seq, number), false, func(tx *transaction) error {
		is, err := rowOf(p)
		if err != nil {
			return err
		}
		t, err := trialRow(tx, number)
		if err != nil {
			return err
		}
		was := tx.rows(probesTable, "WHERE trial=? AND seq=?", number, p.Seq)
		switch {
		case len(was) > 0:
			return sameAgain(was[0].text("probe"), is.figures, func(p trial.Probe) (string, error) {
				again, err := rowOf(p) // before schema 3, the figures also had the long parts; rowOf removes them
				return again.figures, err
			})
		case isDone(t):
			return errors.New("the trial is finished already")
		}
		insertProbe(tx, number, p, is)
		addToLedger(tx, number, "probe", p.GPUTime.Seconds())
		setRunning(tx)
		return nil
	})
}

func insertProbe(tx *transaction, number int, p trial.Probe, r probeRow) {
	m := p.Measurement
	tx.insert(probesTable, []any{number, p.Seq, formatTime(time.Now()),
		p.Rate, p.Verdict.Pass, p.Verdict.Headroom, p.Verdict.Binding, m.Requests, m.Completed, m.Failed,
		m.TTFT.P99, m.TPOT.P99, m.OutputThroughput, m.MeanInFlight, p.HitRate, p.GPUTime.Seconds(), r.figures, longSum(r.series, r.sketches)},
		r.series, r.sketches)
}

// addToLedger records GPU time of a trial. The purpose says what the time was spent on, such as "probe".
func addToLedger(tx *transaction, number int, purpose string, seconds float64) {
	tx.insert(ledgerTable, []any{tx.nextID(ledgerTable), formatTime(time.Now()), number, purpose, seconds})
}

// probeColumns says whether a reader reads the series and sketches of probes too.
type probeColumns bool

const (
	long  probeColumns = true
	short probeColumns = false // reading takes a fifth of the time that it takes with the value long
)

// rowIn returns a probe's parts from a row. If the compressed columns do not match their checksum, it returns an error.
func (c probeColumns) rowIn(from row) (probeRow, error) {
	r := probeRow{figures: from.text("probe")}
	if c == short {
		return r, nil
	}
	r.series, r.sketches = from.bytes("series"), from.bytes("sketches")
	if longSum(r.series, r.sketches) != from.value("long_sum") {
		return r, damagedf("%s: its series or sketches were changed: their checksum does not match", from)
	}
	return r, nil
}
