package bench

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"time"
)

// readSize is what is read at a time: many chunks of tokens, which have some 250 bytes each.
const readSize = 16 << 10

// A conn is one connection to the server. It is read until it ends, in an answer or not, so that a connection which the server
// closes is known at once: plain TCP by the pool's reactor, any other by a goroutine of its own.
type conn struct {
	pool *pool
	socket
	net     net.Conn  // nil for plain TCP
	lastUse time.Time // guarded by pool.mu
	fresh   bool      // idle since it was opened; guarded by pool.mu

	mu       sync.Mutex
	exchange *exchange // that the connection is busy with; nil when it is idle
	writing  bool      // a request is being written to net
	closed   error     // why no exchange can begin any more
}

// begin gives the connection an exchange and sends its request. It reports whether the connection could still be used.
func (c *conn) begin(x *exchange) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed != nil {
		return false
	}
	c.exchange = x
	if c.net == nil {
		if err := c.socket.send(x.wire); err != nil {
			c.shut(err)
		}
		return true
	}
	c.writing = true
	c.pool.work.Go(func() {
		_, err := c.net.Write(x.wire)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.writing = false; err != nil {
			c.shut(err)
		}
	})
	return true
}

// close ends the connection for the given reason; its reader does the rest.
func (c *conn) close(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut(why)
}

func (c *conn) shut(why error) {
	if c.closed != nil {
		return
	}
	c.closed = why
	if c.net != nil {
		_ = c.net.Close() // whatever comes of it, the connection is not used again
	} else {
		c.socket.shut()
	}
}

// current returns the exchange that bytes now belong to.
func (c *conn) current() *exchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exchange
}

// end settles what was in the air when the connection ended. Its reader calls it, once.
func (c *conn) end(err error) {
	c.mu.Lock()
	c.shut(err)
	why, x := c.closed, c.exchange
	c.exchange = nil
	c.mu.Unlock()
	c.pool.drop(c)
	if x != nil {
		x.broke(why)
	}
}

// read reads a connection that is not plain TCP: TLS above it, or a network in memory.
func (c *conn) read() {
	var buffer [readSize]byte
	below, _ := c.net.(interface{ NetConn() net.Conn }) // TLS
	for {
		n, err := c.net.Read(buffer[:])
		if n > 0 {
			now := time.Now()
			at := now
			if below != nil {
				if tcp, ok := below.NetConn().(*stamped); ok {
					at = tcp.arrived
				}
			}
			if err := c.take(buffer[:n], at, now); err != nil {
				c.end(err)
				return
			}
		}
		if err != nil {
			c.end(err)
			return
		}
	}
}

var (
	errUnasked = errors.New("the server sent what it was not asked for")
	errSettled = errors.New("the answer was over before its connection")
)

// take gives what was read to the exchange, and the connection back to the pool when that is over.
func (c *conn) take(b []byte, arrived, now time.Time) error {
	x := c.current()
	if x == nil {
		return errUnasked
	}
	left, err := x.feed(b, arrived, now)
	switch {
	case err != nil:
		return err
	case !x.reply.over:
		return nil
	case !x.reply.keep || left > 0:
		return errSettled
	}
	if !c.rest() {
		return errSettled
	}
	c.pool.put(c)
	return nil
}

// rest ends the exchange, and reports whether its request was wholly written: a server may refuse one before it has read it.
func (c *conn) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exchange = nil
	return !c.writing && len(c.unsent) == 0
}

// dialer returns the function that opens connections to the server.
func (c *Client) dialer(base *url.URL) func(ctx context.Context) (*conn, error) {
	host := base.Host
	if base.Port() == "" {
		host = net.JoinHostPort(base.Hostname(), map[string]string{"http": "80", "https": "443"}[base.Scheme])
	}
	var secure *tls.Config
	if base.Scheme == "https" {
		secure = c.TLS.Clone()
		if secure == nil {
			secure = new(tls.Config)
		}
		if secure.ServerName == "" {
			secure.ServerName = base.Hostname()
		}
	}
	dial := c.dial
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	return func(ctx context.Context) (*conn, error) {
		ctx, cancel := context.WithTimeoutCause(ctx, dialLimit, errDialLimit)
		defer cancel()
		opened, err := c.open(ctx, dial, host, secure)
		if err != nil && context.Cause(ctx) == errDialLimit {
			err = &net.OpError{Op: "dial", Net: "tcp", Err: errDialLimit}
		}
		return opened, err
	}
}

const dialLimit = 10 * time.Second

var errDialLimit = fmt.Errorf("no connection within %s", dialLimit)

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// open opens one connection: TCP, a tunnel if there is a proxy, TLS if the URL says so.
func (c *Client) open(ctx context.Context, dial dialFunc, host string, secure *tls.Config) (*conn, error) {
	first := host
	if c.Proxy != nil {
		first = c.Proxy.Host
	}
	raw, err := dial(ctx, "tcp", first)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) }) // what waits on it fails then
	defer stop()
	made := &conn{net: raw}
	if tcp, ok := raw.(*net.TCPConn); ok {
		// Where the system stamps nothing, arrival is the time of reading.
		if with, err := newStamped(tcp); err == nil {
			made.net = with
		}
	}
	if c.Proxy != nil {
		if err := tunnel(made.net, host, c.Proxy); err != nil {
			return nil, errors.Join(&net.OpError{Op: "dial", Net: "tcp", Err: err}, raw.Close())
		}
	}
	if secure != nil {
		over := tls.Client(made.net, secure)
		if err := over.HandshakeContext(ctx); err != nil {
			return nil, errors.Join(&net.OpError{Op: "dial", Net: "tcp", Err: err}, raw.Close())
		}
		made.net = over
	}
	if tcp, ok := made.net.(*stamped); ok {
		made.socket, err = detach(tcp)
		made.net = nil
	}
	return made, err
}

// tunnel asks an HTTP proxy for a way to the host.
func tunnel(through net.Conn, host string, proxy *url.URL) error {
	ask := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: host}, Host: host, Header: make(http.Header)}
	if user := proxy.User; user != nil {
		password, _ := user.Password()
		basic := &http.Request{Header: make(http.Header)}
		basic.SetBasicAuth(user.Username(), password)
		ask.Header.Set("Proxy-Authorization", basic.Header.Get("Authorization"))
	}
	if err := ask.Write(through); err != nil {
		return fmt.Errorf("ask proxy %s: %w", proxy.Host, err)
	}
	// The other side says nothing after the head before it is spoken to, so nothing is lost in this reader.
	answer, err := http.ReadResponse(bufio.NewReader(through), ask)
	if err != nil {
		return fmt.Errorf("proxy %s: %w", proxy.Host, err)
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("proxy %s answers %s", proxy.Host, answer.Status)
	}
	return nil
}

// noSockets reports whether an error says that this machine has no sockets left.
func noSockets(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.EADDRNOTAVAIL)
}
