package capacity

import (
	"maps"
	"math"
	"slices"
	"sync"
)

// binWidth is the width of the bins for the load around requests, in ln(load/rate).
const binWidth = 0.01

// loads keeps what Evidence.around and Evidence.groups computed, because each estimate of a search asks again.
type loads struct {
	mu     sync.Mutex
	around map[kernel][]float64
	groups map[limitKernel][]group
}

type limitKernel struct {
	kernel
	limit int
}

// A group is the requests of a probe with about the same load around them.
type group struct{ surplus, judged, broken float64 }

// around returns the surplus of each counted request, see Stretch.surplus. The caller must not change it.
func (e *Evidence) around(k kernel) []float64 {
	e.known.mu.Lock()
	defer e.known.mu.Unlock()
	return remembered(&e.known.around, k, func() []float64 { return e.surplus(k, e.Rate) })
}

// groups returns the requests that kept or broke a limit, in ascending order of the load around them. The caller must
// not change it.
func (e *Evidence) groups(k kernel, limit int) []group {
	around := e.around(k)
	e.known.mu.Lock()
	defer e.known.mu.Unlock()
	return remembered(&e.known.groups, limitKernel{k, limit}, func() []group { return grouped(around, e.Limits[limit].Each) })
}

// remembered returns the value of a key, which it computes the first time.
func remembered[K comparable, V any](known *map[K]V, key K, compute func() V) V {
	value, ok := (*known)[key]
	if !ok {
		value = compute()
		if *known == nil {
			*known = make(map[K]V)
		}
		(*known)[key] = value
	}
	return value
}

// grouped groups requests by the load around them. The string each has a character for each request, as in
// LimitEvidence.
func grouped(around []float64, each string) (groups []group) {
	byNumber := make(map[int]group)
	for i, surplus := range around {
		number := int(math.Round(surplus / binWidth))
		g := byNumber[number]
		switch each[i] {
		case over:
			g.broken++
		case kept:
		default:
			continue
		}
		g.judged++
		byNumber[number] = g
	}
	// Sort, because in the random order of a map the sums of a fit would be rounded differently.
	for _, number := range slices.Sorted(maps.Keys(byNumber)) {
		g := byNumber[number]
		g.surplus = float64(number) * binWidth
		groups = append(groups, g)
	}
	return groups
}
