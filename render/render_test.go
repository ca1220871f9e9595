package render

import (
	"strings"
	"testing"
	"time"
)

func TestFigures(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Count(0, "probe"), "0 probes"}, {Count(1, "probe"), "1 probe"}, {Count(2, "study"), "2 studies"}, {Count(3, "process"), "3 processes"},
		{Done(12, 30, "trial"), "12 of 30 trials done"}, {Done(0, 1, "trial"), "0 of 1 trial done"}, {Done(1, 0, "trial"), "1 trial done"},
		{Of(1, 40, "request"), "1 of 40 requests"}, {Of(0, 1, "request"), "0 of 1 request"}, {All(3, "row"), "all 3 rows"}, {All(1, "row"), "the only row"},
		{Are(1, "request"), "1 request is"}, {Are(0, "request"), "0 requests are"},
		{Share(0.43), "43 %"}, {Share(0.0126), "1.3 %"}, {Share(0.0001), "< 0.1 %"}, {Percent(0.04), "+4 %"}, {ShortPercent(-0.126), "-13%"}, {ErrorShare(0.043), "± 4.3 %"}, {ErrorShare(0.0001), "< 0.1 %"}, {Percent(-0.001), "0 %"}, {Percent(0.001), "0 %"}, {Percent(-0.126), "-13 %"},
		{Span(0), "0 s"}, {Span(59600 * time.Millisecond), "1 min"}, {Span(130 * time.Second), "2 min 10 s"}, {Span(10*time.Minute + 20*time.Second), "10 min"},
		{Span(59*time.Minute + 40*time.Second), "1 h 00 min"}, {Span(123 * time.Minute), "2 h 03 min"},
		{Took(0), "0 s"}, {Took(710 * time.Microsecond), "710 µs"}, {Took(2260 * time.Microsecond), "2.3 ms"}, {Took(999600 * time.Nanosecond), "1 ms"},
		{Took(250 * time.Millisecond), "250 ms"}, {Took(999600 * time.Microsecond), "1 s"}, {Took(4200 * time.Millisecond), "4.2 s"}, {Took(9960 * time.Millisecond), "10 s"},
		{Took(90 * time.Second), "1 min 30 s"},
		{Left(900 * time.Millisecond), ""}, {Left(-time.Hour), ""}, {Left(time.Second), "about 1 s left"}, {Left(90 * time.Minute), "about 1 h 30 min left"},
		{bar(0.5, 8), "████░░░░"}, {bar(2, 3), "███"},
		{Number(2.7149), "2.71"}, {Number(999.7), "1000"}, {Number(12345), "12345"}, {Number(-1234.5), "-1234"},
		{Number(0.01), "0.01"}, {Number(0), "0"},
		{Rate(2), "2"}, {Rate(2.0594), "2.059"}, {Rate(0.0234), "0.0234"}, {Rate(0.00012), "0.00012"}, {Rate(123.45), "123.5"},
		{Rate(9999.4), "9999"}, {Rate(9999.6), "10000"}, {Rate(12345), "12345"}, {Rate(99999.7), "100000"},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

// A wide character takes two columns of a terminal, and a combining character takes none.
func TestClipCountsColumns(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"plain", 5, "plain"}, {"plain text", 5, "plai…"}, {"first\nsecond", 20, "first"},
		{"模型模型", 8, "模型模型"}, {"模型模型", 6, "模型…"}, {"e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301e\u0301"}, {"e\u0301e\u0301e\u0301", 2, "e\u0301…"},
		{"👩‍🚀 flies", 5, "👩‍🚀 f…"}, {"text", 1, "…"}, {"text", 0, ""},
	} {
		got := Clip(c.text, c.n)
		if got != c.want || Width(got) > c.n {
			t.Errorf("Clip(%q, %d) = %q of %d columns, want %q", c.text, c.n, got, Width(got), c.want)
		}
	}
}

func FuzzClip(f *testing.F) {
	f.Add("模型 e\u0301 text", 4)
	f.Fuzz(func(t *testing.T, text string, n int) {
		if got := Clip(text, n); n >= 0 && Width(got) > n {
			t.Errorf("Clip(%q, %d) takes %d columns", text, n, Width(got))
		}
	})
}

