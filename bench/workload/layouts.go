package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/render"
)

// Layouts are the known layouts of trace files.
var Layouts = []string{"burstgpt", "azure", "mooncake"}

// columns are the columns that each CSV layout needs: time, tokens of the prompt, tokens of the answer. Other columns
// are ignored.
//   - burstgpt: github.com/HPMLL/BurstGPT. Times are in seconds. The third release has two more columns.
//   - azure: github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024. Times are dates.
var columns = map[string][3]string{
	"burstgpt": {"timestamp", "request tokens", "response tokens"},
	"azure":    {"timestamp", "contexttokens", "generatedtokens"},
}

// blockTokens is the number of tokens in one block of Mooncake's hash_ids (github.com/kvcache-ai/Mooncake, traces of
// the FAST'25 paper). If two blocks have equal ids, their tokens are equal, and so are the tokens of all blocks before
// them.
const blockTokens = 512

// A traceReader reads a trace that records only lengths, not texts.
type traceReader struct {
	spec   Spec
	layout string
	column [3]int // indexes of the columns in a CSV file
	rows   []recordedRow
	failed int // rows without a prompt or an answer
}

// readTraced returns the rows of a trace, and notes for the source's name.
func readTraced(from io.Reader, spec Spec, bad *badRows) (rows []recordedRow, notes []string, err error) {
	t := &traceReader{spec: spec}
	if err := t.read(from, bad); err != nil {
		return nil, nil, err
	}
	notes = []string{t.layout}
	if t.failed > 0 {
		notes = append(notes, fmt.Sprintf("%d without prompt or answer left out", t.failed))
	}
	return t.rows, notes, nil
}

func (t *traceReader) read(from io.Reader, bad *badRows) error {
	in := newLineReader(from)
	head, err := in.next()
	if err == io.EOF {
		return errEmpty
	}
	if err == nil {
		err = t.recognise(string(head))
	}
	if err != nil {
		return fmt.Errorf("line %d: %w", in.number, err)
	}
	parse := t.parseCSV
	if t.layout == "mooncake" { // no head: the first line is a row
		parse = parseMooncake
		if err := in.check(bad, t.take(head, parse)); err != nil {
			return err
		}
	}
	err = in.forEach(bad, func(text []byte) error { return t.take(text, parse) })
	if err == nil && len(t.rows) == 0 {
		if err = bad.noUsableRow(); t.failed > 0 {
			err = fmt.Errorf("it has %s, but none has a prompt and an answer", render.Count(t.failed, "row"))
		}
	}
	return err
}

// take reads one row. It leaves out a row without a prompt or an answer. In BurstGPT an answer of 0 tokens means that
// the request failed.
func (t *traceReader) take(text []byte, parse func([]byte) (recordedRow, error)) error {
	row, err := parse(text)
	if err != nil {
		return err
	}
	if row.PromptTokens == 0 || row.OutputTokens == 0 {
		t.failed++
		return nil
	}
	if t.spec.OutputTokens > 0 {
		row.OutputTokens = t.spec.OutputTokens
	}
	row.Conversation = -1
	t.rows = append(t.rows, row)
	return nil
}

// recognise finds the layout from the first line of the file and checks it against the layout in the spec.
func (t *traceReader) recognise(head string) error {
	t.layout = t.spec.Layout
	if strings.HasPrefix(head, "{") {
		switch {
		case t.layout != "" && t.layout != "mooncake":
			return fmt.Errorf("is JSON, but layout %s is CSV: use layout mooncake", t.layout)
		case t.layout == "" && !strings.Contains(head, `"input_length"`):
			return errors.New(`is JSON without "input_length": for a log of requests use kind capture, for prompts kind jsonl`)
		}
		t.layout = "mooncake"
		return nil
	}
	if t.layout == "mooncake" {
		return errors.New("is not a JSON object, but layout mooncake has one on each line: leave the layout out")
	}
	names := strings.Split(strings.ToLower(head), ",")
	for i := range names {
		names[i] = strings.Trim(strings.TrimSpace(names[i]), `"`)
	}
	for _, layout := range slices.Sorted(maps.Keys(columns)) {
		missing := t.find(names, columns[layout])
		switch {
		case t.layout == layout && missing != "":
			return fmt.Errorf("has no column %q, which layout %s needs", missing, layout)
		case missing == "" && (t.layout == "" || t.layout == layout):
			t.layout = layout
			return nil
		}
	}
	return fmt.Errorf("is not the head of a known trace (%s): it needs the columns Timestamp,Request tokens,Response tokens or TIMESTAMP,ContextTokens,GeneratedTokens, or a JSON object on each line", Or(Layouts))
}

