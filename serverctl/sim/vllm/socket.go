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

// backlog is uvicorn's value.
const backlog = 2048

// A socket is bound and does not listen yet. vLLM binds before its engine loads (create_server_socket in
// vllm/entrypoints/openai/api_server.py, 0.14.1), and uvicorn listens when the server is ready. Until then the kernel
// refuses connections, and gives the port to no other process.
type socket struct{ file *os.File }

// bind binds the port. Its error is Python's exception.
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
	// vLLM sets SO_REUSEPORT too. With that, a second server of the same user would silently share the port.
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

// listen accepts connections. From then on the socket belongs to the listener.
func (s *socket) listen() (net.Listener, error) {
	defer s.close() // the listener has its own copy
	if err := unix.Listen(int(s.file.Fd()), backlog); err != nil {
		return nil, osError(err) // another process, which shares the port, was quicker
	}
	return net.FileListener(s.file)
}

// close releases the port unless a listener has it. It ignores its only error, that the file is closed already.
func (s *socket) close() { _ = s.file.Close() }

// osError writes an errno as Python's exception: OSError: [Errno 98] Address already in use.
func osError(err error) error {
	errno, ok := err.(unix.Errno)
	if !ok {
		return err
	}
	text := errno.Error()
	return &sim.StartError{Text: fmt.Sprintf("OSError: [Errno %d] %s%s", int(errno), string(text[0]-'a'+'A'), text[1:])}
}