// A table that is too wide clips cells first, and then drops columns.
func TestTableFits(t *testing.T) {
	table := Table{
		Columns: []Column{{Head: "name"}, {Head: "n", Right: true, Rank: 1}, {Head: "age", Rank: 2}, {Head: "what it is", ShrinkTo: 6, Rank: 3}},
		Rows:    [][]string{{"a", "1", "3 s", "a text that is long"}, {"模型", "20", "14 min", "short"}},
	}
	for _, c := range []struct {
		width int
		want  string
	}{
		{80, "name   n  age     what it is\na      1  3 s     a text that is long\n模型  20  14 min  short"},
		{28, "name   n  age     what it is\na      1  3 s     a text th…\n模型  20  14 min  short"},
		{24, "name   n  age     what …\na      1  3 s     a tex…\n模型  20  14 min  short"},
		{20, "name   n  age\na      1  3 s\n模型  20  14 min"},
		{8, "name   n\na      1\n模型  20"},
		{3, "name\na\n模型"},
	} {
		got := strings.Join(table.Lines(c.width), "\n")
		if got != c.want {
			t.Errorf("in %d columns it is\n%s\nwant\n%s", c.width, got, c.want)
		}
	}
}

// The line of a stage fits the terminal, also with wide and combining characters.
func TestAStageFits(t *testing.T) {
	long := Stage{Head: "12 of 30 trials done", Share: 0.4, Until: time.Now().Add(time.Hour), Step: "模型-e\u0301 " + strings.Repeat("a long story ", 20)}
	for width := 1; width < 200; width++ {
		if got := Width(long.line(width)); got > width {
			t.Errorf("in %d columns it takes %d: %s", width, got, long.line(width))
		}
	}
	now := Stage{Head: "12 of 30 trials done", Share: 0.4, Until: time.Now().Add(359 * time.Second), Step: "trial 12, 2.5 req/s passed"}
	for width, want := range map[int]string{
		90: "███░░░░░ 12 of 30 trials done, about 5 min 59 s left: trial 12, 2.5 req/s passed",
		78: "12 of 30 trials done, about 5 min 59 s left: trial 12, 2.5 req/s passed",
		60: "12 of 30 trials done: trial 12, 2.5 req/s passed",
		20: "12 of 30 trials don…",
	} {
		if got := now.line(width); got != want {
			t.Errorf("in %d columns it is %q, want %q", width, got, want)
		}
	}
	now.Until = time.Now().Add(300 * time.Millisecond)
	if got := now.line(90); strings.Contains(got, "left") {
		t.Errorf("with less than a second left it is %q", got)
	}
}