// find sets the indexes of the wanted columns. If a column is missing, find returns the name of that column.
func (t *traceReader) find(names []string, wanted [3]string) (missing string) {
	for i, want := range wanted {
		if t.column[i] = slices.Index(names, want); t.column[i] < 0 {
			return want
		}
	}
	return ""
}

// parseCSV reads a row of a CSV trace. No value in these traces has a comma, so splitting at commas is enough.
func (t *traceReader) parseCSV(text []byte) (row recordedRow, err error) {
	values := strings.Split(string(text), ",")
	if last := slices.Max(t.column[:]); len(values) <= last {
		return row, fmt.Errorf("has only %s, needs at least %d", render.Count(len(values), "column"), last+1)
	}
	value := func(i int) string { return strings.Trim(strings.TrimSpace(values[t.column[i]]), `"`) }
	if row.at, err = t.time(value(0)); err != nil {
		return row, err
	}
	if row.PromptTokens, err = count(columns[t.layout][1], value(1)); err != nil {
		return row, err
	}
	row.OutputTokens, err = count(columns[t.layout][2], value(2))
	return row, err
}

// azureTimes are the date formats of the two releases, 2023 and 2024.
var azureTimes = []string{"2006-01-02 15:04:05", "2006-01-02 15:04:05Z07:00", time.RFC3339}

func (t *traceReader) time(text string) (time.Duration, error) {
	if t.layout == "burstgpt" {
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return 0, fmt.Errorf("timestamp %q is not a number of seconds", text)
		}
		return clockTime(seconds)
	}
	for _, form := range azureTimes {
		if at, err := time.Parse(form, text); err == nil {
			return sinceEpoch(at)
		}
	}
	return 0, fmt.Errorf("timestamp %q is not a date such as 2023-11-16 18:15:46.68", text)
}

// sinceEpoch returns the time from the start of 1970 to a date.
func sinceEpoch(at time.Time) (time.Duration, error) {
	d := at.Sub(time.Unix(0, 0))
	if d < -maxTime || d > maxTime {
		return 0, fmt.Errorf("timestamp %s is too far from the present", at.Format(time.RFC3339))
	}
	return d, nil
}

// count reads a number of tokens. Some copies of the traces write 17 as 17.0.
func count(column, text string) (int, error) {
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n != math.Trunc(n) || math.Abs(n) > math.MaxInt32 {
		return 0, fmt.Errorf("%s %q is not a whole number", column, text)
	}
	return int(n), checkLength(column, int(n), 0)
}

// parseMooncake reads a row of Mooncake's layout. Its times are in milliseconds.
func parseMooncake(text []byte) (row recordedRow, err error) {
	var line struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  *int     `json:"input_length"`
		OutputLength *int     `json:"output_length"`
		HashIDs      []int64  `json:"hash_ids"`
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return row, explain(err)
	}
	switch {
	case line.Timestamp == nil:
		return row, errNoTime
	case line.InputLength == nil || line.OutputLength == nil:
		return row, errors.New(`needs "input_length" and "output_length"`)
	}
	if row.at, err = clockTime(*line.Timestamp / 1000); err != nil {
		return row, err
	}
	if err := checkLength("input_length", *line.InputLength, 0); err != nil {
		return row, err
	}
	if err := checkLength("output_length", *line.OutputLength, 0); err != nil {
		return row, err
	}
	row.PromptTokens, row.OutputTokens, row.blocks = *line.InputLength, *line.OutputLength, line.HashIDs
	if want := (row.PromptTokens + blockTokens - 1) / blockTokens; row.blocks != nil && len(row.blocks) != want {
		return row, fmt.Errorf("has %s for %s, must have %d: each id is a block of %d tokens", render.Count(len(row.blocks), "hash_id"), render.Count(row.PromptTokens, "token"), want, blockTokens)
	}
	for _, id := range row.blocks {
		if id < 0 || id >= 1<<48 {
			return row, fmt.Errorf("hash id %d must be from 0 to below 2^48", id)
		}
	}
	return row, nil
}

// draw returns the request with a prompt of random token ids. The prompt is drawn only when it is needed, because all
// prompts of a trace together do not fit in memory. Equal hash ids give equal tokens, even if the last block is
// shorter. Without hash ids no two prompts share anything.
func (r recordedRow) draw(seed uint64, number, vocab int) *Request {
	ids := make([]int32, r.PromptTokens)
	if r.blocks == nil {
		fill(chance(seed, traceDraws, 0, number), ids, vocab)
	}
	for i, id := range r.blocks {
		fill(chance(seed, blockDraws, 0, int(id)), ids[i*blockTokens:min((i+1)*blockTokens, len(ids))], vocab)
	}
	r.Tokens = ids
	return &r.Request
}
