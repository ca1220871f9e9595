package bench

import (
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A reactor reads all plain TCP connections of a run, in one goroutine and with a socket poll of its own. Since the kernel
// notes when bytes arrive, they need not be read at that moment: when much comes, the reactor looks once in a while and takes
// all that is there. A token then costs one system call and no wake-up. Against a goroutine for each connection that took the
// CPU time per token from 10 to 5 µs at 1,024 streams of 50 tokens per second.
type reactor struct {
	pool  *pool
	epoll int
	alarm int // eventfd that ends a wait

	mu    sync.Mutex
	conns map[int32]*conn // by descriptor
}

const (
	// nap is how long bytes gather; on an idle machine Go's timers make a millisecond of it. Tokens of one stream that come
	// closer together share a time stamp.
	nap = 500 * time.Microsecond
	// Bytes gather when many requests are in flight, so that tokens of one stream hardly ever come within a nap, and when there
	// are more events than naps: waking up for each took 15 µs on a virtual machine.
	crowd = 16
	slice = 10 * time.Millisecond
	many  = 10 // events in a slice
	// readsInARow is how much of one connection is read before the others have their turn.
	readsInARow = 8
	// longestWait bounds a wait for the next event, in milliseconds.
	longestWait = 1000
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

// ring ends a wait for events.
func (r *reactor) ring() {
	_, _ = unix.Write(r.alarm, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // it can only be full, and has rung then
}

// close gives the descriptors back. Nobody may ring any more, and run has returned.
func (r *reactor) close() {
	_ = unix.Close(r.alarm)
	_ = unix.Close(r.epoll)
}

// add begins to read a connection.
func (r *reactor) add(c *conn) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns[int32(c.fd)] = c
	// Edge-triggered: an event for what is new, so that nothing needs to be asked twice.
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

// remove ends the reading of a connection and closes it. Nobody else closes a descriptor, so that none is used again while
// it is still known here.
func (r *reactor) remove(c *conn, why error) {
	r.mu.Lock()
	delete(r.conns, int32(c.fd))
	r.mu.Unlock()
	c.end(why)
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = unix.Close(c.fd) // which also ends its polling
	c.fd = -1
}

// run reads until the pool is closed and all connections have ended.
func (r *reactor) run() {
	var events [256]unix.EpollEvent
	var buffer [readSize]byte
	var more []*conn // with bytes that were left for the others' sake
	recent, since, crowded := 0, time.Now(), false
	for !r.pool.over() {
		wait := longestWait
		if crowded || len(more) > 0 {
			wait = 0
		}
		n, err := unix.EpollWait(r.epoll, events[:], wait)
		if err != nil {
			n = 0 // interrupted
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
		if now := time.Now(); now.Sub(since) >= slice {
			crowded = recent >= many && r.pool.inFlight() > crowd
			recent, since = 0, now
		}
		if crowded && n < len(events) && len(more) == 0 {
			time.Sleep(nap)
		}
	}
}

// serve handles what has happened to a connection, and reports whether there may be more to read.
func (r *reactor) serve(c *conn, events uint32, buffer []byte) (more bool) {
	if events&unix.EPOLLOUT != 0 {
		c.flush()
	}
	const ended = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	if events&(unix.EPOLLIN|ended) == 0 {
		return false
	}
	for range readsInARow {
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
			return false // what comes now makes an event of its own
		}
	}
	return true
}

// A socket is a plain TCP connection that Go's own poller does not know.
type socket struct {
	stamper
	fd     int
	unsent []byte // what the kernel has not taken yet; guarded by conn.mu
}

// detach takes a connection out of the hands of the net package.
func detach(tcp *stamped) (s socket, err error) {
	controlErr := tcp.raw.Control(func(fd uintptr) {
		s.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0)
	})
	s.drained = time.Now()
	return s, errors.Join(controlErr, err, tcp.Close())
}

// send writes as much as the kernel takes; the rest is written when it takes more.
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
		_ = unix.Shutdown(s.fd, unix.SHUT_RDWR) // one that has ended already needs none
	}
}

// flush goes on with a request that did not fit.
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
