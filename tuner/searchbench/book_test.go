package searchbench

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"vllmtuner/tuner/space"
)

// A truthBook keeps truths (the true capacities of points) on disk, because each takes seconds to compute. Its methods
// may be called from several goroutines.
type truthBook struct {
	dir    string // SEARCH_TRUTHS, or a directory for caches
	engine string // hash of the code of the engines
	effort effort

	mu    sync.Mutex
	near  map[string]float64 // the last capacity of each world
	most  map[string]float64 // the highest capacity of each world
	count map[string]int     // number of truths (true capacities) computed in this run, by world
	took  map[string]time.Duration
}

func newTruthBook(dir string) (*truthBook, error) {
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		dir = filepath.Join(cache, "tuner-searchbench")
	}
	code, err := engineHash()
	return &truthBook{
		dir: dir, engine: code, effort: fullEffort, near: map[string]float64{}, most: map[string]float64{}, count: map[string]int{}, took: map[string]time.Duration{},
	}, err
}

func digest(texts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(texts, "\x00")))
	return fmt.Sprintf("%x", sum[:10])
}

// engineHash returns a hash of the code of both engines, of their loads and of the workloads. It leaves out comments,
// because the true capacities do not depend on them.
func engineHash() (string, error) {
	var texts []string
	for _, dir := range []string{"../../serverctl/sim", "../../trial/simload", "../../bench/workload", "otherengine"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			return "", err
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				return "", err
			}
			var code bytes.Buffer
			if err := format.Node(&code, set, file); err != nil {
				return "", err
			}
			texts = append(texts, code.String())
		}
	}
	return digest(texts...), nil
}

// final returns a book with more exact truths. They come from other draws (sets of random requests).
func (b *truthBook) final() *truthBook {
	return &truthBook{
		dir: b.dir, engine: b.engine, effort: finalEffort, near: maps.Clone(b.near), most: map[string]float64{},
		count: map[string]int{}, took: map[string]time.Duration{},
	}
}

// folder returns the directory with the truths (true capacities) of a world.
func (b *truthBook) folder(w world) string {
	return filepath.Join(b.dir, w.name+"-"+digest(w.file, w.engine, b.engine, fmt.Sprint(b.effort, around)))
}

func (b *truthBook) path(w world, p space.Point) string {
	return filepath.Join(b.folder(w), digest(p.String())+".json")
}

// truthOf returns the truth of a point. If the truth is on the disk, truthOf reads it; otherwise truthOf computes it.
func (b *truthBook) truthOf(w world, p space.Point) (t truth, err error) {
	if t, err = readTruth(b.path(w, p)); err == nil || !errors.Is(err, fs.ErrNotExist) {
		b.note(t, false)
		return t, err
	}
	if t, err = w.truth(p, b.guess(w), b.highest(w), b.effort); err != nil {
		return t, fmt.Errorf("%s, %s: %w", w.name, p, err)
	}
	b.note(t, true)
	return t, b.write(w, t)
}

func readTruth(path string) (t truth, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return t, err
	}
	return t, json.Unmarshal(text, &t)
}

// write stores a truth (the true capacity of a point).
func (b *truthBook) write(w world, t truth) error {
	text, err := json.Marshal(t)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(b.folder(w), 0o755); err != nil {
		return err
	}
	return writeWhole(b.path(w, t.Point), text)
}

func (b *truthBook) note(t truth, computed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if t.Capacity > 0 {
		b.near[t.World] = t.Capacity
		b.most[t.World] = max(b.most[t.World], t.Capacity)
	}
	if computed {
		b.count[t.World]++
		b.took[t.World] += t.Took
	}
}

func (b *truthBook) highest(w world) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most[w.name]
}

func (b *truthBook) guess(w world) float64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if near := b.near[w.name]; near > 0 {
		return near
	}
	return 2
}

// known returns all truths (true capacities) of a world on the disk, the highest capacity first.
func (b *truthBook) known(w world) (all []truth, err error) {
	files, err := filepath.Glob(filepath.Join(b.folder(w), "*.json"))
	if err != nil {
		return nil, err
	}
	for _, path := range files {
		t, err := readTruth(path)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(x, y truth) int { return compareTruths(y, x) })
	return all, nil
}

func compareTruths(x, y truth) int {
	switch {
	case x.Capacity < y.Capacity:
		return -1
	case x.Capacity > y.Capacity:
		return 1
	}
	return strings.Compare(x.Point.String(), y.Point.String())
}
