package studies

import (
	"cmp"
	"database/sql"
	"fmt"
	"iter"
	"slices"
)

// ReadEach reads a study that may be too long for the memory from one snapshot. read is given the study as ReadSummary has it, with no trial
// whole, and all its trials, whole, in their order; without series they lack what those of ReadSummary do. The trials can be gone through until read
// returns. Once read has begun no other snapshot is tried: its error is that of ReadEach. Therefore a snapshot is looked through before, and one that
// is damaged anywhere is not begun. The summary is returned, too, and says whether this was published last.
func ReadEach(dir string, series bool, read func(study Study, trials iter.Seq2[Trial, error]) error) (Study, error) {
	columns := short
	if series {
		columns = long
	}
	var begun bool
	var stopped error
	study, err := readPublished(dir, func(db *sql.DB) (Study, error) {
		if begun { // the snapshot could not be closed, which harms nobody
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
		stopped = read(r.study, r.each(columns))
		return r.study, nil
	})
	return study, cmp.Or(stopped, err)
}

// trialsInMemory is how many trials are in memory at once: a few megabytes, and few enough queries.
const trialsInMemory = 64

// each gives the trials whole.
func (r *reading) each(columns probeColumns) iter.Seq2[Trial, error] {
	return func(yield func(Trial, error) bool) {
		for part := range slices.Chunk(r.study.Trials, trialsInMemory) {
			first, last := part[0].Number, part[len(part)-1].Number
			trials := slices.Clone(part)
			if err := r.fill(trials, columns, "WHERE trial BETWEEN ? AND ?", first, last); err != nil {
				yield(Trial{}, markUnusable(fmt.Errorf("read trials %d to %d: %w", first, last, err)))
				return
			}
			for i, t := range trials {
				if !yield(t.as(part[i]), nil) {
					return
				}
			}
		}
	}
}

// Each gives the trials of a study in memory as ReadEach gives those of one that is not.
func (s Study) Each() iter.Seq2[Trial, error] {
	return func(yield func(Trial, error) bool) {
		for _, t := range s.Trials {
			if !yield(t, nil) {
				return
			}
		}
	}
}
