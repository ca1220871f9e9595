package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

const (
	// staleAfter is how long a used connection may be idle. vLLM closes idle connections after 5 s
	// (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 0.14.1 and 0.33). No request should be sent on a connection that is being closed.
	staleAfter = 3 * time.Second

	// freshFor is how long a new connection may wait for its first request. nginx in front of vLLM closes such a
	// connection after 60 s.
	freshFor = 30 * time.Second

	// The pool keeps one idle connection for every eight requests in flight, within these bounds. A burst of Poisson
	// arrivals needs several connections at once.
	minIdle, maxIdle = 8, 128

	maxBackoff = 30 * time.Second
)

var (
	errPoolClosed = errors.New("the run is over")
	errStale      = errors.New("the connection was idle for too long")
)

// A pool holds the connections of one run and opens new ones before requests need them.
type pool struct {
	dial    func(ctx context.Context) (*conn, error)
	work    sync.WaitGroup // goroutines that read, write or open connections
	low     chan struct{}  // signals that too few connections are idle
	reactor *reactor       // nil until there is a plain TCP connection; guarded by mu

	mu     sync.Mutex
	all    map[*conn]struct{}
	idle   []*conn // in order of last use, the most recent one at the end
	busy   int     // requests in flight
	closed bool

	// If the server closes unused connections, the pool opens no connection in advance until notBefore.
	notBefore time.Time
	backoff   time.Duration
}

func newPool(dial func(ctx context.Context) (*conn, error)) *pool {
	return &pool{dial: dial, low: make(chan struct{}, 1), all: make(map[*conn]struct{})}
}

// react makes the reactor read a connection. The first connection starts the reactor. The caller holds p.mu.
func (p *pool) react(c *conn) error {
	if p.reactor == nil {
		r, err := newReactor(p)
		if err != nil {
			return fmt.Errorf("poll the connections of a run: %w", err)
		}
		p.reactor = r
		p.work.Go(r.run)
	}
	return p.reactor.add(c)
}

// enter adds a new connection to the pool and starts to read it.
func (p *pool) enter(c *conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		c.discard()
		return errPoolClosed
	}
	c.pool = p
	if c.net == nil {
		if err := p.react(c); err != nil {
			c.discard()
			return err
		}
	} else {
		p.work.Go(c.read)
	}
	p.all[c] = struct{}{}
	return nil
}

// discard closes a connection that has no reader.
func (c *conn) discard() {
	if c.net != nil {
		_ = c.net.Close()
	} else {
		_ = unix.Close(c.fd)
	}
}

// over reports whether the pool is closed and all connections have ended.
func (p *pool) over() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed && len(p.all) == 0
}

// inFlight returns how many requests are in flight.
func (p *pool) inFlight() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.busy
}

// open opens a connection and adds it to the pool. If asIdle is false, the caller uses the connection for its own
// request.
func (p *pool) open(ctx context.Context, asIdle bool) (*conn, error) {
	c, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	c.fresh = asIdle
	if err := p.enter(c); err != nil { // after the call of enter, other goroutines use c too
		return nil, err
	}
	if asIdle {
		p.put(c)
	}
	return c, nil
}

// take returns the most recently used idle connection, or nil if there is none.
func (p *pool) take() *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy++
	var c *conn
	if n := len(p.idle); n > 0 {
		c = p.idle[n-1]
		c.fresh = false
		p.idle = p.idle[:n-1]
	}
	if len(p.idle) < p.wanted() {
		select {
		case p.low <- struct{}{}:
		default:
		}
	}
	return c
}

// wanted returns how many connections should be idle.
func (p *pool) wanted() int { return min(max(minIdle, p.busy/8), maxIdle) }

// release records that a request has ended.
func (p *pool) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy--
}

// put gives a connection back to the pool, as an idle one.
func (p *pool) put(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ours := p.all[c]; !ours || p.closed {
		return
	}
	c.lastUse = time.Now()
	p.idle = append(p.idle, c)
}

// drop removes a connection that has ended from the pool.
func (p *pool) drop(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.fresh && !p.closed { // the server has closed a connection that was never used
		p.backoff = min(max(time.Second, 2*p.backoff), maxBackoff)
		p.notBefore = time.Now().Add(p.backoff)
	}
	delete(p.all, c)
	if at := slices.Index(p.idle, c); at >= 0 {
		p.idle = slices.Delete(p.idle, at, at+1)
	}
}

// snapshot returns all connections.
func (p *pool) snapshot() []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.all))
}

// retire closes the connections that have been idle for too long.
func (p *pool) retire() {
	p.mu.Lock()
	var old []*conn
	now := time.Now()
	p.idle = slices.DeleteFunc(p.idle, func(c *conn) bool {
		limit := staleAfter
		if c.fresh {
			limit = freshFor
		}
		if now.Sub(c.lastUse) > limit {
			c.fresh = false // so that the method drop does not take this for a close by the server
			old = append(old, c)
			return true
		}
		return false
	})
	p.mu.Unlock()
	for _, c := range old {
		c.close(errStale)
	}
}

// fill opens n idle connections. It ignores errors, because the first request meets the same error and reports it.
func (p *pool) fill(ctx context.Context, n int) {
	openers, ctx := errgroup.WithContext(ctx)
	openers.SetLimit(16)
	for range n {
		openers.Go(func() error {
			_, err := p.open(ctx, true)
			return err
		})
	}
	_ = openers.Wait()
}

// keepFilled opens connections whenever too few are idle, until ctx ends.
func (p *pool) keepFilled(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.low:
		}
		for p.short() {
			if _, err := p.open(ctx, true); err != nil {
				break // the next request meets the same error and reports it
			}
		}
	}
}

func (p *pool) short() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.closed && len(p.idle) < p.wanted() && !time.Now().Before(p.notBefore)
}

// wait waits until all goroutines of the pool have ended. The pool must be closed.
func (p *pool) wait() {
	p.work.Wait()
	if p.reactor != nil {
		p.reactor.close()
	}
}

// abort closes the pool and all its connections for the given reason.
func (p *pool) abort(why error) {
	p.mu.Lock()
	p.closed = true
	reactor := p.reactor
	p.mu.Unlock()
	for _, c := range p.snapshot() {
		c.close(why)
	}
	if reactor != nil {
		reactor.wake()
	}
}
