package workload

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"gonum.org/v1/gonum/stat/distuv"
)

const talks = `{"messages":[{"role":"system","content":"brief"},{"role":"user","content":"one"},{"role":"assistant","content":"12345678"},{"role":"user","content":"two"},{"role":"assistant","content":"1234"},{"role":"user","content":"three"}],"output_tokens":9}
{"messages":[{"role":"user","content":"alone"}],"output_tokens":4}
`

func openLive(t *testing.T, spec Spec, think time.Duration, text string) (*live, error) {
	t.Helper()
	if text != "" {
		spec.Path = write(t, text)
	}
	source, err := OpenLive(spec, think, 1)
	if err != nil {
		return nil, err
	}
	return source.(*live), nil
}

// hold plays the conversation that begins with a request. It gives turn 1 the answer A1, turn 2 the answer A2, and so
// on.
func hold(r *Request) (turns []string, lengths []int, thinks []time.Duration) {
	for {
		turns = append(turns, fmt.Sprint(r.Messages))
		lengths = append(lengths, r.OutputTokens)
		if r.Next == nil {
			return turns, lengths, thinks
		}
		next, think := r.Next(fmt.Sprintf("A%d", r.Turn))
		thinks = append(thinks, think)
		if next.Turn != r.Turn+1 || next.Conversation != r.Conversation {
			return append(turns, fmt.Sprintf("turn %d of conversation %d follows", next.Turn, next.Conversation)), lengths, thinks
		}
		r = next
	}
}

func TestALiveConversationFollowsTheRealAnswers(t *testing.T) {
	l, err := openLive(t, Spec{Kind: "jsonl", Endpoint: Chat}, time.Second, talks)
	if err != nil {
		t.Fatal(err)
	}
	want := map[int][]string{
		3: {
			"[{system brief} {user one}]",
			"[{system brief} {user one} {assistant A1} {user two}]",
			"[{system brief} {user one} {assistant A1} {user two} {assistant A2} {user three}]",
		},
		1: {"[{user alone}]"},
	}
	wantLengths := map[int][]int{3: {2, 1, 9}, 1: {4}}
	seen := make(map[int]int)
	for i := range 6 {
		r := l.Request(WindowStream, i)
		if r.Conversation != i || r.Turn != 1 {
			t.Errorf("session %d begins with turn %d of %d", i, r.Turn, r.Conversation)
		}
		turns, lengths, _ := hold(r)
		seen[len(turns)]++
		if !slices.Equal(turns, want[len(turns)]) || !slices.Equal(lengths, wantLengths[len(turns)]) {
			t.Errorf("session %d asks\n%s\nfor %v, want\n%s\nfor %v", i, strings.Join(turns, "\n"), lengths, strings.Join(want[len(turns)], "\n"), wantLengths[len(turns)])
		}
		if again, _, _ := hold(r); !slices.Equal(turns, again) {
			t.Errorf("session %d cannot be held twice", i)
		}
	}
	if seen[3] != 3 || seen[1] != 3 {
		t.Errorf("three passes have %v conversations by length, want 3 of each", seen)
	}
}

func TestSessionsGoOverShareGPTWhole(t *testing.T) {
	l, err := openLive(t, Spec{Kind: "sharegpt", Endpoint: Chat, Path: examples + "sharegpt.json"}, time.Second, "")
	if err != nil {
		t.Fatal(err)
	}
	if want := "live sharegpt sharegpt.json (40 requests)"; l.Name() != want || l.Len() != 40 || l.Longest() != 0 {
		t.Errorf("%q of %d, longest %d, want %q of 40, unknown", l.Name(), l.Len(), l.Longest(), want)
	}
	turns := 0
	for i := range 40 {
		asked, _, _ := hold(l.Request(WindowStream, i))
		turns += len(asked)
	}
	if turns != 44 {
		t.Errorf("40 sessions have %d turns, want the 44 of the file", turns)
	}
}

