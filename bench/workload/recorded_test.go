package workload

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/render"
)

// openText opens a spec whose file has the given text. If withTimes is true, openText opens the file as a trace with
// times.
func openText(t *testing.T, spec Spec, text string, withTimes bool) (*Trace, error) {
	t.Helper()
	spec.Path = write(t, text)
	if withTimes {
		return OpenTrace(spec, 1)
	}
	source, err := Open(spec, 1)
	if err != nil {
		return nil, err
	}
	return &Trace{source: source.(*finite)}, nil
}

// recorded returns the rows of a trace as text. A row is "seconds prompt/answer", with lengths in tokens.
func recorded(trace *Trace) string {
	var rows []string
	for i := range trace.Len() {
		r := trace.request(i)
		row := fmt.Sprintf("%d/%d", r.PromptTokens, r.OutputTokens)
		if trace.times != nil {
			row = fmt.Sprintf("%.3g %s", trace.times[i].Seconds(), row)
		}
		rows = append(rows, row)
	}
	return strings.Join(rows, ", ")
}

const (
	burstHead = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
	azureHead = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
)

func TestEveryLayoutOfATraceIsRead(t *testing.T) {
	tests := []struct {
		name, text string
		spec       Spec
		want       string
	}{
		{"the first BurstGPT", burstHead + "5,ChatGPT,472,18,490,Conversation log\n118,GPT-4,417,276,693,API log\n", Spec{}, "0 472/18, 113 417/276"},
		{"the third BurstGPT, with sessions", "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n5.5,7,1.2,ChatGPT,472,18,490,x\n6.75,7,,ChatGPT,1,2,3,x\n", Spec{}, "0 472/18, 1.25 1/2"},
		{"failed requests are left out", burstHead + "5,a,472,0,472,x\n6,a,2,1,3,x\n8,a,0,1,1,x\n9,a,4,1,5,x", Spec{}, "0 2/1, 3 4/1"},
		{"numbers from a spreadsheet, with its byte order mark", "\ufeff" + burstHead + "\"5\",\"a\",\"7.0\",\"3.0\"\r\n", Spec{}, "0 7/3"},
		{"the Azure of 2023", azureHead + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n", Spec{}, "0 374/44, 4.31 396/109"},
		{"the Azure of 2024", azureHead + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n", Spec{}, "0 2162/5, 0.00741 2399/6"},
		{"times out of order", azureHead + "2023-11-16 18:00:02,3,1\n2023-11-16 18:00:01,2,1\n2023-11-16 18:00:00,1,1\n", Spec{}, "0 1/1, 1 2/1, 2 3/1"},
		{"the first two of it", azureHead + "2023-11-16 18:00:02,3,1\n2023-11-16 18:00:01,2,1\n2023-11-16 18:00:00,1,1\n", Spec{Requests: 2}, "0 1/1, 1 2/1"},
		{"Mooncake", `{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}` + "\n\n" + `{"timestamp": 30535, "input_length": 512, "output_length": 26, "hash_ids": [46]}`, Spec{}, "0 600/52, 3.05 512/26"},
		{"Mooncake without hash ids, by its name", `{"timestamp": 1, "input_length": 6, "output_length": 5}`, Spec{Layout: "mooncake"}, "0 6/5"},
		{"other answers", azureHead + "2023-11-16 18:00:02,3,1\n", Spec{OutputTokens: 9}, "0 3/9"},
	}
	for _, test := range tests {
		test.spec.Kind = "trace"
		trace, err := openText(t, test.spec, test.text, true)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if got := recorded(trace); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}

func TestTheExampleTracesOpen(t *testing.T) {
	for _, test := range []struct {
		spec    Spec
		name    string
		longest int
		rate    float64
	}{
		{Spec{Kind: "trace", Path: examples + "burstgpt.csv"}, "trace burstgpt.csv (7 requests, burstgpt, 1 without prompt or answer left out)", 1317, 6.0 / 185},
		{Spec{Kind: "trace", Path: examples + "azure.csv", Layout: "azure"}, "trace azure.csv (8 requests, azure)", 2139, 7 / 12.0914},
		{Spec{Kind: "trace", Path: examples + "mooncake.jsonl"}, "trace mooncake.jsonl (6 requests, mooncake)", 2965, 5 / 9.003},
		{Spec{Kind: "capture", Path: examples + "requests.jsonl", Endpoint: Chat}, "capture requests.jsonl (6 requests)", 0, 5 / 8.9},
	} {
		trace, err := OpenTrace(test.spec, 1)
		if err != nil {
			t.Errorf("%s: %v", test.spec.Path, err)
			continue
		}
		source := open(t, test.spec, 1)
		if trace.Name() != test.name || source.Name() != test.name || source.Longest() != test.longest || source.Len() != trace.Len() {
			t.Errorf("%q of %d requests, longest %d, want %q, %d", source.Name(), source.Len(), source.Longest(), test.name, test.longest)
		}
		near(t, "rate of "+test.name, float64(time.Second)/trace.meanGap(), test.rate, 1e-4)
	}
}

func TestBlocksOfATraceShareTheirTokens(t *testing.T) {
	source := open(t, Spec{Kind: "trace", Path: examples + "mooncake.jsonl"}, 1).(*finite)
	shared := func(a, b int) int {
		one, two := source.at(a).Tokens, source.at(b).Tokens
		n := 0
		for n < min(len(one), len(two)) && one[n] == two[n] {
			n++
		}
		return n
	}
	for _, test := range []struct{ a, b, want int }{
		{0, 1, 512},     // hash ids [0 1 2 3] and [0 4 5]
		{0, 2, 3 * 512}, // hash ids [0 1 2 3] and [0 1 2 6 7]
		{2, 4, 4 * 512}, // hash ids [0 1 2 6 7] and [0 1 2 6 9 10]
		{0, 3, 0},       // hash ids [0 1 2 3] and [8]
		{1, 5, 2 * 512}, // hash ids [0 4 5] and [0 4], cut off at 1,024 tokens
	} {
		if got := shared(test.a, test.b); got != test.want {
			t.Errorf("requests %d and %d share %d tokens, want %d", test.a, test.b, got, test.want)
		}
	}
	if other := open(t, Spec{Kind: "trace", Path: examples + "mooncake.jsonl"}, 2).(*finite); slices.Equal(other.at(0).Tokens, source.at(0).Tokens) {
		t.Error("another seed gives the same tokens")
	}
}

// Each stream of recorded traffic starts at some row and then keeps the recorded order.
func TestRecordedOrderIsKept(t *testing.T) {
	source := open(t, Spec{Kind: "trace", Path: examples + "azure.csv"}, 4).(*finite)
	row := make(map[int]int)
	for i := range source.Len() {
		row[source.at(i).PromptTokens] = i
	}
	starts := make(map[int]bool)
	for _, stream := range []Stream{WarmUpStream, PrimeStream, leadInStream, WindowStream, runOutStream} {
		first := row[source.Request(stream, 0).PromptTokens]
		starts[first] = true
		for i := range 20 {
			if got, want := row[source.Request(stream, i).PromptTokens], (first+i)%source.Len(); got != want {
				t.Fatalf("stream %d: request %d is row %d, want %d", stream, i, got, want)
			}
		}
	}
	if len(starts) < 2 {
		t.Error("all streams begin at the same row")
	}
}

func TestBadTracesAreRefused(t *testing.T) {
	const mooncake = `{"timestamp": 1, "input_length": 6, "output_length": 5}` + "\n"
	tests := []struct {
		name string
		spec Spec
		text string
		want []string
	}{
		{"an empty file", Spec{}, " \n\n", []string{"data.txt: the file is empty"}},
		{"only a head", Spec{}, azureHead, []string{"the file is empty"}},
		{"an unknown head", Spec{}, "time,in,out\n1,2,3\n", []string{"line 1: is not the head of a known trace (burstgpt, azure or mooncake)", "TIMESTAMP,ContextTokens,GeneratedTokens"}},
		{"a missing column of a named layout", Spec{Layout: "azure"}, "TIMESTAMP,ContextTokens\n", []string{`line 1: has no column "generatedtokens", which layout azure needs`}},
		{"JSON under a CSV layout", Spec{Layout: "azure"}, mooncake, []string{"layout azure is CSV: use layout mooncake"}},
		{"CSV under mooncake", Spec{Layout: "mooncake"}, azureHead, []string{"line 1: is not a JSON object", "leave the layout out"}},
		{"a log of requests", Spec{}, `{"messages":[]}`, []string{`JSON without "input_length"`, "use kind capture"}},
		{"an unknown layout", Spec{Layout: "mooncak"}, mooncake, []string{`unknown trace layout "mooncak": did you mean "mooncake"?`}},
		{"a short row", Spec{}, azureHead + "2023-11-16 18:00:02,3,1\n2023-11-16 18:00:02,3\n", []string{"line 3: has only 2 columns, needs at least 3", "or skip bad rows"}},
		{"a bad date", Spec{}, azureHead + "yesterday,3,1\n", []string{`line 2: timestamp "yesterday" is not a date such as`}},
		{"a date of another age", Spec{}, azureHead + "0001-01-01 00:00:00,3,1\n", []string{"line 2: timestamp 0001-01-01T00:00:00Z is too far from the present"}},
		{"bad seconds", Spec{}, burstHead + "x,a,1,1\n", []string{`line 2: timestamp "x" is not a number of seconds`}},
		{"infinite seconds", Spec{}, burstHead + "Inf,a,1,1\n", []string{"line 2: timestamp +Inf is too large"}},
		{"half a token", Spec{}, burstHead + "1,a,1.5,1\n", []string{`line 2: request tokens "1.5" is not a whole number`}},
		{"a negative length", Spec{}, burstHead + "1,a,1,-1\n", []string{"line 2: response tokens is -1, must be at least 0"}},
		{"a gigantic prompt", Spec{}, `{"timestamp": 1, "input_length": 2000000000, "output_length": 5}`, []string{"line 1: input_length is 2000000000", "at most 10000000"}},
		{"no time", Spec{}, `{"input_length": 6, "output_length": 5}`, []string{`line 1: has no "timestamp"`}},
		{"no length", Spec{}, `{"timestamp": 1, "input_length": 6}`, []string{`line 1: needs "input_length" and "output_length"`}},
		{"blocks of another size", Spec{}, `{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1,2,3]}`, []string{"line 1: has 3 hash_ids for 600 tokens, must have 2: each id is a block of 512 tokens"}},
		{"a negative block", Spec{}, `{"timestamp": 1, "input_length": 6, "output_length": 5, "hash_ids": [-1]}`, []string{"line 1: hash id -1 must be from 0 to below 2^48"}},
		{"a broken line", Spec{}, mooncake + mooncake + "{", []string{"line 3: is not JSON"}},
		{"a wrong type", Spec{}, mooncake + `{"timestamp": "1", "input_length": 6}`, []string{"line 2: timestamp is a string, must be a number"}},
		{"nothing but failures", Spec{}, burstHead + "1,a,5,0\n2,a,5,0\n", []string{"it has 2 rows, but none has a prompt and an answer"}},
		{"nothing but bad rows", Spec{SkipBadRows: true}, burstHead + "x,a,5,1\ny,a,5,1\n", []string{`all 2 rows are bad; the first one: line 2: timestamp "x"`}},
		{"more than there is", Spec{Requests: 3}, mooncake, []string{"asks for 3 requests, but only 1 request is usable"}},
		{"an endless line", Spec{}, mooncake + strings.Repeat("x", maxRow+10) + "\n", []string{"line 2: is longer than 16 MiB"}},
	}
	for _, test := range tests {
		test.spec.Kind = "trace"
		_, err := openText(t, test.spec, test.text, false)
		explains(t, test.name, err, test.want)
	}
	for _, spec := range []Spec{{Kind: "random"}, {Kind: "jsonl", Path: "x"}} {
		_, err := OpenTrace(spec, 1)
		explains(t, "times of "+spec.Kind, err, []string{"has no arrival times: use kind trace or capture"})
	}
}

func explains(t *testing.T, name string, err error, want []string) {
	t.Helper()
	for _, part := range want {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("%s: %v, want %q in it", name, err, part)
		}
	}
}

func TestBadRowsAreCounted(t *testing.T) {
	const line = `{"prompt":"a question","output_tokens":3}` + "\n"
	tests := []struct {
		name  string
		spec  Spec
		text  string
		n     int
		first string
	}{
		{"jsonl", Spec{Kind: "jsonl"}, line + "{\n" + line + "{}\n" + line, 2, "line 2: is not JSON"},
		{"an endless line among others", Spec{Kind: "jsonl"}, line + `{"prompt":"` + strings.Repeat("x", maxRow) + "\n" + line, 1, "line 2: is longer than 16 MiB"},
		{"capture", Spec{Kind: "capture", OutputTokens: 2}, `{"prompt":"x"}` + "\n" + `{"prompt":"x","n":2}` + "\n", 1, "line 2: n cannot be sent"},
		{"azure", Spec{Kind: "trace"}, azureHead + "x,3,1\n2023-11-16 18:00:02,3,1\n", 1, `line 2: timestamp "x"`},
		{"mooncake, from the first line on", Spec{Kind: "trace"}, `{"input_length":1}` + "\n" + `{"timestamp":1,"input_length":1,"output_length":1}`, 1, `line 1: has no "timestamp"`},
		{"sharegpt", Spec{Kind: "sharegpt"}, `[{"conversations":[{"value":7}]},{"conversations":[{"value":"a longer question"},{"value":"a longer answer, too"}]}]`, 1, "entry 1: conversations.value is a number"},
	}
	for _, test := range tests {
		if _, err := openText(t, test.spec, test.text, false); err == nil || !strings.Contains(err.Error(), "; or skip bad rows") {
			t.Errorf("%s: %v, want an error unless bad rows are skipped", test.name, err)
		}
		test.spec.SkipBadRows = true
		trace, err := openText(t, test.spec, test.text, false)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		n, first := Skipped(trace.source)
		if n != test.n || !strings.HasPrefix(fmt.Sprint(first), test.first) || !strings.Contains(trace.Name(), render.Count(n, "bad row")+" skipped") {
			t.Errorf("%s: %q skipped %d, the first with %v, want %d with %q", test.name, trace.Name(), n, first, test.n, test.first)
		}
	}
	if n, first := Skipped(open(t, Spec{Kind: "phase1"}, 1)); n != 0 || first != nil {
		t.Errorf("phase1 skipped %d rows with %v", n, first)
	}
}

// The limit of CPU time catches a reader with quadratic cost. ShareGPT's own file is as large as this one, and takes 1 s
// without the race detector.
func TestALargeFileOpensSoon(t *testing.T) {
	realtime.Only(t, "reads a file of 50 MB")
	words := strings.Repeat("some words of a long conversation ", 40)
	entry := fmt.Sprintf(`{"id":"x","conversations":[{"from":"human","value":"%s"},{"from":"gpt","value":"%s"},{"from":"human","value":"%s"},{"from":"gpt","value":"%s"}]}`, words, words, words, words)
	text := "[" + strings.Repeat(entry+",\n", 50_000_000/len(entry)) + entry + "]"
	began := cpuTime(t)
	trace, err := openText(t, Spec{Kind: "sharegpt"}, text, false)
	if err != nil {
		t.Fatal(err)
	}
	if took := cpuTime(t) - began; took > time.Minute {
		t.Errorf("%d MB with %d requests took %s of CPU time", len(text)>>20, trace.Len(), took)
	} else {
		t.Logf("%d MB with %d requests took %s of CPU time", len(text)>>20, trace.Len(), took)
	}
}

// cpuTime returns the CPU time that this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
