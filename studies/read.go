package studies

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/xrash/smetrics"

	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// ReadSnapshot returns the study in a directory as its owner last published it. It reads neither the live database nor any lock and
// writes nothing, so it cannot hold up an owner and works on a read-only disk. An owner that was killed may have
// stored up to a second more than the snapshot shows; whoever resumes the study finds that.
func ReadSnapshot(dir string) (Study, error) {
	_, study, err := newest(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return Study{}, missing(dir)
	}
	return study, err
}

// newest returns the newest snapshot with its name below the directory; fs.ErrNotExist when there is none.
func newest(dir string) (name string, study Study, err error) {
	for range readSnapshots {
		if name, err = newestSnapshot(dir); err != nil {
			return "", Study{}, err
		}
		path := filepath.Join(dir, name)
		if study, err = readSnapshot(path); err == nil {
			return name, study, nil
		}
		err = fmt.Errorf("read %s: %w", path, err)
	}
	return "", Study{}, err
}

// readSnapshots is how often one is looked for: while a reader opens the newest, three newer ones may be published and it be removed.
const readSnapshots = 3

func readSnapshot(path string) (study Study, err error) {
	if _, err := os.Stat(path); err != nil {
		return Study{}, err
	}
	db, err := openFile(path, published)
	if err != nil {
		return Study{}, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	version, err := schemaVersion(db)
	if err != nil {
		return Study{}, err
	}
	if version != len(migrations) {
		return Study{}, fmt.Errorf("it has schema %d, this tuner reads %d: read it with the tuner that runs the study", version, len(migrations))
	}
	return load(db)
}

// missing says why there is no snapshot, and what there is instead.
func missing(dir string) error {
	if isStudy(dir) {
		return fmt.Errorf("study %s has no snapshot yet: its first run was killed while it began; run it again", dir)
	}
	root, name := filepath.Split(filepath.Clean(dir))
	names, err := List(root)
	switch {
	case err != nil:
		return fmt.Errorf("no study %s: %w", dir, err)
	case len(names) == 0:
		return fmt.Errorf("no study %s: there are none in %s", dir, filepath.Clean(root))
	}
	near := slices.MaxFunc(names, func(a, b string) int { return cmp.Compare(nearness(a, name), nearness(b, name)) })
	hint := "there are: "
	if nearness(near, name) > 0.8 { // below, the names have no more in common than any two
		hint = fmt.Sprintf("did you mean %q? There are: ", near)
	}
	return fmt.Errorf("no study %q in %s: %s%s", name, filepath.Clean(root), hint, strings.Join(names, ", "))
}

// nearness is 1 for equal names and 0 for names with nothing in common.
func nearness(a, b string) float64 { return smetrics.JaroWinkler(a, b, 0.7, 4) }

// List returns the names of the studies in a root directory, sorted. A root that does not exist has none.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(cmp.Or(root, "."))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the studies: %w", err)
	}
	var names []string
	for _, e := range entries {
		if isStudy(filepath.Join(root, e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// isStudy reports whether a directory holds a study.
func isStudy(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, fence.SlotDir))
	return err == nil
}

var nameRule = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,62}$`)

// ValidName says whether a study may have the name. Names become directories, Kubernetes labels and metric labels, hence
// the rule: 1 to 63 lower-case letters, digits, dots and dashes, a letter or digit first.
func ValidName(name string) error {
	if nameRule.MatchString(name) {
		return nil
	}
	return fmt.Errorf("study name %q: use 1 to 63 of a-z, 0-9, dot and dash, a letter or digit first, such as llama70b-h200", name)
}

// load returns all of a database.
func load(db *sql.DB) (Study, error) {
	study, err := loadStudy(db)
	if err != nil {
		return Study{}, err
	}
	if study.Trials, err = loadTrials(db); err != nil {
		return Study{}, err
	}
	return study, loadProbes(db, study.Trials)
}

// loadStudy returns the study without its trials; sql.ErrNoRows when it was never begun.
func loadStudy(db *sql.DB) (s Study, err error) {
	var seed, world, created, updated string
	err = db.QueryRow(`SELECT id, name, seed, file, world, state, note, created, updated, commits FROM studies`).
		Scan(&s.ID, &s.Name, &seed, &s.File, &world, &s.State, &s.Note, &created, &updated, &s.Commits)
	if err != nil {
		return Study{}, err
	}
	s.Seed, err = strconv.ParseUint(seed, 10, 64)
	return s, errors.Join(err, decode(world, &s.World), parseTime(created, &s.Created), parseTime(updated, &s.Updated))
}

func loadTrials(db *sql.DB) (trials []Trial, err error) {
	rows, err := db.Query(`SELECT number, origin, point, args, state, began, ended, result FROM trials ORDER BY number`)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	for rows.Next() {
		var t Trial
		var point, args, began string
		var ended, result sql.NullString
		if err := rows.Scan(&t.Number, &t.Origin, &point, &args, &t.State, &began, &ended, &result); err != nil {
			return nil, err
		}
		err := errors.Join(decode(point, &t.Point), decode(args, &t.Args), parseTime(began, &t.Began))
		if ended.Valid && result.Valid {
			err = errors.Join(err, parseTime(ended.String, &t.Ended), decode(result.String, &t.Result))
		}
		if err != nil {
			return nil, fmt.Errorf("trial %d: %w", t.Number, err)
		}
		trials = append(trials, t)
	}
	return trials, nil
}

// loadProbes gives each trial its probes. The trials are in the order of their numbers.
func loadProbes(db *sql.DB, trials []Trial) (err error) {
	rows, err := db.Query(`SELECT trial, seq, probe FROM probes ORDER BY trial, seq`)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	i := 0
	for rows.Next() {
		var number, seq int
		var text sql.RawBytes
		if err := rows.Scan(&number, &seq, &text); err != nil {
			return err
		}
		for i < len(trials) && trials[i].Number < number {
			i++
		}
		if i == len(trials) || trials[i].Number != number {
			return fmt.Errorf("probe %d belongs to trial %d, which is not there", seq, number)
		}
		var p trial.Probe
		if err := json.Unmarshal(text, &p); err != nil {
			return fmt.Errorf("probe %d of trial %d: %w", seq, number, err)
		}
		trials[i].Probes = append(trials[i].Probes, p)
	}
	return nil
}

func decode(text string, v any) error { return json.Unmarshal([]byte(text), v) }

func parseTime(text string, t *time.Time) (err error) {
	*t, err = time.Parse(timeLayout, text)
	return err
}
