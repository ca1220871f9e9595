package bench

import (
	"errors"
	"io"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A stamper reads a TCP socket and knows when the bytes arrived in this machine. The kernel stamps each segment
// (SO_TIMESTAMPNS, socket(7)). So a client that gets a processor late still knows when the server answered. If one read
// returns several segments, the last stamp counts.
type stamper struct {
	message unix.Msghdr
	vector  unix.Iovec
	control [64]byte
	drained time.Time // when the socket was last seen empty; bytes that are read later arrived after this time
	arrived time.Time // when the bytes of the last read arrived
	read    time.Time // when the last read returned
}

// stampArrivals asks the kernel to stamp the bytes that arrive at a socket.
func stampArrivals(fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
}

// receive reads once without waiting. It returns unix.EAGAIN if there are no bytes yet, and 0 bytes at the end of the
// stream.
func (s *stamper) receive(fd int, b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	s.vector.Base = &b[0]
	s.vector.SetLen(len(b))
	s.message.Iov, s.message.Iovlen = &s.vector, 1
	defer func() { s.vector.Base = nil }() // the buffer belongs to the caller again
	for {
		calledAt := time.Now()
		s.message.Control = &s.control[0]
		s.message.SetControllen(len(s.control))
		n, _, errno := unix.Syscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&s.message)), 0)
		switch errno {
		case 0:
			s.noteArrival(time.Now())
			if int(n) < len(b) {
				s.drained = calledAt
			}
			return int(n), nil
		case unix.EINTR:
		case unix.EAGAIN:
			s.drained = calledAt
			return 0, unix.EAGAIN
		default:
			return 0, errno
		}
	}
}

// noteArrival reads the stamp of the last message. The stamp is wall-clock time. So this method uses only the age of
// the stamp, and limits this age to the time since the socket was last seen empty. Setting the clock during a run then
// does no harm.
func (s *stamper) noteArrival(now time.Time) {
	s.arrived, s.read = now, now
	header := (*unix.Cmsghdr)(unsafe.Pointer(&s.control[0]))
	if int(s.message.Controllen) < unix.CmsgLen(int(unsafe.Sizeof(unix.Timespec{}))) ||
		header.Level != unix.SOL_SOCKET || header.Type != unix.SO_TIMESTAMPNS {
		return
	}
	at := (*unix.Timespec)(unsafe.Pointer(&s.control[unix.CmsgLen(0)]))
	age := time.Duration(now.UnixNano() - at.Nano())
	s.arrived = now.Add(-min(max(age, 0), now.Sub(s.drained)))
}

// A stamped connection is a TCP connection with a stamper, for protocols above it such as TLS.
type stamped struct {
	*net.TCPConn
	stamper
	raw syscall.RawConn
}

func newStamped(tcp *net.TCPConn) (*stamped, error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stamped{TCPConn: tcp, raw: raw}
	s.drained = time.Now()
	controlErr := raw.Control(func(fd uintptr) { err = stampArrivals(int(fd)) })
	return s, errors.Join(controlErr, err)
}

// Read reads the next bytes and waits for them if there are none.
func (s *stamped) Read(b []byte) (n int, err error) {
	waitErr := s.raw.Read(func(fd uintptr) bool {
		n, err = s.receive(int(fd), b)
		return err != unix.EAGAIN
	})
	if waitErr != nil {
		return 0, waitErr
	}
	if n == 0 && err == nil && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

// awaitStamps waits until the kernel stamps arriving bytes, and keeps it stamping until the returned function release
// is called. The kernel starts stamping some milliseconds after the first socket asks for it (net_enable_timestamp in
// net/core/dev.c). The kernel stops stamping after the last such socket is closed. On a system without stamps,
// awaitStamps gives up after 50 ms.
func awaitStamps() (release func()) {
	const maxWait, step = 50 * time.Millisecond, 2 * time.Millisecond
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return func() {} // the first connection will report what is wrong with sockets
	}
	release = func() { _ = unix.Close(fd) }
	if stampArrivals(fd) != nil || unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}) != nil {
		return release
	}
	self, err := unix.Getsockname(fd)
	if err != nil {
		return release
	}
	var s stamper
	var buffer [8]byte
	for begin := time.Now(); time.Since(begin) < maxWait; {
		s.drained = time.Now()
		if unix.Sendto(fd, buffer[:1], 0, self) != nil {
			return release
		}
		time.Sleep(step)
		if n, err := s.receive(fd, buffer[:]); err == nil && n > 0 && s.read.Sub(s.arrived) >= step/2 {
			return release
		}
	}
	return release
}
