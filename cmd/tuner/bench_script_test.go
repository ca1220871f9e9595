package main

import (
	"net/http"
	"net/http/httptest"
	"os"

	"github.com/rogpeppe/go-internal/testscript"
)

// freePort is the script command freeport NAME: it sets the environment variable NAME to a free port.
func freePort(ts *testscript.TestScript, negated bool, args []string) {
	if negated || len(args) != 1 {
		ts.Fatalf("usage: freeport NAME")
	}
	port, err := unusedPort()
	ts.Check(err)
	ts.Setenv(args[0], port)
}

// waitReady is the script command waitready URL: it waits until the server at URL is healthy.
func waitReady(ts *testscript.TestScript, negated bool, args []string) {
	if negated || len(args) != 1 {
		ts.Fatalf("usage: waitready URL")
	}
	if !isHealthy(args[0], patience, nil) {
		ts.Fatalf("the server at %s is not healthy after %s", args[0], patience)
	}
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
