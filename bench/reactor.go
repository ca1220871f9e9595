package bench

import (
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A reactor reads all plain TCP connections of a run, in one goroutine with its own epoll. The kernel stamps bytes when
// they arrive, so measured times stay right even if the reactor reads the bytes later. Under load the reactor waits a
// moment between polls and then reads all that has arrived. A token then costs one system call and no wake-up. At 1,024
// streams of 50 tokens per second the reactor took 5 µs of CPU per token. A goroutine for each connection took 10 µs.
type reactor struct {
	pool  *pool
	epoll int
	alarm int // eventfd that wakes the reactor from its wait for events

	mu    sync.Mutex
	conns map[int32]*conn // by descriptor
}

const (
	// gatherTime is the pause between polls under load. On an idle machine the pause lasts 1 ms, because of Go's timers.
	// Tokens of one stream that arrive within one pause share a time stamp.
	gatherTime = 500 * time.Microsecond
	// The reactor pauses only if more than loadedRequests requests are in flight, and at least loadedEvents events came in
	// the last loadPeriod. With so many requests, two tokens of one stream rarely arrive within one pause. With fewer
	// events, a pause saves nothing. One wake-up took 15 µs on a virtual machine.
	loadedRequests = 16
	loadedEvents   = 10
	loadPeriod     = 10 * time.Millisecond
	// maxReads is how many reads one connection gets before the other connections have their turn.
	maxReads = 8
	// maxWait is the longest wait for the next event, in milliseconds.
	maxWait = 1000
)

func newReactor(p *pool) (*reactor, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	alarm, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(alarm)}
		err = unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, alarm, &event)
	}
	if err != nil {
		if alarm >= 0 {
			_ = unix.Close(alarm)
		}
		return nil, errors.Join(err, unix.Close(epoll))
	}
	return &reactor{pool: p, epoll: epoll, alarm: alarm, conns: make(map[int32]*conn)}, nil
}

// wake wakes the reactor from its wait for events.
func (r *reactor) wake() {
	_, _ = unix.Write(r.alarm, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // the write fails only if the eventfd is full, and then the wait ends anyway
}

// close closes the descriptors. The caller makes sure that run has returned and that nobody calls wake any more.
func (r *reactor) close() {
	_ = unix.Close(r.alarm)
	_ = unix.Close(r.epoll)
}

// add starts to read a connection.
func (r *reactor) add(c *conn) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns[int32(c.fd)] = c
	// The epoll is edge-triggered: it reports only changes, so the registration never has to change.
	event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET, Fd: int32(c.fd)}
	if err := unix.EpollCtl(r.epoll, unix.EPOLL_CTL_ADD, c.fd, &event); err != nil {
		delete(r.conns, int32(c.fd))
		return err
	}
	return nil
}

func (r *reactor) find(fd int32) *conn {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.conns[fd]
}

// remove stops reading a connection and closes it. Only remove closes the descriptor of a connection in r.conns. So the
// kernel cannot reuse a descriptor that is still in r.conns.
func (r *reactor) remove(c *conn, why error) {
	r.mu.Lock()
	delete(r.conns, int32(c.fd))
	r.mu.Unlock()
	c.end(why)
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = unix.Close(c.fd) // closing also removes the descriptor from the epoll
	c.fd = -1
}

// run reads until the pool is closed and all connections have ended.
func (r *reactor) run() {
	var events [256]unix.EpollEvent
	var buffer [readSize]byte
	var more []*conn // connections that may have more bytes
	recent, since, loaded := 0, time.Now(), false
	for !r.pool.over() {
		wait := maxWait
		if loaded || len(more) > 0 {
			wait = 0
		}
		n, err := unix.EpollWait(r.epoll, events[:], wait)
		if err != nil {
			n = 0 // a signal interrupted the wait
		}
		again := more
		more = nil
		for _, event := range events[:n] {
			if c := r.find(event.Fd); c != nil && r.serve(c, event.Events, buffer[:]) {
				more = append(more, c)
			}
		}
		for _, c := range again {
			if r.find(int32(c.fd)) == c && !slices.Contains(more, c) && r.serve(c, unix.EPOLLIN|unix.EPOLLRDHUP, buffer[:]) {
				more = append(more, c)
			}
		}
		recent += n
		if now := time.Now(); now.Sub(since) >= loadPeriod {
			loaded = recent >= loadedEvents && r.pool.inFlight() > loadedRequests
			recent, since = 0, now
		}
		if loaded && n < len(events) && len(more) == 0 {
			time.Sleep(gatherTime)
		}
	}
}

// serve handles the events of a connection and reports whether there may be more to read.
func (r *reactor) serve(c *conn, events uint32, buffer []byte) (more bool) {
	if events&unix.EPOLLOUT != 0 {
		c.flush()
	}
	const ended = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	if events&(unix.EPOLLIN|ended) == 0 {
		return false
	}
	for range maxReads {
		n, err := c.receive(c.fd, buffer)
		switch {
		case err == unix.EAGAIN:
			return false
		case err != nil:
			r.remove(c, err)
			return false
		case n == 0:
			r.remove(c, io.EOF)
			return false
		}
		if err := c.take(buffer[:n], c.arrived, c.stamper.read); err != nil {
			r.remove(c, err)
			return false
		}
		if n < len(buffer) && events&ended == 0 {
			return false // the socket is empty now; new bytes cause a new event
		}
	}
	return true
}

// A socket is a plain TCP connection that Go's own poller does not watch.
type socket struct {
	stamper
	fd     int
	unsent []byte // bytes that the kernel has not accepted yet; guarded by conn.mu
}

// detach takes a connection away from the net package and its poller.
func detach(tcp *stamped) (s socket, err error) {
	controlErr := tcp.raw.Control(func(fd uintptr) {
		s.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	})
	s.drained = time.Now()
	return s, errors.Join(controlErr, err, tcp.Close())
}

// send writes as much as the kernel accepts. The method flush writes the rest later.
func (s *socket) send(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(s.fd, b)
		switch err {
		case nil:
			b = b[n:]
		case unix.EINTR:
		case unix.EAGAIN:
			s.unsent = b
			return nil
		default:
			return err
		}
	}
	s.unsent = nil
	return nil
}

// shut ends both directions, so that the reactor sees the end.
func (s *socket) shut() {
	if s.fd >= 0 {
		_ = unix.Shutdown(s.fd, unix.SHUT_RDWR) // an error only means that the connection has already ended
	}
}

// flush writes the rest of a request that send could not write at once.
func (c *conn) flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.unsent) == 0 || c.closed != nil {
		return
	}
	if err := c.socket.send(c.unsent); err != nil {
		c.shut(err)
	}
}
