package bench

import (
	"io"
	"reflect"
	"strings"
	"testing"
	"time"
)

// A stream gives the same answer, text included, wherever it is cut into pieces. All bytes arrive at one time here, so the
// times must agree too. Memory is bounded, however long the lines are.
func FuzzAnswerCutAnywhere(f *testing.F) {
	f.Add([]byte(token+last+counted+done), []byte{1, 7, 0, 200}, false)
	f.Add([]byte(strings.ReplaceAll(roleOnly+said+counted+done, "\n", "\r\n")), []byte{3}, true)
	f.Add([]byte(": ping\n\n"+token+": \xff\xfe\n\ndata: {\"choices\":[{\"text\":\"\xff\"}]}\n\n"+counted+done), []byte{2, 9}, false)
	f.Add([]byte("data: {"+strings.Repeat("x", maxLine+10)), []byte{255}, false)
	f.Add([]byte("\ufeffdata\rdata: {\rdata:}\r\r\nid\nfoo: bar\n"+strings.ReplaceAll(token+counted+done, "\n", "\r")), []byte{0, 4}, false)
	f.Add([]byte("\r\n\r\r\ndata:\n\ndata: \ndata: {}\n\ndata: [DONE] \r"), []byte{0}, true)
	f.Fuzz(func(t *testing.T, text, cuts []byte, chat bool) {
		const at = time.Second
		read := func(cut func(left []byte) int) *answer {
			a := &answer{chat: chat, itl: true, keep: true, want: 3}
			for left := text; len(left) > 0; {
				n := cut(left)
				a.feed(left[:n], at)
				left = left[n:]
			}
			if held := cap(a.rest) + cap(a.data); held > 8*maxLine+len(text) {
				t.Fatalf("the answer holds %d bytes of a stream of %d", held, len(text))
			}
			a.finish(io.EOF, at)
			a.judge()
			a.lines = lines{}
			return a
		}
		whole := read(func(left []byte) int { return len(left) })
		i := 0
		pieces := read(func(left []byte) int {
			n := len(left)
			if len(cuts) > 0 {
				n = min(n, 1+int(cuts[i%len(cuts)])*(1+len(text)/4096)) // a giant line must not make too many pieces
				i++
			}
			return n
		})
		if strings.Contains(whole.detail+pieces.detail, "has more than") {
			return // whether a line is too long depends on the pieces
		}
		if !reflect.DeepEqual(whole, pieces) {
			t.Errorf("whole: %+v\nin pieces: %+v", whole, pieces)
		}
	})
}
