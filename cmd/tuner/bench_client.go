package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/urfave/cli/v2"
	"golang.org/x/net/http/httpguts"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/foreign"
)

// benchClient returns the client that the flags describe. It writes notes to stderr.
func benchClient(c *cli.Context, stderr io.Writer) (*bench.Client, error) {
	base, err := benchURL(c.String("url"))
	if err != nil {
		return nil, err
	}
	client := &bench.Client{
		URL: base.String(), Model: c.String("model"), Endpoint: c.String("endpoint"), ITL: true,
		IdleTimeout: c.Duration("idle-timeout"), RunLimit: c.Duration("answer-limit"), Natural: c.Bool("natural"), MaxInFlight: c.Int("max-concurrency"),
	}
	if err := oneOf("endpoint", client.Endpoint, workload.Completions, workload.Chat); err != nil {
		return nil, err
	}
	if client.IdleTimeout <= 0 {
		return nil, usage("--idle-timeout %s: must be above 0", client.IdleTimeout)
	}
	if client.RunLimit <= 0 {
		return nil, usage("--answer-limit %s: must be above 0", client.RunLimit)
	}
	switch client.Rules = bench.Rules(c.String("rules")); client.Rules {
	case bench.Rules033, bench.Rules0141:
	default:
		return nil, usage("--rules %s: write %s or %s", client.Rules, bench.Rules033, bench.Rules0141)
	}
	if client.APIKey, err = benchKey(c.String("api-key-file")); err != nil {
		return nil, err
	}
	if client.Header, err = benchHeader(c.Generic("header").(*headerFlag).lines); err != nil {
		return nil, err
	}
	if client.TLS, err = benchTLS(c, base); err != nil {
		return nil, err
	}
	if client.Proxy, err = benchProxy(c.String("proxy")); err != nil {
		return nil, err
	}
	if client.Proxy == nil {
		noteProxy(base, stderr)
	}
	return client, nil
}

// benchURL reads the base URL. The URL may end in /v1, as OpenAI's own clients require.
func benchURL(text string) (*url.URL, error) {
	if text == "" {
		return nil, usage("bench needs --url; see `tuner bench --help`")
	}
	base, err := url.Parse(text)
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, usage("--url %s: write a scheme and a host, such as http://127.0.0.1:8000", redacted(text))
	}
	if base.User != nil {
		return nil, usage("--url %s: a user and password in a URL would be shown; use --api-key-file or --header", base.Redacted())
	}
	if base.RawQuery != "" || base.Fragment != "" {
		return nil, usage("--url %s: write it without ? and #", text)
	}
	base.Path = strings.TrimSuffix(strings.TrimRight(base.Path, "/"), "/v1")
	return base, nil
}

// redacted hides everything before the last @ of text. text is not a valid URL, but it may contain a password.
func redacted(text string) string {
	if at := strings.LastIndexByte(text, '@'); at > 0 { // a password may contain an @
		return "…" + text[at:]
	}
	return text
}

// benchKey reads the API key from the file, or from the environment if file is empty. No flag takes the key itself,
// because all users of a machine can read the flags of a process.
func benchKey(file string) (bench.Secret, error) {
	const variable = "OPENAI_API_KEY"
	if file == "" {
		return bench.Secret(os.Getenv(variable)), nil
	}
	text, err := foreign.Read(file, 1<<16)
	if err != nil {
		return "", usage("--api-key-file: %w", err)
	}
	key := strings.TrimSpace(string(text))
	if key == "" || strings.ContainsAny(key, "\r\n") {
		return "", usage("--api-key-file %s: must hold only the key, on one line", file)
	}
	return bench.Secret(key), nil
}

// benchHeader reads lines such as "Name: value". Errors do not quote values, which may be secrets.
func benchHeader(lines []string) (http.Header, error) {
	header := make(http.Header)
	for _, line := range lines {
		name, value, ok := strings.Cut(line, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		switch {
		case !ok || !httpguts.ValidHeaderFieldName(name):
			return nil, usage("--header: write 'Name: value'")
		case !httpguts.ValidHeaderFieldValue(value):
			return nil, usage("--header %s: the value has characters that no header may have", name)
		}
		header.Add(name, value)
	}
	return header, nil
}

// benchTLS returns how to check the server's certificate. A nil config means the system's certificate authorities.
func benchTLS(c *cli.Context, base *url.URL) (*tls.Config, error) {
	file, insecure := c.String("ca-file"), c.Bool("insecure")
	switch {
	case file == "" && !insecure:
		return nil, nil
	case base.Scheme != "https":
		return nil, usage("--ca-file and --insecure work with https only; --url is %s", base)
	case file == "":
		return &tls.Config{InsecureSkipVerify: true}, nil // --insecure asks for this
	case insecure:
		return nil, usage("--insecure checks no certificate, so --ca-file has no effect; leave one of them out")
	}
	text, err := foreign.Read(file, 16<<20)
	if err != nil {
		return nil, usage("--ca-file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, usage("--ca-file %s: holds no certificate in PEM form", file)
	}
	return &tls.Config{RootCAs: pool}, nil
}

// benchProxy parses the URL of an HTTP proxy. It returns nil if text is empty.
func benchProxy(text string) (*url.URL, error) {
	if text == "" {
		return nil, nil
	}
	proxy, err := url.Parse(text)
	if err != nil || proxy.Scheme != "http" || proxy.Hostname() == "" || proxy.Port() == "" {
		return nil, usage("--proxy: write http://HOST:PORT")
	}
	return proxy, nil
}

// noteProxy prints a note if the environment names a proxy for this URL. That proxy is not used, because its latency
// would be measured too.
func noteProxy(base *url.URL, stderr io.Writer) {
	proxy, err := http.ProxyFromEnvironment(&http.Request{URL: base})
	if err != nil || proxy == nil {
		return
	}
	fmt.Fprintf(stderr, "the proxy %s of the environment is not used, because its delay would be measured too; to use it anyway, give --proxy\n", proxy.Redacted())
}
