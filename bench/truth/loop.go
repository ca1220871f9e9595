package truth

import (
	"cmp"
	"container/heap"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	readSize  = 64 << 10
	maxEvents = 256
	maxWait   = time.Second // longest wait for the network when no token is due
)

// A loop is the state of one Serve.
type loop struct {
	*Server
	start   time.Time
	cpu     time.Duration // CPU time of the process before the start
	conns   map[int]*conn // by file descriptor
	due     queue
	report  Report
	records []*Request // become Report.Requests; tokens are still added to them
	buffer  [readSize]byte
	control [64]byte
}

func newLoop(s *Server) *loop {
	now := time.Now()
	return &loop{
		Server: s, start: now, cpu: cpuTime(), conns: make(map[int]*conn),
		report: Report{Began: now, TTFT: s.config.TTFT, TPOT: s.config.TPOT},
	}
}

// now returns the time since the loop started.
func (l *loop) now() time.Duration { return time.Since(l.start) }

// run serves until Server.wake is written to.
func (l *loop) run() error {
	defer func() {
		for _, c := range l.conns {
			l.drop(c)
		}
	}()
	var events [maxEvents]unix.EpollEvent
	for {
		n, err := l.wait(events[:])
		if err != nil {
			return err
		}
		for _, event := range events[:n] {
			switch int(event.Fd) {
			case l.wake:
				return nil
			case l.listen:
				if err := l.accept(); err != nil {
					return err
				}
			default:
				if c := l.conns[int(event.Fd)]; c != nil {
					l.serve(c)
				}
			}
		}
		l.writeDue()
	}
}

// wait waits for the network, at most until the next token is due. It uses epoll_pwait2 (Linux 5.11), which counts in
// nanoseconds; the milliseconds of epoll_wait are too coarse.
func (l *loop) wait(events []unix.EpollEvent) (int, error) {
	limit := maxWait
	if len(l.due) > 0 {
		limit = min(max(0, l.due[0].due-l.now()), maxWait)
	}
	until := unix.NsecToTimespec(int64(limit))
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(l.poll), uintptr(unsafe.Pointer(&events[0])),
		uintptr(len(events)), uintptr(unsafe.Pointer(&until)), 0, 0)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EINTR:
		return 0, nil
	}
	return 0, fmt.Errorf("epoll_pwait2 (needs Linux 5.11): %w", errno)
}

// accept accepts all waiting connections.
func (l *loop) accept() error {
	for {
		fd, _, err := unix.Accept4(l.listen, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch err {
		case nil:
		case unix.EAGAIN:
			return nil
		case unix.EINTR, unix.ECONNABORTED:
			continue
		default:
			return fmt.Errorf("accept: %w", err)
		}
		c := &conn{fd: fd}
		l.conns[fd] = c
		for _, option := range [][2]int{{unix.IPPROTO_TCP, unix.TCP_NODELAY}, {unix.SOL_SOCKET, unix.SO_TIMESTAMPNS}} {
			if err := unix.SetsockoptInt(fd, option[0], option[1], 1); err != nil {
				return fmt.Errorf("setsockopt: %w", err)
			}
		}
		if err := l.watch(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET); err != nil {
			return err
		}
	}
}

// serve writes to and reads from a connection as far as it is ready.
func (l *loop) serve(c *conn) {
	if !l.flush(c) || !l.read(c) || !l.answer(c) {
		l.drop(c)
	}
}

// writeDue writes the tokens that are due now. Tokens that become due meanwhile wait until the next look at the network.
func (l *loop) writeDue() {
	for until := l.now(); len(l.due) > 0 && l.due[0].due <= until; {
		c := l.due[0]
		if !l.writeToken(c) {
			l.drop(c)
		}
	}
}

// drop closes a connection.
func (l *loop) drop(c *conn) {
	if c.streaming {
		heap.Remove(&l.due, c.index)
	}
	delete(l.conns, c.fd)
	_ = unix.Close(c.fd) // an error does not matter: the descriptor is closed in any case
}

// A queue is a heap of the streaming connections, ordered by the due time of the next token.
type queue []*conn

func (q queue) Len() int { return len(q) }

func (q queue) Less(i, j int) bool { return cmp.Less(q[i].due, q[j].due) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

func (q *queue) Push(c any) {
	pushed := c.(*conn)
	pushed.index = len(*q)
	*q = append(*q, pushed)
}

func (q *queue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}
