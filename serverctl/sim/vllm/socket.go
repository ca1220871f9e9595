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

// backlog is the number of connections that may wait to be accepted, as in uvicorn.
const backlog = 2048

// A socket is bound to its port but does not listen yet. vLLM binds the port before its engine loads
// (create_server_socket in vllm/entrypoints/openai/api_server.py, 0.14.1). uvicorn listens only when the server is
// ready. Until then the kernel refuses connections, and gives the port to no other process.
type socket struct{ file *os.File }

// bind binds the port. An error has the text of Python's exception.
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
	// vLLM also sets SO_REUSEPORT, and the simulator does not. With SO_REUSEPORT, a second server of the same user
	// would silently share the port.
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
	defer s.close() // the listener has its own copy of the socket
	if err := unix.Listen(int(s.file.Fd()), backlog); err != nil {
		return nil, osError(err) // for example, another process that shares the port already listens
	}
	return net.FileListener(s.file)
}

// close releases the port, unless a listener has it. The only possible error is that the file is closed already; close
// ignores it.
func (s *socket) close() { _ = s.file.Close() }

// osError turns an errno into Python's exception, such as OSError: [Errno 98] Address already in use.
func osError(err error) error {
	errno, ok := err.(unix.Errno)
	if !ok {
		return err
	}
	text := errno.Error()
	return &sim.StartError{Text: fmt.Sprintf("OSError: [Errno %d] %s%s", int(errno), string(text[0]-'a'+'A'), text[1:])}
}
