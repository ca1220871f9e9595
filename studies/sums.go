package studies

import (
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
)

// A table describes a table whose rows have a checksum in the column sum. Readers use such tables alone.
type table struct {
	name    string
	columns []string // the columns that the checksum covers, in its order; the key first
	key     int      // number of key columns
	row     string   // format of a row's name for people, given its key
}

func newTable(name, row string, key int, columns string) *table {
	return &table{name: name, columns: strings.Fields(columns), key: key, row: row}
}

// The order of columns must never change: it is part of the checksum.
var (
	studiesTable = newTable("studies", "the study's own row (%v)", 1, `id name seed file state note created updated commits holds`)
	worldTable   = newTable("world", "%q of the world", 1, `key value kind`)
	trialsTable  = newTable("trials", "trial %v", 1, `number origin point args state began ended version outcome class cause evidence
		capacity_rps passed_rps failed_rps lowest_rps highest_rps std_err doubt bound binding in_flight kv_tokens gpu_seconds simulated start_seconds
		log near_rps near_headroom changed holds_rows holds_sum`)
	resultsTable = newTable("results", "the result of trial %v", 1, `trial result`)
	probesTable  = newTable("probes", "trial %v, probe %v", 2, `trial seq recorded rate pass headroom binding requests completed failed ttft_p99_ms tpot_p99_ms
		output_tok_s in_flight hit_rate gpu_seconds probe long_sum`)
	ledgerTable = newTable("ledger", "line %v of the ledger", 1, `id time trial what gpu_seconds`)
	priorsTable = newTable("priors", "prior trial %v", 1, `id source trial`)
	eventsTable = newTable("events", "event %v", 1, `id time kind text trial`)

	changesTable = newTable("changes", "change %[2]v of event %[1]v", 2, `event seq fact was now was_in_trial`)
	sourcesTable = newTable("sources", "the source %v", 1, `name path world`)
)

// heldTables are the tables whose rows and sums are in the study's row.
var heldTables = []*table{worldTable, trialsTable, resultsTable, probesTable, ledgerTable, priorsTable, eventsTable, changesTable, sourcesTable}

// column returns the index of a column of the table.
func (t *table) column(name string) int { return slices.Index(t.columns, name) }

// cells are a row's values as SQLite gives them: the table's columns, the checksum, then any further columns.
type cells []any

func (c cells) text(i int) string {
	switch v := c[i].(type) {
	case string:
		return v
	case []byte:
		return string(v)
	}
	return ""
}

func (c cells) bytes(i int) []byte {
	b, _ := c[i].([]byte)
	return b
}

func (c cells) integer(i int) int64 {
	switch v := c[i].(type) {
	case int64:
		return v
	case float64:
		return int64(v)
	}
	return 0
}

func (c cells) real(i int) float64 {
	switch v := c[i].(type) {
	case float64:
		return v
	case int64:
		return float64(v)
	}
	return 0
}

// sum computes the checksum of a row. It does not depend on how SQLite stores a value: a whole number has the same sum
// in any column.
func (t *table) sum(row cells) int64 {
	b := make([]byte, 0, 1024) // on the stack, except for long rows
	b = append(append(b, t.name...), 0)
	for _, v := range row[:len(t.columns)] {
		b = appendValue(b, v)
	}
	return int64(xxhash.Sum64(b))
}

func appendValue(b []byte, v any) []byte {
	switch v := v.(type) {
	case int64:
		return binary.LittleEndian.AppendUint64(append(b, 'n'), uint64(v))
	case float64:
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return appendValue(b, int64(v))
		}
		return binary.LittleEndian.AppendUint64(append(b, 'f'), math.Float64bits(v))
	case string:
		b = binary.LittleEndian.AppendUint64(append(b, 't'), uint64(len(v)))
		return append(b, v...)
	case []byte:
		b = binary.LittleEndian.AppendUint64(append(b, 'b'), uint64(len(v)))
		return append(b, v...)
	}
	return append(b, '-')
}

