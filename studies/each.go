package studies

import (
	"cmp"
	"database/sql"
	"fmt"
	"iter"
	"slices"
)

// ReadEach reads a study that may be too large for the memory. It calls the callback with two values: the study as
// ReadSummary returns it, without whole trials, and an iterator over all trials. The iterator yields whole trials in
// their order, and is valid until the callback returns. If withSeries is false, these trials lack the same parts as the
// whole trials of ReadSummary, such as Series and Sketches.
//
// ReadEach checks a whole snapshot before it calls the callback, and tries no other snapshot afterwards. If the
// callback returns an error, ReadEach returns the error too. The study that ReadEach returns is the summary. If a newer
// snapshot was published but cannot be read, the summary's field Behind says so.
func ReadEach(dir string, withSeries bool, callback func(study Study, trials iter.Seq2[Trial, error]) error) (Study, error) {
	var begun bool
	var stopped error
	study, err := readPublished(dir, func(db *sql.DB) (Study, error) {
		if begun { // the callback was called already; after that, closing the database failed, which does no harm
			return Study{}, nil
		}
		if _, err := checkDatabase(db); err != nil {
			return Study{}, err
		}
		r, err := readSummaries(db)
		if err != nil {
			return Study{}, err
		}
		begun = true
		stopped = callback(r.study, r.each(probeColumns(withSeries)))
		return r.study, nil
	})
	return study, cmp.Or(stopped, err)
}

// trialsInMemory is how many trials ReadEach reads with one query and holds in memory at once. They take a few
// megabytes. A smaller number would need more queries.
const trialsInMemory = 64

// each returns an iterator over all trials. The iterator reads the trials completely, in batches of trialsInMemory.
func (r *loader) each(columns probeColumns) iter.Seq2[Trial, error] {
	return func(yield func(Trial, error) bool) {
		for part := range slices.Chunk(r.study.Trials, trialsInMemory) {
			first, last := part[0].Number, part[len(part)-1].Number
			trials := slices.Clone(part)
			if err := r.fill(trials, columns, "WHERE trial BETWEEN ? AND ?", first, last); err != nil {
				yield(Trial{}, markUnusable(fmt.Errorf("read trials %d to %d: %w", first, last, err)))
				return
			}
			for _, t := range trials {
				if !yield(t, nil) {
					return
				}
			}
		}
	}
}

// Each returns an iterator over the trials of a study in memory, like the iterator of ReadEach.
func (s Study) Each() iter.Seq2[Trial, error] {
	return func(yield func(Trial, error) bool) {
		for _, t := range s.Trials {
			if !yield(t, nil) {
				return
			}
		}
	}
}
