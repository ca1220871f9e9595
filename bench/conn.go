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

	"vllmtuner/render"
)

// readSize is the size of the read buffer. It holds many chunks of tokens. A chunk has about 250 bytes.
const readSize = 16 << 10

// A conn is one connection to the server. It is read until it ends, even while idle, so that the client notices at once
// when the server closes it. The pool's reactor reads plain TCP. Any other connection has its own goroutine.
type conn struct {
	pool *pool
	socket
	net     net.Conn  // nil for plain TCP
	lastUse time.Time // guarded by pool.mu
	fresh   bool      // the connection has not been used yet; guarded by pool.mu

	mu       sync.Mutex
	exchange *exchange // the current request; nil when the connection is idle
	writing  bool      // the connection is not plain TCP, and a goroutine is writing the request
	closed   error     // why the connection was closed; nil while it is open
}

// begin sends the request of an exchange. It returns false if the connection is already closed.
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

// close closes the connection for the given reason. Its reader then ends the exchange.
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
		_ = c.net.Close() // an error does not matter: the connection is not used again
	} else {
		c.socket.shut()
	}
}

// current returns the exchange that incoming bytes belong to.
func (c *conn) current() *exchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.exchange
}

// end removes the connection from the pool and ends its exchange. The reader calls it once, when the connection has ended.
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

// read reads a connection that is not plain TCP: TLS, or a network in memory.
func (c *conn) read() {
	var buffer [readSize]byte
	below, _ := c.net.(interface{ NetConn() net.Conn }) // a TLS connection; NetConn returns the TCP connection under it
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
	errUnasked    = errors.New("the server sent bytes without a request")
	errAnswerOver = errors.New("the answer ended before the HTTP response")
)

// take passes received bytes to the exchange. When the response is over, it puts the connection back into the pool.
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
		return errAnswerOver
	}
	if !c.detachExchange() {
		return errAnswerOver
	}
	c.pool.put(c)
	return nil
}

// detachExchange detaches the exchange and reports whether its request was written completely. A server may refuse a
// request before it has read all of it.
func (c *conn) detachExchange() bool {
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

var errDialLimit = fmt.Errorf("no connection within %s", render.Took(dialLimit))

type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// open opens one connection: TCP, through a tunnel if there is a proxy, and with TLS if the URL begins with https.
func (c *Client) open(ctx context.Context, dial dialFunc, host string, secure *tls.Config) (*conn, error) {
	first := host
	if c.Proxy != nil {
		first = c.Proxy.Host
	}
	raw, err := dial(ctx, "tcp", first)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) }) // this deadline in the past makes pending reads and writes fail
	defer stop()
	made := &conn{net: raw}
	if tcp, ok := raw.(*net.TCPConn); ok {
		// If the system has no time stamps, the time of the read counts as the time of arrival.
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

// tunnel asks an HTTP proxy for a tunnel to the host.
func tunnel(through net.Conn, host string, proxy *url.URL) error {
	ask := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: host}, Host: host, Header: make(http.Header)}
	if user := proxy.User; user != nil {
		password, _ := user.Password()
		basic := &http.Request{Header: make(http.Header)}
		basic.SetBasicAuth(user.Username(), password)
		ask.Header.Set("Proxy-Authorization", basic.Header.Get("Authorization"))
	}
	if err := ask.Write(through); err != nil {
		return fmt.Errorf("send CONNECT to proxy %s: %w", proxy.Host, err)
	}
	// The host sends nothing before the first request, so the reader buffers nothing after the head of the proxy's answer.
	answer, err := http.ReadResponse(bufio.NewReader(through), ask)
	if err != nil {
		return fmt.Errorf("proxy %s: %w", proxy.Host, err)
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("proxy %s answers %s", proxy.Host, answer.Status)
	}
	return nil
}

// noSockets reports whether err means that this machine has no sockets left.
func noSockets(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.EADDRNOTAVAIL)
}
