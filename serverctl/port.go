package serverctl

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A heldPort is a port that we bind, but do not listen on, to keep it for the server. The kernel does not give a bound
// port to a process that asks for any free port. The server can bind the same port because both sockets set
// SO_REUSEADDR. vLLM does so (create_server_socket in vllm/entrypoints/openai/api_server.py, 0.14.1;
// launchers/launcher.py, 0.32), and so do uvicorn and Go. The kernel allows a listener beside a socket that does not
// listen (inet_bind_conflict in net/ipv4/inet_connection_sock.c, Linux 6).
type heldPort struct {
	port    int
	release func()
}

// holdPort holds the wanted port if it is free, and any free port otherwise. Port 0 stands for any free port.
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

// bindPort binds a port of the loopback interface. It fails with EADDRINUSE when a process listens on the port.
func bindPort(port int) (*heldPort, error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	release := sync.OnceFunc(func() { unix.Close(socket) }) // closing a socket without a peer cannot fail
	err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(socket, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}))
	}
	var name unix.Sockaddr
	if err == nil {
		name, err = unix.Getsockname(socket)
	}
	if err != nil {
		release()
		return nil, err
	}
	return &heldPort{name.(*unix.SockaddrInet4).Port, release}, nil
}
