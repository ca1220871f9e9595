package vllm

import (
	"fmt"
	"math"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"vllmtuner/serverctl/sim"
)

// backlog is uvicorn's.
const backlog = 2048

// A socket is bound and does not listen yet. vLLM binds before its engine loads (create_server_socket in
// vllm/entrypoints/openai/api_server.py, 0.14.1), and uvicorn listens when all is ready: until then whoever connects is
// refused, and the kernel gives the port to nobody who asks for any.
type socket struct{ file *os.File }

// bind takes the port, or says in Python's words why it cannot.
func bind(host string, port int) (*socket, error) {
	if port < 0 || port > math.MaxUint16 {
		return nil, &sim.StartError{Text: "OverflowError: bind(): port must be 0-65535."}
	}
	address, err := net.ResolveTCPAddr("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, &sim.StartError{Text: fmt.Sprintf("socket.gaierror: [Errno -2] Name or service not known: %v", err)}
	}
	family, name := sockaddr(address)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, osError(err)
	}
	s := &socket{file: os.NewFile(uintptr(fd), "socket")}
	// vLLM sets SO_REUSEPORT as well, with which a second server of the same user shares the port silently.
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err == nil {
		err = unix.Bind(fd, name)
	}
	if err != nil {
		s.close()
		return nil, osError(err)
	}
	return s, nil
}

func sockaddr(address *net.TCPAddr) (family int, name unix.Sockaddr) {
	if v4 := address.IP.To4(); v4 != nil || address.IP == nil {
		four := &unix.SockaddrInet4{Port: address.Port}
		copy(four.Addr[:], v4)
		return unix.AF_INET, four
	}
	six := &unix.SockaddrInet6{Port: address.Port}
	copy(six.Addr[:], address.IP)
	return unix.AF_INET6, six
}

// listen lets connections in. The socket is the listener's from then on.
func (s *socket) listen() (net.Listener, error) {
	defer s.close() // the listener has a copy of its own
	if err := unix.Listen(int(s.file.Fd()), backlog); err != nil {
		return nil, osError(err) // somebody else who had bound the port too was quicker
	}
	return net.FileListener(s.file)
}

// close gives the port back unless a listener has it. Closing twice is an error that says nothing, and of a socket without a
// peer closing cannot fail.
func (s *socket) close() { _ = s.file.Close() }

// osError is an errno as Python says it: OSError: [Errno 98] Address already in use.
func osError(err error) error {
	errno, ok := err.(unix.Errno)
	if !ok {
		return err
	}
	text := errno.Error()
	return &sim.StartError{Text: fmt.Sprintf("OSError: [Errno %d] %s%s", int(errno), string(text[0]-'a'+'A'), text[1:])}
}
