package bench

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"

	"vllmtuner/bench/workload"
)

const (
	streamed = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	unframed = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
	theEnd   = "0\r\n\r\n"
	whole    = token + token + last + counted + done // three tokens
)

// framed returns a text as one HTTP chunk.
func framed(text string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(text), text) }

// plain returns a response with a Content-Length.
func plain(status, kind, body string) string {
	return fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", status, kind, len(body), body)
}

// A script is how a hostile server answers each request. It must end when the client closes the connection.
type script func(conn net.Conn) error

// say returns a script that writes a text and leaves the connection open for the next request.
func say(text string) script {
	return func(conn net.Conn) error {
		_, err := io.WriteString(conn, text)
		return err
	}
}

// hangUp returns a script that writes a text and closes the connection.
func hangUp(text string) script {
	return func(conn net.Conn) error { return errors.Join(say(text)(conn), conn.Close()) }
}

// flood returns a script that writes a text once. Then it writes the filler again and again, as fast as the client
// reads.
func flood(text, filler string) script {
	return func(conn net.Conn) error {
		err := say(text)(conn)
		for block := strings.Repeat(filler, max(1, 32<<10/len(filler))); err == nil; {
			err = say(block)(conn)
		}
		return err
	}
}

// drip returns a script that writes a text once. Then it writes the filler again and again, byte by byte. Such a server
// is never silent for long and never done.
func drip(text, filler string) script {
	return func(conn net.Conn) error {
		err := say(text)(conn)
		for i := 0; err == nil; i++ {
			time.Sleep(30 * time.Millisecond)
			err = say(filler[i%len(filler) : i%len(filler)+1])(conn)
		}
		return err
	}
}

// listen calls serve with each connection. The returned function stop closes all connections and waits until each call
// of serve has returned. If stop did not close them, a server that blocks in a write might not learn for minutes that
// the client has gone.
func listen(t *testing.T, serve func(conn net.Conn)) (url string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	var open sync.Map
	accepted := make(chan struct{})
	serving.Go(func() {
		defer close(accepted)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			open.Store(conn, true)
			serving.Go(func() {
				defer conn.Close()
				serve(conn)
			})
		}
	})
	return "http://" + listener.Addr().String(), func() {
		listener.Close()
		<-accepted // from here on no connection is added to the map open
		open.Range(func(conn, _ any) bool { conn.(net.Conn).Close(); return true })
		serving.Wait()
	}
}

// serveScript answers the requests of one connection with the script.
func serveScript(conn net.Conn, do script) {
	in := bufio.NewReader(conn)
	for {
		request, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, request.Body); err != nil || do(conn) != nil {
			return
		}
	}
}

func zipped(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = io.WriteString(w, text) // writing to a buffer never fails
	_ = w.Close()
	return b.String()
}

