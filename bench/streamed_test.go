package bench

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench/workload"
)

// piece returns an event whose chunk has the given text as output.
func piece(text string) string {
	return fmt.Sprintf(`data: {"choices":[{"index":0,"text":%q}]}`+"\n\n", text)
}

// A run is void if its answers were not streamed. It is not void if tokens share chunks or chunks arrive together for
// another reason.
func TestARunIsVoidWhenItsAnswersWereNotStreamed(t *testing.T) {
	const tpot = 20 * time.Millisecond
	// steady returns a function that writes textOf(i) at step i. Before each step, that function sleeps for the given
	// pause.
	steady := func(pause time.Duration, steps int, textOf func(step int) string) func(stream) {
		return func(s stream) {
			for i := range steps {
				time.Sleep(pause)
				s.raw("%s", textOf(i))
			}
		}
	}
	tokens := func(n int) string { return strings.Repeat(piece(" a"), n) }
	for _, row := range []struct {
		name   string
		tokens int
		write  func(stream)
		want   string // part of Void; "" for a good run
	}{
		{"a token at a time", 64, steady(tpot, 64, func(int) string { return tokens(1) }), ""},
		{"the quickest known server", 64, steady(300*time.Microsecond, 64, func(int) string { return tokens(1) }), ""},
		{"speculative decoding: five tokens a chunk", 64, steady(tpot, 13, func(int) string { return piece(" a b c d e") }), ""},
		{"speculative decoding of one byte a token", 64, steady(tpot, 13, func(int) string { return piece("abcde") }), ""},
		{"--stream-interval 16: the first token, and then sixteen at a time", 65, steady(tpot, 5, func(i int) string {
			return piece(strings.Repeat(" a", 1+min(i, 1)*15))
		}), ""},
		{"--stream-interval beyond the answer", 64, steady(time.Second, 2, func(i int) string { return piece(strings.Repeat(" a", 1+i*62)) }), ""},
		{"answers of one token", 1, steady(tpot, 1, func(int) string { return tokens(1) }), ""},
		{"answers of two tokens", 2, steady(tpot, 2, func(int) string { return tokens(1) }), ""},
		{"a letter of four tokens", 64, steady(4*tpot, 16, func(int) string { return piece("𓀀") }), ""},
		{"special tokens without a chunk", 64, steady(tpot, 60, func(int) string { return tokens(1) }), ""},
		{"hidden reasoning that usage reports", 64, func(s stream) {
			time.Sleep(40 * tpot)
			steady(tpot, 15, func(int) string { return tokens(1) })(s)
			s.raw("%s", `data: {"choices":[],"usage":{"completion_tokens":64,"completion_tokens_details":{"reasoning_tokens":49}}}`+"\n\n")
		}, ""},
		{"a model that goes on after its end, with --stream-interval 8", 64, steady(tpot, 9, func(i int) string { return piece(strings.Repeat("a", max(0, 3-i))) }), ""},
		{"a model that ends early, with --stream-interval 16", 32, steady(10*tpot, 3, func(i int) string { return piece([]string{" tok", " ab", ""}[i]) }), ""},
		{"a model that ends early, with --stream-interval beyond the answer", 64, steady(time.Second, 2, func(i int) string { return piece([]string{" tok", " ab"}[i]) }), ""},
		{"two or three chunks together", 64, steady(2*tpot, 26, func(i int) string { return tokens(2 + i%2) }), ""},
		{"a pause in each answer", 64, func(s stream) {
			steady(tpot, 32, func(int) string { return tokens(1) })(s)
			time.Sleep(time.Second)
			steady(tpot, 32, func(int) string { return tokens(1) })(s)
		}, ""},

		{"all in one write", 64, steady(time.Second, 1, func(int) string { return tokens(64) }), "(an answer of 64 tokens came in 64 chunks without a pause)"},
		{"all in one chunk", 64, steady(time.Second, 1, func(int) string { return piece(strings.Repeat(" a", 64)) }), "(an answer of 64 tokens came in one chunk)"},
		{"short answers in one write", 2, steady(time.Second, 1, func(int) string { return tokens(2) }), "not streamed: all tokens of an answer come at once"},
		{"one after the other without a pause", 64, steady(20*time.Microsecond, 64, func(int) string { return tokens(1) }), "not streamed"},
		{"a buffer of sixteen chunks", 64, steady(16*tpot, 4, func(int) string { return tokens(16) }), "in bursts, so 100 % of the times between tokens cannot be seen (an answer of 64 tokens came in 4 pieces)"},
		{"the first token, and then all others", 64, steady(time.Second, 2, func(i int) string { return tokens(1 + 62*i) }), "in bursts"},
		{"usage that claims ten times the tokens", 640, steady(tpot, 64, func(int) string { return tokens(1) }), "usage says 640 tokens for an answer with 128 bytes of text in 64 chunks"},
	} {
		synctest.Test(t, func(t *testing.T) {
			const n = 12
			client := virtual(t, func(s stream, q asked, _ *http.Request) {
				row.write(s)
				if !strings.Contains(row.name, "that usage reports") {
					s.usage(row.tokens)
				}
				s.done()
			})
			run, err := client.Run(t.Context(), requests(workload.Window, n, 0, time.Second, ask(row.tokens)), nil)
			if err != nil {
				t.Fatal(err)
			}
			m := Measure(run, Scope{Length: n * time.Second})
			if m.Completed != n || (m.Void == "") != (row.want == "") || !strings.Contains(m.Void, row.want) {
				t.Errorf("%s: %d completed, void %q, want %q", row.name, m.Completed, m.Void, row.want)
			}
			tally := newTally("", nil)
			for i := range run.Samples {
				tally.Add(&run.Samples[i])
			}
			if void := tally.measurement(Scope{}).Void; void != m.Void {
				t.Errorf("%s: void of the tally is %q, want %q", row.name, void, m.Void)
			}
		})
	}
}