func TestThinkTimesAreLognormalAndIndependent(t *testing.T) {
	l, err := openLive(t, Spec{Kind: "jsonl", Endpoint: Chat}, 10*time.Second, talks)
	if err != nil {
		t.Fatal(err)
	}
	var thinks []float64
	all := make(map[time.Duration]bool)
	for i := range 3000 {
		_, _, pauses := hold(l.Request(WindowStream, i))
		for _, pause := range pauses {
			thinks = append(thinks, pause.Seconds())
			all[pause] = true
		}
	}
	slices.Sort(thinks)
	sigma := math.Sqrt(math.Log(2))
	cdf := distuv.LogNormal{Mu: math.Log(10) - sigma*sigma/2, Sigma: sigma}.CDF
	if d := distance(thinks, cdf); d > critical(len(thinks)) || len(all) < len(thinks)-1 {
		t.Errorf("%d think times, %d different, are %.3f from the distribution, critical is %.3f", len(thinks), len(all), d, critical(len(thinks)))
	}
}

func TestASaltedSessionKeepsItsSalt(t *testing.T) {
	l, err := openLive(t, Spec{Kind: "jsonl", Endpoint: Chat, Repeat: Salt}, 0, talks)
	if err != nil {
		t.Fatal(err)
	}
	for i := 2; i < 4; i++ {
		r := l.Request(WindowStream, i)
		if r.Next == nil {
			continue
		}
		turns, _, thinks := hold(r)
		if begin := turns[0][:len("[{system [00000000] brief")]; !strings.HasSuffix(begin, "] brief") || !strings.HasPrefix(turns[2], begin) || thinks[0] != 0 {
			t.Errorf("the turns of a repeated session are %q with pauses %v", turns, thinks)
		}
	}
}

func TestOpenLiveRefusesWhatCannotGoOn(t *testing.T) {
	tests := []struct {
		name  string
		spec  Spec
		think time.Duration
		text  string
		want  string
	}{
		{"token ids", Spec{Kind: "production"}, 0, "", "workload production has no conversations that can go on: for live conversations use kind sharegpt, jsonl or capture"},
		{"completions", Spec{Kind: "jsonl"}, 0, talks, "live conversations need endpoint chat"},
		{"a negative pause", Spec{Kind: "jsonl", Endpoint: Chat}, -1, talks, "think time -1ns must not be negative"},
		{"single questions", Spec{Kind: "jsonl", Endpoint: Chat}, 0, talks[strings.Index(talks, "\n")+1:], "it has 1 conversation, but none has a second turn"},
		{"no answer anywhere", Spec{Kind: "sharegpt", Endpoint: Chat}, 0, `[{"conversations":[{"from":"human","value":"x"}]}]`, "the file is empty"},
		{"an unknown speaker", Spec{Kind: "sharegpt", Endpoint: Chat}, 0, `[{"conversations":[{"from":"alien","value":"x"}]}]`, `entry 1: conversations[0] is from "alien"`},
		{"a broken line", Spec{Kind: "capture", Endpoint: Chat}, 0, "{", "line 1: is not JSON"},
		{"a missing file", Spec{Kind: "capture", Endpoint: Chat, Path: "nowhere"}, 0, "", "check the path"},
	}
	for _, test := range tests {
		_, err := openLive(t, test.spec, test.think, test.text)
		explains(t, test.name, err, []string{test.want})
	}
}

func TestLiveSessionsSkipBadRows(t *testing.T) {
	l, err := openLive(t, Spec{Kind: "capture", Endpoint: Chat, OutputTokens: 3, SkipBadRows: true}, 0, "{}\n"+talks)
	if err != nil {
		t.Fatal(err)
	}
	if n, first := Skipped(l); n != 1 || !strings.Contains(fmt.Sprint(first), "line 1") || l.Len() != 2 {
		t.Errorf("%q skipped %d with %v, want one", l.Name(), n, first)
	}
	if _, lengths, _ := hold(l.Request(WindowStream, 0)); lengths[0] != 3 {
		t.Errorf("answers of %v tokens, want 3", lengths)
	}
}
