package sim

import (
	"slices"
	"strings"
)

// mix hashes two 64-bit words into one word, which is never 0 (the finalizer of splitmix64).
func mix(a, b uint64) uint64 {
	z := a*0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return (z ^ z>>31) | 1
}

// HashBlocks returns the content hash of each full block of a prompt. A hash also depends on all tokens before the
// block, so equal hashes mean equal prefixes.
func HashBlocks(tokens []int32) []uint64 {
	hashes := make([]uint64, 0, len(tokens)/BlockSize)
	chain := uint64(0)
	for i := 0; i+BlockSize <= len(tokens); i += BlockSize {
		for _, t := range tokens[i : i+BlockSize] {
			chain = mix(chain, uint64(t))
		}
		hashes = append(hashes, chain)
	}
	return hashes
}

// Tokenize cuts a text into about as many tokens as a model's tokenizer would. A token is a word, or a piece of a word
// of at most four bytes. Equal prefixes give equal tokens.
func Tokenize(text string) []int32 {
	tokens := make([]int32, 0, len(text)/4+1)
	for word := range strings.FieldsSeq(text) {
		for piece := range slices.Chunk([]byte(word), 4) {
			var id uint64
			for _, c := range piece {
				id = id<<8 | uint64(c)
			}
			tokens = append(tokens, int32(mix(id, 0)%30000)+3)
		}
	}
	return tokens
}
