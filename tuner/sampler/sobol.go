package sampler

import (
	_ "embed"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"sync"

	"vllmtuner/tuner/space"
)

// joeKuo has the direction numbers. Gonum has no Sobol sequence. Goptuna's is not scrambled, so all its seeds give the
// same points, and it would add 2 MB to the program for its 21,201 dimensions.
//
//go:embed joe-kuo.txt
var joeKuo string

// newSobol returns the sampler that follows a scrambled Sobol sequence.
func newSobol(s *space.Space, seed uint64) (Sampler, error) {
	if n, most := len(s.Parameters()), len(directions()); n > most {
		return nil, fmt.Errorf("sobol spreads points over at most %d parameters, not %d; take halton, or search fewer of them", most, n)
	}
	return &spread{"sobol", s, seed, sobol}, nil
}

// sobol returns the first n points of a Sobol sequence with Owen's scrambling (nested uniform scrambling, 1995). The
// scrambling keeps the evenness of the sequence, and gives a different sequence for each seed.
func sobol(dimensions, n int, seed uint64) [][]float64 {
	rows := make([][]float64, n)
	for i := range rows {
		rows[i] = make([]float64, dimensions)
		for d := range rows[i] {
			x := scrambled(directions()[d].coordinate(uint32(i)), hash(seed^hash(uint64(d))))
			rows[i][d] = (float64(x) + 0.5) / (1 << 32) // the middle of the smallest interval, so never 0 or 1
		}
	}
	return rows
}

// A direction has the direction numbers of one dimension, one for each bit of a point's index.
type direction [32]uint32

// coordinate returns the coordinate of a point, in units of 2^-32.
func (v *direction) coordinate(index uint32) (x uint32) {
	for ; index != 0; index &= index - 1 {
		x ^= v[bits.TrailingZeros32(index)]
	}
	return x
}

// directions returns the directions of all known dimensions.
var directions = sync.OnceValue(func() []direction {
	var first direction
	for i := range first {
		first[i] = 1 << (31 - i)
	}
	all := []direction{first}
	for line := range strings.Lines(joeKuo) {
		if fields := strings.Fields(line); fields[0] != "#" {
			all = append(all, newDirection(fields))
		}
	}
	return all
})

// newDirection returns the direction of one line of joeKuo: dimension, s, a, and m_1 to m_s. The other numbers follow
// from the recurrence of Bratley and Fox (ACM TOMS 14, 1988).
func newDirection(fields []string) (v direction) {
	number := func(i int) uint32 {
		n, err := strconv.ParseUint(fields[i], 10, 32)
		if err != nil {
			panic(fmt.Sprintf("joe-kuo.txt: %v", err)) // the file is part of the program, and a test reads it
		}
		return uint32(n)
	}
	s, a := int(number(1)), number(2)
	for i := range v {
		if i < s {
			v[i] = number(3+i) << (31 - i)
			continue
		}
		v[i] = v[i-s] ^ v[i-s]>>s
		for k := 1; k < s; k++ {
			v[i] ^= (a >> (s - 1 - k) & 1) * v[i-k]
		}
	}
	return v
}

// scrambled flips some bits of x. A random bit decides for each bit of x whether to flip it. The random bit depends on
// the seed and on the higher bits of x.
func scrambled(x uint32, seed uint64) (y uint32) {
	for bit := 31; bit >= 0; bit-- {
		above := 1<<(31-bit) | uint64(x)>>(bit+1) // the leading 1 tells how many bits are above
		y |= (x>>bit ^ uint32(hash(seed+above))) & 1 << bit
	}
	return y
}

// hash mixes the bits of x (SplitMix64, Steele et al., 2014).
func hash(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
