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

	"vllmtuner/render"
)

// A table describes a table of the database. Each of its rows has a checksum, in the column named sum. Readers read
// only tables with checksums.
type table struct {
	name    string
	columns []string       // the columns that the checksum covers, in the order in which it covers them; the key comes first
	key     int            // number of key columns
	long    []string       // more columns, which most readers skip; the column long_sum has their checksum
	title   string         // format of a row's name for people; its arguments are the key
	index   map[string]int // index of each column in a row's values: the columns, then sum, then the long columns
}

func newTable(name, title string, key int, columns string, long ...string) *table {
	t := &table{name: name, columns: strings.Fields(columns), key: key, long: long, title: title, index: map[string]int{}}
	for i, column := range slices.Concat(t.columns, []string{"sum"}, long) {
		t.index[column] = i
	}
	return t
}

// The order of the columns must never change, because the checksum depends on it.
var (
	studiesTable = newTable("studies", "the study's own row (%v)", 1, `id name seed file state note created updated commits holds`)
	worldTable   = newTable("world", "%q of the world", 1, `key value kind`)
	trialsTable  = newTable("trials", "trial %v", 1, `number origin point args state began ended version outcome class cause evidence
		capacity_rps passed_rps failed_rps lowest_rps highest_rps std_err doubt bound binding in_flight kv_tokens gpu_seconds simulated start_seconds
		log near_rps near_headroom changed holds_rows holds_sum`)
	resultsTable = newTable("results", "the result of trial %v", 1, `trial result`)
	probesTable  = newTable("probes", "trial %v, probe %v", 2, `trial seq recorded rate pass headroom binding requests completed failed ttft_p99_ms tpot_p99_ms
		output_tok_s in_flight hit_rate gpu_seconds probe long_sum`, "series", "sketches")
	ledgerTable = newTable("ledger", "line %v of the ledger", 1, `id time trial what gpu_seconds`)
	priorsTable = newTable("priors", "prior trial %v", 1, `id source trial`)
	eventsTable = newTable("events", "event %v", 1, `id time kind text trial`)

	changesTable = newTable("changes", "change %[2]v of event %[1]v", 2, `event seq fact was now was_in_trial`)
	sourcesTable = newTable("sources", "the source %v", 1, `name path world`)
	spentTable   = newTable("spent", "the time of %q", 1, `what seconds`)
)

// A row is a row of a table, with its values as SQLite gives them: the table's columns, the checksum, and the long
// columns if the reader asked for them.
type row struct {
	of     *table
	values []any
}

// value returns the value in a column; nil for NULL.
func (r row) value(column string) any { return r.values[r.of.index[column]] }

func (r row) text(column string) string {
	switch v := r.value(column).(type) {
	case string:
		return v
	case []byte:
		return string(v)
	}
	return ""
}

func (r row) bytes(column string) []byte {
	b, _ := r.value(column).([]byte)
	return b
}

func (r row) integer(column string) int64 {
	switch v := r.value(column).(type) {
	case int64:
		return v
	case float64:
		return int64(v)
	}
	return 0
}

func (r row) real(column string) float64 {
	switch v := r.value(column).(type) {
	case float64:
		return v
	case int64:
		return float64(v)
	}
	return 0
}

// sum returns the row's stored checksum.
func (r row) sum() int64 { return r.integer("sum") }

// key returns the values of the key columns.
func (r row) key() []any { return r.values[:r.of.key] }

// String returns the row's name for people.
func (r row) String() string { return fmt.Sprintf(r.of.title, r.key()...) }

// checksum computes the checksum of a row. It does not depend on how SQLite stores a value: a whole number has the same
// checksum in any column.
func (r row) checksum() int64 {
	b := make([]byte, 0, 1024) // the memory is on the stack, except for long rows
	b = append(append(b, r.of.name...), 0)
	for _, v := range r.values[:len(r.of.columns)] {
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
func valuesOf(values []any) ([]any, error) {
	converted := make([]any, len(values))
	for i, v := range values {
		is, err := driver.DefaultParameterConverter.ConvertValue(v)
		if err != nil {
			return nil, err
		}
		if b, ok := is.(bool); ok {
			is = int64(0)
			if b {
				is = int64(1)
			}
		}
		converted[i] = is
	}
	return converted, nil
}

// longSum is the checksum of a probe's compressed columns, which most readers skip. It is nil for a probe without them.
func longSum(series, sketches []byte) any {
	if series == nil && sketches == nil {
		return nil
	}
	return int64(xxhash.Sum64(appendValue(appendValue(nil, series), sketches)))
}

// A rowSum is a number of rows and the sum of their checksums. The order of the rows does not matter.
type rowSum struct {
	Rows int64 `json:"rows"`
	Sum  int64 `json:"sum"`
}

func (h rowSum) plus(sum int64) rowSum    { return rowSum{h.Rows + 1, h.Sum + sum} }
func (h rowSum) minus(sum int64) rowSum   { return rowSum{h.Rows - 1, h.Sum - sum} }
func (h rowSum) without(of rowSum) rowSum { return rowSum{h.Rows - of.Rows, h.Sum - of.Sum} }

// rowSums maps the name of each table to its rowSum. The study's own row stores them, so that a reader notices a
// missing or foreign row of any other table.
type rowSums map[string]rowSum

// check compares a table with its stored rowSum.
func (h rowSums) check(t *table, found rowSum) error {
	return checkRows(h[t.name], found, "table "+t.name)
}

func checkRows(stored, found rowSum, of string) error {
	switch {
	case found.Rows != stored.Rows:
		return damagedf("%s has %s, and %d were stored", of, render.Count(int(found.Rows), "row"), stored.Rows)
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

// scanRows calls the callback for every row that a query finds, with the row's values. The values are valid until the
// callback returns.
func scanRows(q querier, query string, args []any, callback func(values []any) error) (err error) {
	rows, err := q.Query(query, args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	columns, err := rows.Columns()
	if err != nil {
		return err
	}
	values, into := make([]any, len(columns)), make([]any, len(columns))
	for i := range values {
		into[i] = &values[i]
	}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return err
		}
		if err := callback(values); err != nil {
			return err
		}
	}
	return nil
}

// list returns the names of the columns for a SELECT.
func (t *table) list(long probeColumns) string {
	columns := append(slices.Clone(t.columns), "sum")
	if long {
		columns = append(columns, t.long...)
	}
	return strings.Join(columns, ", ")
}

// read checks the checksum of every row that the SQL condition selects, and calls the callback with the row. The row is
// valid until the callback returns.
func (t *table) read(q querier, long probeColumns, condition string, args []any, callback func(row) error) error {
	return scanRows(q, "SELECT "+t.list(long)+" FROM "+t.name+" "+condition, args, func(values []any) error {
		r := row{t, values}
		if r.checksum() != r.sum() {
			return damagedf("%s was changed: its checksum does not match", r)
		}
		return callback(r)
	})
}

// readHead returns the study's own row and the stored sums of all tables. If there is no study, it returns
// sql.ErrNoRows.
func readHead(q querier) (head row, sums rowSums, err error) {
	err = studiesTable.read(q, short, "", nil, func(r row) error {
		if head.of != nil {
			return damagedf("it holds two studies")
		}
		head = row{r.of, slices.Clone(r.values)}
		return nil
	})
	if err == nil && head.of == nil {
		err = sql.ErrNoRows
	}
	if err == nil && json.Unmarshal([]byte(head.text("holds")), &sums) != nil {
		err = damagedf("the sums of its tables cannot be read")
	}
	return head, sums, err
}
