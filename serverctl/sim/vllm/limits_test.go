package vllm

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"

	"vllmtuner/realtime"
)

// An endlessBody is the body of a request: a list of token ids that never ends.
type endlessBody struct {
	mu    sync.Mutex
	taken int // bytes
}

func (e *endlessBody) Read(b []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := copy(b, strings.Repeat("1,", len(b)/2+1))
	if e.taken == 0 {
		n = copy(b, `{"model":"m","max_tokens":1,"prompt":[1,`)
	}
	e.taken += n
	return n, nil
}

// Endless bodies and headers do not use up the memory of the server. The server answers other requests afterwards.
func TestBodiesAndHeadsAreBounded(t *testing.T) {
	realtime.Only(t, "sends bodies without an end")
	url := serveFast(t, "0.32.0", "m", "--max-model-len", "4096")
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} {
		var all sync.WaitGroup
		clients := 1
		if path == "/v1/completions" {
			clients = 4 // four bodies of maxBody use up bodiesIn
		}
		for range clients {
			all.Go(func() {
				body := &endlessBody{}
				response, err := http.Post(url+path, "application/json", io.LimitReader(body, 600<<20))
				if err != nil { // the server has closed the connection while the client still wrote
					t.Logf("%s without a length: %v", path, err)
				} else {
					text, _ := io.ReadAll(response.Body)
					response.Body.Close()
					if response.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(string(text), "16777216 bytes") {
						t.Errorf("%s without a length: %d %s, want 413", path, response.StatusCode, text)
					}
				}
				body.mu.Lock()
				defer body.mu.Unlock()
				if body.taken > 2*maxBody {
					t.Errorf("%s read %d bytes of an endless body", path, body.taken)
				}
			})
		}
		all.Wait()
		if got := answerTo(t, url, "POST "+path+" HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\nContent-Length: 629145600\r\n\r\n"); got != http.StatusRequestEntityTooLarge {
			t.Errorf("%s with a length of 600 MiB: %d, want 413 before the body is sent", path, got)
		}
	}
	if got := answerTo(t, url, "GET /health HTTP/1.1\r\nHost: m\r\nX-Long: "+strings.Repeat("x", maxHead+8192)+"\r\n\r\n"); got != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("headers of more than %d bytes: %d, want 431", maxHead, got)
	}
	if got := answerTo(t, url, "GET /health HTTP/1.1\r\nHost: m\r\nX-Long: "+strings.Repeat("x", maxHead/2)+"\r\n\r\n"); got != http.StatusOK {
		t.Errorf("headers of %d bytes: %d, want 200", maxHead/2, got)
	}
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	if grown := int64(after.Sys) - int64(before.Sys); grown > 384<<20 {
		t.Errorf("7 endless bodies took %d MiB", grown>>20)
	} else {
		t.Logf("7 endless bodies took %d MiB", grown>>20)
	}
}

// The longest text gets vLLM's answer. A list with too many values is refused, because such a list takes many times its
// size in memory.
func TestTheLargestBodies(t *testing.T) {
	realtime.Only(t, "sends bodies of many megabytes")
	t.Parallel()
	url := serveFast(t, "0.32.0", "m", "--max-model-len", "4096")
	for _, row := range []struct {
		name, prompt string
		status       int
		words        string
	}{
		{"a text with commas and quotes", `"` + strings.Repeat(`ab, \"`, maxBody/8) + `"`, http.StatusBadRequest, "4096"},
		{"many ids", "[1" + strings.Repeat(",1", 100_000) + "]", http.StatusBadRequest, "4096"},
		{"too many ids", "[1" + strings.Repeat(",1", maxValues) + "]", http.StatusRequestEntityTooLarge, "262144 values"},
		{"too many lists", "[[]" + strings.Repeat(",[]", maxValues) + "]", http.StatusRequestEntityTooLarge, "262144 values"},
	} {
		response, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"model":"m","max_tokens":1,"prompt":`+row.prompt+`}`))
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != row.status || !strings.Contains(string(answer), row.words) {
			t.Errorf("%s: %d %.300s, want %d and %q", row.name, response.StatusCode, answer, row.status, row.words)
		}
	}
}

// answerTo sends the given head of a request and returns the status of the answer.
func answerTo(t *testing.T, url, head string) int {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() { _, _ = io.WriteString(conn, head) }() // the server may answer before it has read the whole head
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Errorf("the answer cannot be read: %v", err)
		return 0
	}
	defer response.Body.Close()
	return response.StatusCode
}