// A run is still good if half of the times between tokens cannot be seen. If more than half cannot be seen, a limit
// would be judged on buffered answers.
func TestHalfOfTheTimesMayBeUnseen(t *testing.T) {
	streamed := Sample{First: 1, Last: time.Second, End: time.Second, OutputTokens: 20, WantTokens: 20, Chunks: 20, Pieces: 20, TextBytes: 40}
	whole := streamed
	whole.First, whole.Pieces = whole.Last, 1
	late := func(s Sample) Sample { s.Sent = 6 * time.Millisecond; return s }
	for _, row := range []struct {
		name    string
		samples []Sample
		void    bool
	}{
		{"half of them", append(slices.Repeat([]Sample{streamed}, 5), slices.Repeat([]Sample{whole}, 5)...), false},
		{"most of them", append(slices.Repeat([]Sample{streamed}, 4), slices.Repeat([]Sample{whole}, 6)...), true},
		{"most of a few", []Sample{streamed, whole, whole, whole}, false},
		{"all of a few", []Sample{whole, whole}, true},
		{"all of a few but a short one", []Sample{whole, whole, {First: 1, Last: time.Second, End: time.Second, OutputTokens: 2, WantTokens: 2, Chunks: 2, Pieces: 2, TextBytes: 4}}, true},
		{"all of them, but the load generator was late and may have read chunks together", []Sample{late(whole), late(whole)}, false},
		{"one answer of three tokens", []Sample{{First: 1, Last: 1, End: 1, OutputTokens: 3, WantTokens: 3, Chunks: 1}}, false},
		{"samples of a load that does not count pieces", []Sample{{First: 1, Last: time.Second, End: time.Second, OutputTokens: 20, WantTokens: 20, Chunks: 2}}, false},
	} {
		if m := Measure(Run{Samples: row.samples}, Scope{}); (m.Void != "") != row.void {
			t.Errorf("%s: void %q, want a void run: %t", row.name, m.Void, row.void)
		}
	}
}
