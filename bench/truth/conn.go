package truth

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A listener accepts connections of type conn, which know when their bytes arrived.
type listener struct{ *net.TCPListener }

func (l listener) Accept() (net.Conn, error) {
	tcp, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	c := &conn{TCPConn: tcp}
	if c.raw, err = tcp.SyscallConn(); err != nil {
		return nil, err
	}
	var stampErr error
	err = c.raw.Control(func(fd uintptr) {
		stampErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1)
	})
	if err != nil {
		return nil, err
	}
	return c, stampErr
}

// A conn is a connection that remembers when the kernel received the bytes of the last read.
type conn struct {
	*net.TCPConn
	raw     syscall.RawConn
	arrived atomic.Pointer[time.Time]
}

// Read reads the next bytes and waits for them if there are none.
func (c *conn) Read(b []byte) (n int, err error) {
	var control [64]byte
	waitErr := c.raw.Read(func(fd uintptr) bool {
		var controls int
		for err = unix.EINTR; err == unix.EINTR; {
			n, controls, _, _, err = unix.Recvmsg(int(fd), b, control[:], 0)
		}
		if err == nil {
			now := time.Now()
			now = now.Add(-age(control[:controls], now))
			c.arrived.Store(&now)
		}
		return err != unix.EAGAIN
	})
	switch {
	case waitErr != nil:
		return 0, waitErr
	case err != nil:
		return 0, err
	case n == 0 && len(b) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// age returns how long the bytes were in the kernel before they were read, according to their time stamp. It returns 0
// if there is no stamp.
func age(control []byte, now time.Time) time.Duration {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0
	}
	for _, m := range messages {
		if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SO_TIMESTAMPNS && len(m.Data) >= 16 {
			seconds, nanos := binary.NativeEndian.Uint64(m.Data), binary.NativeEndian.Uint64(m.Data[8:])
			return max(0, now.Sub(time.Unix(int64(seconds), int64(nanos))))
		}
	}
	return 0
}

type connKey struct{}

// keepConn makes the connection of a request available to its handler.
func keepConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c.(*conn))
}
