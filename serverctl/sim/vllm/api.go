package vllm

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"vllmtuner/serverctl/sim"
)

// An api is the HTTP API of one live engine.
type api struct {
	live    *live
	log     *logger
	release *release
	keys    []string
	mux     *http.ServeMux
	lastID  atomic.Uint64       // number of the last sequence
	bodies  *semaphore.Weighted // bytes of large bodies that are being read
}

// newAPI returns the handler of all routes. The route that empties the prefix cache exists only with
// VLLM_SERVER_DEV_MODE=1, as in vLLM.
func newAPI(l *live, log *logger) *api {
	o := l.engine.Options
	a := &api{
		live: l, log: log, release: releaseOf(o), keys: o.APIKeys,
		mux: http.NewServeMux(), bodies: semaphore.NewWeighted(bodiesIn),
	}
	if key := os.Getenv("VLLM_API_KEY"); key != "" && len(a.keys) == 0 {
		a.keys = []string{key}
	}
	for pattern, serve := range map[string]http.HandlerFunc{
		"GET /load":                 load,
		"GET /version":              a.version,
		"GET /health":               ok,
		"GET /metrics":              a.metrics,
		"POST /tokenize":            a.tokenize,
		"POST /detokenize":          a.detokenize,
		"GET /v1/models":            a.models,
		"GET /ping":                 ok,
		"POST /ping":                ok,
		"POST /v1/chat/completions": a.generate,
		"POST /v1/completions":      a.generate,
	} {
		a.mux.HandleFunc(pattern, serve)
	}
	if os.Getenv("VLLM_SERVER_DEV_MODE") == "1" {
		a.mux.HandleFunc("POST /reset_prefix_cache", a.resetPrefixCache)
	}
	return a
}

// ServeHTTP checks the key and calls the route's handler.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Server", "uvicorn")
	if !a.admits(r) {
		writeJSON(w, http.StatusUnauthorized, `{"error":"Unauthorized"}`)
		return
	}
	a.mux.ServeHTTP(w, r)
}

// admits reports whether a request has a valid key. Only paths below /v1 need a key (AuthenticationMiddleware in
// vllm/entrypoints/openai/api_server.py, 0.14.1).
func (a *api) admits(r *http.Request) bool {
	if len(a.keys) == 0 || !strings.HasPrefix(r.URL.Path, "/v1") {
		return true
	}
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.EqualFold(scheme, "bearer") && slices.Contains(a.keys, key)
}

func ok(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

// load answers 0, because vLLM counts its load only with --enable-server-load-tracking, which is not simulated.
func load(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, `{"server_load":0}`)
}

func (a *api) version(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, fmt.Sprintf(`{"version":%s}`, toJSON(a.release.version)))
}

func (a *api) models(w http.ResponseWriter, _ *http.Request) {
	o, now := a.live.engine.Options, strconv.FormatInt(time.Now().Unix(), 10)
	var cards []string
	for i, name := range append([]string{o.Model}, o.Aliases...) {
		cards = append(cards, shapesOf(a.release).fill("model", fields{
			"name": toJSON(name), "created": now, "root": toJSON(o.Source()), "length": strconv.Itoa(o.MaxModelLen),
			"permission": fmt.Sprintf("%016x", i+1),
		}))
	}
	writeJSON(w, http.StatusOK, `{"object":"list","data":[`+strings.Join(cards, ",")+`]}`)
}

// tokenize counts the tokens of a prompt or a chat.
func (a *api) tokenize(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Model    string `json:"model"`
		Prompt   string `json:"prompt"`
		Messages chat   `json:"messages"`
	}
	if refusal := a.readJSON(w, r, &body, &body.Model); refusal != nil {
		refusal.write(w)
		return
	}
	tokens := sim.Tokenize(body.Prompt + string(body.Messages))
	writeJSON(w, http.StatusOK, fmt.Sprintf(`{"count":%d,"max_model_len":%d,"tokens":%s,"token_strs":null}`,
		len(tokens), a.live.engine.Options.MaxModelLen, toJSON(tokens)))
}

// detokenize writes each token as a word with the token's number. The words are not the original text, because tokenize
// keeps only hashes of that text.
func (a *api) detokenize(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Model  string  `json:"model"`
		Tokens []int32 `json:"tokens"`
	}
	if refusal := a.readJSON(w, r, &body, &body.Model); refusal != nil {
		refusal.write(w)
		return
	}
	var text strings.Builder
	for _, id := range body.Tokens {
		text.WriteString(words(int(id), 1))
	}
	writeJSON(w, http.StatusOK, fmt.Sprintf(`{"prompt":%s}`, toJSON(text.String())))
}

// resetPrefixCache empties the prefix cache. If that fails, 0.14.1 still answers 200 with an empty body, and logs the
// failure. Later versions say in the answer whether the reset succeeded.
func (a *api) resetPrefixCache(w http.ResponseWriter, _ *http.Request) {
	var done bool
	a.live.withEngine(func(e *sim.Engine) { done = e.ResetCache() })
	if done {
		a.log.engine("Successfully reset prefix cache")
	} else {
		a.log.record(engineCore, "WARNING", "Failed to reset prefix cache because some blocks are not freed yet")
	}
	if a.release.since032 {
		writeJSON(w, http.StatusOK, fmt.Sprintf(`{"success":%v}`, done))
		return
	}
	w.WriteHeader(http.StatusOK)
}
