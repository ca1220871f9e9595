package serverctl

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A heldPort is a port that is bound, and not listened on, until the server has it. Whoever asks the kernel for any free
// port is not given a bound one; the server itself shares the address by SO_REUSEADDR, which vLLM sets (create_server_socket
// in vllm/entrypoints/openai/api_server.py, 0.14.1; launchers/launcher.py, 0.32), as do uvicorn and Go. The kernel lets a
// listener bind beside a socket that does not listen (inet_bind_conflict in net/ipv4/inet_connection_sock.c, Linux 6).
type heldPort struct {
	port    int
	socket  int
	release func()
}

// holdPort holds the wanted port when nobody has it, else one that is free. 0 wants any.
func holdPort(wanted int) (*heldPort, error) {
	held, err := bindPort(wanted)
	if errors.Is(err, unix.EADDRINUSE) && wanted != 0 {
		held, err = bindPort(0)
	}
	if err != nil {
		return nil, fmt.Errorf("find a free port: %w", err)
	}
	return held, nil
}

// bindPort binds a port of the loopback interface, or fails with EADDRINUSE when somebody listens on it.
func bindPort(port int) (*heldPort, error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	h := &heldPort{socket: socket}
	h.release = sync.OnceFunc(func() { unix.Close(socket) }) // of a socket without a peer, closing cannot fail
	if err := h.bind(port); err != nil {
		h.release()
		return nil, err
	}
	return h, nil
}

func (h *heldPort) bind(port int) error {
	if err := unix.SetsockoptInt(h.socket, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	if err := unix.Bind(h.socket, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	name, err := unix.Getsockname(h.socket)
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	h.port = name.(*unix.SockaddrInet4).Port
	return nil
}
