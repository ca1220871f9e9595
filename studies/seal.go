package studies

import (
	"database/sql"
	"encoding/json"
	"errors"
	"slices"
	"strings"
)

// inOldStudy does what inStudy does, for a migration. It does nothing if the database has no study. Such a database is
// left when the first run was killed before it began the study.
func (t *transaction) inOldStudy(callback func(*transaction) error) error {
	if _, _, err := readHead(t.tx); errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	return t.inStudy(callback)
}

// inStudy runs the callback. Then it stores the numbers of rows and the sums of all tables in the study's row.
func (t *transaction) inStudy(callback func(*transaction) error) (err error) {
	t.head, t.sums, err = readHead(t.tx)
	if errors.Is(err, sql.ErrNoRows) { // there is no study yet, and the callback begins it
		t.sums, err = rowSums{}, nil
	}
	if err != nil {
		return err
	}
	if err := callback(t); err != nil || t.err != nil {
		return err // transact returns t.err
	}
	sums, err := json.Marshal(t.sums)
	if err == nil {
		t.set("holds", string(sums))
	}
	return err
}

// set changes a column of the study's row.
func (t *transaction) set(column string, value any) {
	if t.err == nil {
		t.head = t.change(t.head, column, value)
	}
}

// insert adds a row to a table. The values are for the table's ordinary columns, and the longValues are for its long
// columns.
func (t *transaction) insert(into *table, values []any, longValues ...any) {
	is, err := valuesOf(values)
	if t.err = errors.Join(t.err, err); t.err != nil {
		return
	}
	next := row{into, is}
	next.values = append(next.values, next.checksum())
	t.exec("INSERT INTO "+into.name+" ("+into.list(long)+") VALUES (?"+strings.Repeat(",?", len(next.values)+len(longValues)-1)+")",
		slices.Concat(next.values, longValues)...)
	t.keepSum(into, t.sums[into.name].plus(next.sum()))
	if into == studiesTable {
		t.head = next
	}
}

// keepSum stores the new sum of a table in t.sums. The study's own row is in no sum.
func (t *transaction) keepSum(in *table, now rowSum) {
	if in != studiesTable {
		t.sums[in.name] = now
	}
}

// nextID returns an ID for a new row: one more than the highest in the table.
func (t *transaction) nextID(of *table) (id int64) {
	if t.err == nil {
		t.err = t.tx.QueryRow("SELECT coalesce(max(id), 0)+1 FROM " + of.name).Scan(&id)
	}
	return id
}

// rows returns the rows that match a condition.
func (t *transaction) rows(of *table, where string, args ...any) (all []row) {
	if t.err == nil {
		t.err = of.read(t.tx, short, where, args, func(r row) error {
			all = append(all, row{of, slices.Clone(r.values)})
			return nil
		})
	}
	return all
}

// change updates columns of a row, and returns the new row. The pairs are the names of the columns, each followed by
// its new value.
func (t *transaction) change(was row, pairs ...any) row {
	var columns []string
	var values []any
	for pair := range slices.Chunk(pairs, 2) {
		columns, values = append(columns, pair[0].(string)), append(values, pair[1])
	}
	is, err := valuesOf(values)
	if t.err = errors.Join(t.err, err); t.err != nil {
		return was
	}
	in, next := was.of, row{was.of, slices.Clone(was.values)}
	for i, name := range columns {
		next.values[in.index[name]] = is[i]
	}
	next.values[in.index["sum"]] = next.checksum()
	t.exec("UPDATE "+in.name+" SET "+strings.Join(columns, "=?, ")+"=?, sum=?"+in.byKey(),
		slices.Concat(is, []any{next.sum()}, was.key())...)
	t.keepSum(in, t.sums[in.name].minus(was.sum()).plus(next.sum()))
	return next
}

func (t *table) byKey() string { return " WHERE " + strings.Join(t.columns[:t.key], "=? AND ") + "=?" }

// remove removes the rows that match a condition.
func (t *transaction) remove(from *table, where string, args ...any) {
	for _, r := range t.rows(from, where, args...) {
		t.exec("DELETE FROM "+from.name+from.byKey(), r.key()...)
		t.keepSum(from, t.sums[from.name].minus(r.sum()))
	}
}

// partsOf returns the number of rows of a trial's result and probes, and the sum of their checksums.
func (t *transaction) partsOf(trial any) (parts rowSum) {
	for _, of := range []*table{resultsTable, probesTable} {
		for _, r := range t.rows(of, "WHERE trial=?", trial) {
			parts = parts.plus(r.sum())
		}
	}
	return parts
}

// sealAll gives each row of a database a checksum. Damage from before that moment is never noticed.
func (t *transaction) sealAll() error {
	t.sums = rowSums{}
	parts := map[int64]rowSum{}
	for _, of := range []*table{worldTable, eventsTable, ledgerTable, priorsTable, resultsTable, probesTable} {
		if err := t.sealTable(of, parts); err != nil {
			return err
		}
	}
	if err := t.sealTrials(parts); err != nil {
		return err
	}
	sums, err := json.Marshal(t.sums)
	if err != nil {
		return err
	}
	t.exec("UPDATE studies SET holds=?", string(sums))
	return t.sealTable(studiesTable, nil)
}

// sealTable gives each row of one table a checksum. It adds the rows of results and probes to the map parts, by the
// number of their trial.
func (t *transaction) sealTable(of *table, parts map[int64]rowSum) error {
	type seal struct {
		id, sum int64
		long    any
	}
	var seals []seal // each seal takes 40 bytes
	err := scanRows(t.tx, "SELECT "+of.list(long)+", rowid FROM "+of.name, nil, func(values []any) error {
		r, s := row{of, values}, seal{id: values[len(values)-1].(int64)}
		if of == probesTable {
			s.long = longSum(r.bytes("series"), r.bytes("sketches"))
			values[of.index["long_sum"]] = s.long
		}
		s.sum = r.checksum()
		t.keepSum(of, t.sums[of.name].plus(s.sum))
		if of == resultsTable || of == probesTable {
			number := r.integer("trial")
			parts[number] = parts[number].plus(s.sum)
		}
		seals = append(seals, s)
		return nil
	})
	for _, s := range seals {
		if of == probesTable {
			t.exec("UPDATE probes SET long_sum=? WHERE rowid=?", s.long, s.id)
		}
		t.exec("UPDATE "+of.name+" SET sum=? WHERE rowid=?", s.sum, s.id)
	}
	return errors.Join(err, t.err)
}

// sealTrials stores two figures in the row of each finished trial: how many rows its result and probes have, and the
// sum of their checksums. Then it gives each row of the table trials a checksum.
func (t *transaction) sealTrials(parts map[int64]rowSum) error {
	for number, has := range parts {
		t.exec("UPDATE trials SET holds_rows=?, holds_sum=? WHERE number=? AND state=?", has.Rows, has.Sum, number, Done)
	}
	return t.sealTable(trialsTable, nil)
}