// Whatever a server does, a run ends within its limits, names the failure, takes little memory and leaves nothing behind.
func TestAHostileServerDoesNoHarm(t *testing.T) {
	ok, chunk := streamed+framed(whole)+theEnd, framed(token)
	halfClose := func(conn net.Conn) error {
		return errors.Join(say(streamed+chunk)(conn), conn.(*net.TCPConn).CloseWrite())
	}
	reset := func(conn net.Conn) error {
		return errors.Join(say(streamed+chunk)(conn), conn.(*net.TCPConn).SetLinger(0), conn.Close())
	}
	tests := []struct {
		name   string
		do     script
		want   Failure
		detail string
	}{
		{"a good answer", say(ok), "", ""},
		{"a head that drips", drip("HTTP/1.1 200 OK\r\nX: ", "x"), NeverFinished, "took"},
		{"a body that drips", drip(unframed+"data: ", "x"), NeverFinished, "took"},
		{"a refusal that drips", drip("HTTP/1.1 503 No\r\nContent-Length: 1000\r\n\r\n", "x"), NeverFinished, "took"},
		{"silence", say(""), TimedOut, "no byte came"},
		{"a head and then silence", say(streamed), TimedOut, "no byte came"},
		{"tokens without end", flood(streamed, chunk), WrongLength, "the stream goes on after"},
		{"comments without end", flood(streamed, framed(": still here\n\n")), NeverFinished, "took"},
		{"events without output, without end", flood(streamed, framed("data: {\"choices\":[]}\n\n")), NeverFinished, "took"},
		{"a line without end", flood(unframed+"data: {", "x"), Malformed, "a line of the stream has more than"},
		{"a chunk of gigabytes in one line", flood(streamed+"ffffffffff\r\n", "x"), Malformed, "a line of the stream has more than"},
		{"a chunk of gigabytes that does not come", say(streamed + "7fffffffffffffff\r\n"), TimedOut, "no byte came"},
		{"a chunk size of more than 64 bits", say(streamed + "fffffffffffffffff\r\n"), Malformed, "is not a number"},
		{"a chunk size below zero", say(streamed + "-1\r\n"), Malformed, `chunk size "-1" is not a number`},
		{"a chunk size that is a word", say(streamed + "xyz\r\n"), Malformed, `chunk size "xyz" is not a number`},
		{"the size of a chunk without end", flood(streamed, "0"), Malformed, "a line between chunks has more than"},
		{"an extension of a chunk without end", flood(streamed+"1;", "x"), Malformed, "a line between chunks has more than"},
		{"a chunk that is longer than its size", say(streamed + "2\r\nabcd\r\n"), Malformed, "follows a chunk, want a new line"},
		{"headers without end", flood("HTTP/1.1 200 OK\r\n", "X: y\r\n"), Malformed, "the head of the response has more than"},
		{"a huge header", say("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n"), Malformed, "the head of the response has more than"},
		{"hints without end", flood("", "HTTP/1.1 103 Early Hints\r\n\r\n"), Malformed, "the informational responses have more than"},
		{"hints before a good answer", say("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok), "", ""},
		{"another protocol", say("SSH-2.0-OpenSSH_9.2\r\n\r\n"), Malformed, "not an HTTP response"},
		{"a length below zero", say("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), Malformed, "not an HTTP response"},
		{"a half-closed connection", halfClose, Reset, "broke during the answer"},
		{"a connection that is reset", reset, Reset, "broke during the answer"},
		{"a connection that closes after the head", hangUp(streamed), Reset, "broke during the answer"},
		{"a body shorter than its length", hangUp("HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + token), Reset, "broke during the answer"},
		{"a connection that closes before the answer", hangUp(""), Reset, "EOF"},
		{"a token and then silence", say(streamed + chunk), TimedOut, "no byte came for 100 ms"},
		{"no [DONE]", say(streamed + chunk + theEnd), Truncated, "without [DONE]"},
		{"no usage", say(streamed + framed(token+done) + theEnd), NoUsage, "include_usage"},
		{"no tokens", say(streamed + framed(done) + theEnd), NoTokens, "no token"},
		{"two tokens", say(streamed + framed(token+strings.ReplaceAll(counted, "_tokens\":3", "_tokens\":2")+done) + theEnd), WrongLength, "the server generated 2 tokens instead of 3"},
		{"an engine that dies", say(streamed + framed(token+`data: {"error":{"message":"EngineCore encountered an issue","code":500}}`+"\n\n"+done) + theEnd), StreamError, "EngineCore encountered an issue"},
		{"a prompt that is too long", say(plain("400 No", "application/json", `{"error":{"message":"This model's maximum context length is 2048 tokens","code":400}}`)), Status, "400: This model's maximum context length is 2048 tokens"},
		{"a refusal in another form", say(plain("404 No", "application/json", `{"detail":"Not Found"}`)), Status, "404: {\"detail\":\"Not Found\"}"},
		{"a refusal without a text", say(plain("503 No", "text/plain", "")), Status, "503: Service Unavailable"},
		{"tokens after the end", flood(streamed+framed(whole), chunk), "", ""},
		{"trailers without end", flood(streamed+framed(whole)+"0\r\n", "X: y\r\n"), "", ""},
		{"a second response without a request", say(ok + ok), "", ""},
		{"garbage after the end", say(ok + "garbage"), "", ""},
		{"Connection: close", hangUp("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " + fmt.Sprint(len(whole)) + "\r\n\r\n" + whole), "", ""},
		{"Connection: close that does not close", say("HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + framed(whole) + theEnd), "", ""},
		{"HTTP/1.0", hangUp("HTTP/1.0 200 OK\r\n\r\n" + whole), "", ""},
		{"HTTP/1.0 that is cut", hangUp("HTTP/1.0 200 OK\r\n\r\n" + token + counted), Truncated, "without [DONE]"},
		{"no body", say("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), Truncated, "without [DONE]"},
		{"an answer compressed with gzip", say(plain("200 OK", "text/event-stream\r\nContent-Encoding: gzip", zipped(whole))), Malformed, "compresses its answer with gzip"},
		{"a redirect", say("HTTP/1.1 307 Moved\r\nLocation: /v1/completions\r\nContent-Length: 0\r\n\r\n"), Status, "Location: /v1/completions"},
		{"a page of HTML", say(plain("200 OK", "text/html", "<!doctype html><title>nginx</title>")), Malformed, "web page"},
		{"JSON that is not a stream", say(plain("200 OK", "application/json", `{"choices":[{"text":"a"}]}`)), Malformed, "does not stream"},
		{"a refusal without end", flood("HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", framed("no ")), Status, "500: no no"},
		{"a text that is not UTF-8", say(streamed + framed(strings.ReplaceAll(whole, `" a"`, "\" \xff\xfe\"")) + theEnd), "", ""},
		{"an error that is not UTF-8", say(plain("400 No", "text/plain", "\xff\xfe no")), Status, "400: "},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			goroutines := runtime.NumGoroutine()
			url, stop := listen(t, func(conn net.Conn) { serveScript(conn, test.do) })
			// Only the limit under test is short, so that a slow machine does not reach another limit first.
			c := &Client{URL: url, Model: "tiny", IdleTimeout: time.Minute, RunLimit: time.Minute}
			switch test.want {
			case TimedOut:
				c.IdleTimeout = 100 * time.Millisecond
			case NeverFinished:
				c.RunLimit = 200 * time.Millisecond
			}
			peak := watchHeap(t)
			defer stop()
			schedule := join(requests(workload.LeadIn, 1, 0, 0, ask(3)), requests(workload.Window, 2, 0, 5*time.Millisecond, ask(3)))
			run, err := c.Run(t.Context(), schedule, nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range run.Samples {
				if s.Failure != test.want || !strings.Contains(s.Detail, test.detail) || s.End == 0 {
					t.Errorf("sample %+v, want failure %q with %q", s, test.want, test.detail)
				}
				known := s.Status > 0 && strings.HasPrefix(s.Detail, fmt.Sprintf("%d: ", s.Status))
				if known != (test.want == Status) || s.Status != run.BrokenStatus {
					t.Errorf("sample %+v, and status %d of the uncounted request; want the status that the detail begins with, and only for %s", s, run.BrokenStatus, Status)
				}
			}
			if run.Others != 1 || (run.Broken > 0) != (test.want != "") || !strings.Contains(run.BrokenDetail, test.detail) {
				t.Errorf("%d of %d uncounted requests failed (%s), want the one to fail like the others", run.Broken, run.Others, run.BrokenDetail)
			}
			if limit := 45 * time.Second; len(run.Samples) != 2 || run.Elapsed > limit {
				t.Errorf("%d samples after %s, want 2 within %s", len(run.Samples), run.Elapsed, limit)
			}
			// The bound leaves room for garbage (memory that is not collected yet). A client that keeps everything a flooding
			// server sends takes gigabytes.
			if grown := peak(); grown > 40<<20 {
				t.Errorf("the heap grew by %d MiB, want at most 40", grown>>20)
			}
			stop()
			waitForGoroutines(t, goroutines)
		})
	}
}

// watchHeap starts to watch the heap. The returned function peak ends the watching and returns the largest growth of
// the heap in bytes.
func watchHeap(t *testing.T) (peak func() int64) {
	t.Helper()
	heap := func() int64 {
		sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		metrics.Read(sample)
		return int64(sample[0].Value.Uint64())
	}
	runtime.GC()
	before, highest := heap(), int64(0)
	end, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		for {
			select {
			case <-end:
				return
			case <-time.After(5 * time.Millisecond):
				highest = max(highest, heap())
			}
		}
	}()
	return func() int64 {
		close(end)
		<-gone
		return highest - before
	}
}

// waitForGoroutines waits until at most n goroutines are left.
func waitForGoroutines(t *testing.T, n int) {
	t.Helper()
	for deadline := time.Now().Add(45 * time.Second); runtime.NumGoroutine() > n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<16)
			t.Fatalf("%d goroutines are left after 45 s, want %d:\n%s", runtime.NumGoroutine(), n, stacks[:runtime.Stack(stacks, true)])
		}
	}
}
