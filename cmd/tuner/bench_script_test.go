package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// freePort is the script command freeport NAME: it sets the environment variable NAME to a free port.
func freePort(ts *testscript.TestScript, negated bool, args []string) {
	if negated || len(args) != 1 {
		ts.Fatalf("usage: freeport NAME")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	ts.Check(err)
	ts.Setenv(args[0], port)
}

// waitReady is the script command waitready URL: it waits until a server answers at URL.
func waitReady(ts *testscript.TestScript, negated bool, args []string) {
	if negated || len(args) != 1 {
		ts.Fatalf("usage: waitready URL")
	}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		response, err := http.Get(args[0])
		if err != nil {
			continue
		}
		response.Body.Close()
		return
	}
	ts.Fatalf("nothing answers at %s within 30 s", args[0])
}

// serveFile is the script command serve NAME FILE: it starts a server that answers every request with FILE until the
// script ends, and sets the environment variable NAME to its URL.
func serveFile(ts *testscript.TestScript, negated bool, args []string) {
	if negated || len(args) != 2 {
		ts.Fatalf("usage: serve NAME FILE")
	}
	text, err := os.ReadFile(ts.MkAbs(args[1]))
	ts.Check(err)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(text) }))
	ts.Defer(server.Close)
	ts.Setenv(args[0], server.URL)
}