// A long word is broken after a slash if there is one, and never within a character.
func TestBreak(t *testing.T) {
	for text, want := range map[string]string{
		"a /sys/fs/cgroup/x b": "a /sys/fs/|cgroup/x b", "ab cdefghijklmno": "ab|cdefghijkl|mno", "模模模模模模 a": "模模模模模|模 a", "short text": "short text",
	} {
		if got := strings.Join(Break(text, 10), "|"); got != want {
			t.Errorf("Break(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestParagraphIndents(t *testing.T) {
	long := strings.Repeat("word ", 40)
	for line := range strings.Lines(Paragraph("  "+long, "    ", 80)) {
		if len(line) > 81 {
			t.Errorf("a line has %d columns: %q", len(line), line)
		}
	}
	if got := Paragraph("  a b", "    ", 80); got != "  a b\n" {
		t.Errorf("a short text becomes %q", got)
	}
}

// A table that folds breaks its heads, and puts the columns that do not fit into a block below.
func TestTableFolds(t *testing.T) {
	table := Table{Folds: true}
	table.Add(Column{Head: "rate", Right: true}, []string{"1.00", "10.00"})
	for _, name := range []string{"phase1-baseline-rerun", "a", "averyveryverylongnamethatnobodybreaks", "b.c_d", "another-averyveryverylongname"} {
		table.Add(Column{Head: name, Right: true}, []string{"1", "FAIL (x)"})
	}
	var text Text
	text.Table("T", table)
	want := `
T
        phase1-
      baseline-
 rate     rerun        a averyveryverylongnamethatnobodybreaks    b.c_d
 1.00         1        1                                     1        1
10.00  FAIL (x) FAIL (x)                              FAIL (x) FAIL (x)

                   another-
 rate averyveryverylongname
 1.00                     1
10.00              FAIL (x)
`
	got := text.String()
	if got != want {
		t.Errorf("the table is\n%s\nwant\n%s", got, want)
	}
	for line := range strings.Lines(got) {
		if line = strings.TrimSuffix(line, "\n"); Width(line) > defaultWidth || strings.HasSuffix(line, " ") {
			t.Errorf("a line is too long or ends with blanks: %q", line)
		}
	}
}

func TestBytes(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1 << 20: "1 MiB", 64 << 20: "64 MiB", 1023 << 20: "1 GiB", 25276502016: "23.5 GiB", 1 << 62: "4 EiB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("Bytes(%d) = %q, want %q", n, got, want)
		}
	}
}

// A table may have heads above heads, texts below rows, an indent, and cells of several lines.
func TestTableParts(t *testing.T) {
	table := Table{
		Columns: []Column{
			{Head: "name", Alone: true, ShrinkTo: 6}, {Head: "p50", Group: "TTFT ms", Right: true}, {Head: "p99", Group: "TTFT ms", Right: true, MinWidth: 5},
			{Right: true}, {Head: "flags", Wraps: true, ShrinkTo: 8},
		},
		Rows:   [][]string{{"short", "1", "20", "", "a=1 b=2 c=3"}, {"a long name", "3", "4", "", "a=1"}},
		Under:  []string{"it was late in each of its runs"},
		Indent: 1,
	}
	for _, c := range []struct {
		width int
		want  string
	}{
		{80, `
                 TTFT ms
 name         p50    p99  flags
 short          1     20  a=1 b=2 c=3
     it was late in each of its runs
 a long name    3      4  a=1`},
		{29, `
            TTFT ms
 name    p50    p99  flags
 short     1     20  a=1 b=2
                     c=3
     it was late in each of
       its runs
 a long name
           3      4  a=1`},
	} {
		if got := "\n" + strings.Join(table.Lines(c.width), "\n"); got != c.want {
			t.Errorf("in %d columns it is%s\nwant%s", c.width, got, c.want)
		}
	}
	rows := Table{Columns: []Column{{MinWidth: 4}, {}}, Rows: [][]string{{"a", "b"}}}
	if got := rows.Lines(80); len(got) != 1 || got[0] != "a     b" {
		t.Errorf("a table without heads is %q", got)
	}
}

// A line never ends between a sign, its number and its unit, if all of them fit into a line.
func TestWrapKeepsUnits(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"it carries 2.5 req/s", 14, "it carries|2.5 req/s"}, {"it carries 2.5 req/s", 20, "it carries 2.5 req/s"},
		{"a gain of +4 %, likely", 12, "a gain of|+4 %, likely"}, {"after (2 min 10 s)", 8, "after|(2 min|10 s)"},
		{"2.4–2.6 req/s", 7, "2.4–2.6|req/s"}, {"of 30 trials", 5, "of 30|trials"}, {"p99 TTFT 60 s", 11, "p99 TTFT|60 s"},
		{"p99 TPOT <= 60 ms", 16, "p99 TPOT|<= 60 ms"}, {"a share of (< 0.1 %)", 16, "a share of|(< 0.1 %)"}, {"at <= 60 ms", 5, "at|<= 60|ms"},
		{"version 0.33, s", 13, "version 0.33,|s"},
	} {
		if got := strings.Join(Wrap(c.text, c.n), "|"); got != c.want {
			t.Errorf("Wrap(%q, %d) = %q, want %q", c.text, c.n, got, c.want)
		}
	}
	if got, want := Hang("rate  ", "the winner: 2.5 req/s", "      ", 20), "rate  the winner:\n      2.5 req/s\n"; got != want {
		t.Errorf("Hang returns %q, want %q", got, want)
	}
}