// valuesOf converts Go values to the types that SQLite returns.
func valuesOf(values []any) (cells, error) {
	row := make(cells, len(values))
	for i, v := range values {
		is, err := driver.DefaultParameterConverter.ConvertValue(v)
		if err != nil {
			return nil, err
		}
		switch v := is.(type) {
		case bool:
			is = int64(0)
			if v {
				is = int64(1)
			}
		case []byte:
			if v == nil {
				is = nil
			}
		}
		row[i] = is
	}
	return row, nil
}

// longSum is the checksum of a probe's compressed columns, which most readers skip. It is nil for a probe without them.
func longSum(series, sketches []byte) any {
	if series == nil && sketches == nil {
		return nil
	}
	return int64(xxhash.Sum64(appendValue(appendValue(nil, series), sketches)))
}

// A holding is a number of rows and the sum of their checksums. The order of the rows does not matter.
type holding struct {
	Rows int64 `json:"rows"`
	Sum  int64 `json:"sum"`
}

func (h holding) plus(sum int64) holding     { return holding{h.Rows + 1, h.Sum + sum} }
func (h holding) minus(sum int64) holding    { return holding{h.Rows - 1, h.Sum - sum} }
func (h holding) without(of holding) holding { return holding{h.Rows - of.Rows, h.Sum - of.Sum} }

// holdings has the holding of each table by its name. It is stored in the study's row, so that a missing or foreign row
// shows.
type holdings map[string]holding

// check compares a table with its stored holding.
func (h holdings) check(t *table, found holding) error {
	return checkRows(h[t.name], found, "table "+t.name)
}

func checkRows(stored, found holding, of string) error {
	switch {
	case found.Rows != stored.Rows:
		return damagedf("%s has %d rows, and %d were stored", of, found.Rows, stored.Rows)
	case found.Sum != stored.Sum:
		return damagedf("%s has different rows than were stored", of)
	}
	return nil
}

func damagedf(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errDamaged, fmt.Errorf(format, args...))
}

// A querier is a database or a transaction.
type querier interface {
	Query(query string, args ...any) (*sql.Rows, error)
}

// read calls each for the rows that match a condition, after checking their checksums. The cells are reused for the
// next row. more are further columns, which the checksum does not cover.
func (t *table) read(q querier, more, where string, args []any, each func(row cells) error) (err error) {
	columns := strings.Join(t.columns, ", ") + ", sum" + more
	rows, err := q.Query("SELECT "+columns+" FROM "+t.name+" "+where, args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	row := make(cells, len(t.columns)+1+strings.Count(more, ","))
	into := make([]any, len(row))
	for i := range row {
		into[i] = &row[i]
	}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return err
		}
		if err := t.verify(row); err != nil {
			return err
		}
		if err := each(row); err != nil {
			return err
		}
	}
	return nil
}

// sumOf returns the stored checksum of a row.
func (t *table) sumOf(row cells) int64 { return row.integer(len(t.columns)) }

// verify returns an error for a row that does not fit its checksum.
func (t *table) verify(row cells) error {
	if t.sum(row) == t.sumOf(row) {
		return nil
	}
	return damagedf("%s was changed: its checksum does not match", t.named(row))
}

// named returns a row's name for people.
func (t *table) named(row cells) string { return fmt.Sprintf(t.row, row[:t.key]...) }

// readHead returns the study's own row and the holdings of its tables, or sql.ErrNoRows without a study.
func readHead(q querier) (head cells, holds holdings, err error) {
	err = studiesTable.read(q, "", "", nil, func(row cells) error {
		if head != nil {
			return damagedf("it holds two studies")
		}
		head = slices.Clone(row)
		return nil
	})
	if err == nil && head == nil {
		err = sql.ErrNoRows
	}
	if err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal([]byte(head.text(studiesTable.column("holds"))), &holds); err != nil {
		return nil, nil, damagedf("the sums of its tables cannot be read")
	}
	return head, holds, nil
}
