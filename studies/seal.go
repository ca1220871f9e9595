package studies

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// inOldStudy is inStudy for a migration. It does nothing if the database has no study, because a run was killed before
// it began one.
func (t *transaction) inOldStudy(do func(*transaction) error) error {
	if _, _, err := readHead(t.tx); errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return t.inStudy(do)
}

// inStudy runs do, and updates the rows and sums of the tables in the study's row.
func (t *transaction) inStudy(do func(*transaction) error) (err error) {
	t.head, t.holds, err = readHead(t.tx)
	if errors.Is(err, sql.ErrNoRows) { // do begins the study
		t.holds, err = holdings{}, nil
	}
	if err != nil {
		return err
	}
	if err := do(t); err != nil || t.err != nil {
		return err // transact returns t.err
	}
	holds, err := json.Marshal(t.holds)
	if err == nil {
		t.set("holds", string(holds))
	}
	return err
}

// set changes a column of the study's row.
func (t *transaction) set(column string, value any) {
	if t.err == nil {
		t.head = t.change(studiesTable, t.head, column, value)
	}
}

// insert stores a row. values are for the table's columns, and more for the columns that more lists.
func (t *transaction) insert(into *table, values []any, more ...any) {
	row, err := valuesOf(values)
	if t.err = errors.Join(t.err, err); t.err != nil {
		return
	}
	row = append(row, into.sum(row))
	t.exec("INSERT INTO "+into.name+" ("+strings.Join(into.columns, ", ")+", sum"+into.more()+") VALUES (?"+strings.Repeat(",?", len(row)+len(more)-1)+")",
		append(slices.Clone(row), more...)...)
	t.hold(into, t.holds[into.name].plus(into.sumOf(row)))
	if into == studiesTable {
		t.head = row
	}
}

// more lists the columns of a table that its rows' checksums do not cover.
func (t *table) more() string {
	if t == probesTable {
		return ", series, sketches"
	}
	return ""
}

func (t *transaction) hold(in *table, now holding) {
	if in != studiesTable {
		t.holds[in.name] = now
	}
}

// nextID is the next ID of a table that only grows.
func (t *transaction) nextID(of *table) (id int64) {
	if err := t.scan("SELECT coalesce(max(id), 0)+1 FROM "+of.name, nil, &id); err != nil {
		t.err = errors.Join(t.err, err)
	}
	return id
}

// rows returns the rows that match a condition.
func (t *transaction) rows(of *table, where string, args ...any) (all []cells) {
	if t.err == nil {
		t.err = of.read(t.tx, "", where, args, func(row cells) error {
			all = append(all, slices.Clone(row))
			return nil
		})
	}
	return all
}

// change updates columns of a row, given as pairs of a column and its value, and returns the new row.
func (t *transaction) change(in *table, row cells, pairs ...any) cells {
	var columns []string
	var values []any
	for pair := range slices.Chunk(pairs, 2) {
		columns, values = append(columns, pair[0].(string)), append(values, pair[1])
	}
	is, err := valuesOf(values)
	if t.err = errors.Join(t.err, err); t.err != nil {
		return row
	}
	next := slices.Clone(row)
	for i, name := range columns {
		next[in.column(name)] = is[i]
	}
	next[len(in.columns)] = in.sum(next)
	args := append(slices.Clone(is), next[len(in.columns)])
	t.exec("UPDATE "+in.name+" SET "+strings.Join(columns, "=?, ")+"=?, sum=?"+in.byKey(), append(args, row[:in.key]...)...)
	t.hold(in, t.holds[in.name].minus(in.sumOf(row)).plus(in.sumOf(next)))
	return next
}

func (t *table) byKey() string { return " WHERE " + strings.Join(t.columns[:t.key], "=? AND ") + "=?" }

// remove removes the rows that match a condition.
func (t *transaction) remove(from *table, where string, args ...any) {
	for _, row := range t.rows(from, where, args...) {
		t.exec("DELETE FROM "+from.name+from.byKey(), row[:from.key]...)
		t.hold(from, t.holds[from.name].minus(from.sumOf(row)))
	}
}

// partsOf counts and sums the rows of a trial's result and probes.
func (t *transaction) partsOf(trial any) (parts holding) {
	for _, of := range []*table{resultsTable, probesTable} {
		for _, row := range t.rows(of, "WHERE trial=?", trial) {
			parts = parts.plus(of.sumOf(row))
		}
	}
	return parts
}

// rowsInMemory is how many rows sealTable holds at once.
const rowsInMemory = 256

// sealAll gives each row of a database a checksum. Damage from before that time does not show.
func (t *transaction) sealAll() error {
	t.holds = holdings{}
	parts := map[int64]holding{}
	for _, of := range []*table{worldTable, eventsTable, ledgerTable, priorsTable, resultsTable, probesTable} {
		if err := t.sealTable(of, parts); err != nil {
			return err
		}
	}
	if err := t.sealTrials(parts); err != nil {
		return err
	}
	holds, err := json.Marshal(t.holds)
	if err != nil {
		return err
	}
	t.exec("UPDATE studies SET holds=?", string(holds))
	return t.sealTable(studiesTable, nil)
}

// sealTable seals the rows of one table. It adds results and probes to the parts of their trials.
func (t *transaction) sealTable(of *table, parts map[int64]holding) error {
	after := int64(-1 << 63)
	for {
		rows, err := t.unsealed(of, after)
		if err != nil || len(rows) == 0 {
			return errors.Join(err, t.err)
		}
		for _, row := range rows {
			last := len(of.columns) + 1 // index of the compressed columns, if any; the rowid is last
			after = row.integer(len(row) - 1)
			if of == probesTable {
				row[of.column("long_sum")] = longSum(row.bytes(last), row.bytes(last+1))
				t.exec("UPDATE probes SET long_sum=? WHERE rowid=?", row[of.column("long_sum")], after)
			}
			sum := of.sum(row)
			t.exec("UPDATE "+of.name+" SET sum=? WHERE rowid=?", sum, after)
			t.hold(of, t.holds[of.name].plus(sum))
			if of == resultsTable || of == probesTable {
				parts[row.integer(0)] = parts[row.integer(0)].plus(sum)
			}
		}
	}
}

// sealTrials stores the parts of the finished trials, and seals the trials.
func (t *transaction) sealTrials(parts map[int64]holding) error {
	for number, has := range parts {
		t.exec("UPDATE trials SET holds_rows=?, holds_sum=? WHERE number=? AND state=?", has.Rows, has.Sum, number, Done)
	}
	return t.sealTable(trialsTable, nil)
}

// unsealed reads some rows after a rowid, and does not check their checksums.
func (t *transaction) unsealed(of *table, after int64) (all []cells, err error) {
	query := fmt.Sprintf("SELECT %s, sum%s, rowid FROM %s WHERE rowid > ? ORDER BY rowid LIMIT %d", strings.Join(of.columns, ", "), of.more(), of.name, rowsInMemory)
	rows, err := t.tx.Query(query, after)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	for rows.Next() {
		row := make(cells, len(of.columns)+2+strings.Count(of.more(), ","))
		into := make([]any, len(row))
		for i := range row {
			into[i] = &row[i]
		}
		if err := rows.Scan(into...); err != nil {
			return nil, err
		}
		all = append(all, row)
	}
	return all, nil
}
