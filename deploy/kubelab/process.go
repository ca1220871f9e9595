package kubelab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// A process is a program of the control plane. It ends with this process, even if this process is killed.
type process struct {
	name   string
	log    string
	cmd    *exec.Cmd
	exited chan struct{}
	err    error // how it ended, once exited is closed
}

// startProcess starts a program of the multi-call binary.
func startProcess(binary, name, log string, args []string) (_ *process, err error) {
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	p := &process{name: name, log: log, cmd: exec.Command(binary, append([]string{name}, args...)...), exited: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = file, file
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() { // stop waits for it
		p.err = p.cmd.Wait()
		close(p.exited)
	}()
	return p, nil
}

// stop ends the process and returns when it is gone. Nothing that it has stored is of use to anybody, so it need not end
// gracefully.
func (p *process) stop() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.exited
}

// ended returns an error if the process has ended.
func (p *process) ended() error {
	select {
	case <-p.exited:
		text, _ := os.ReadFile(p.log) // without its log, the error still says what happened
		return fmt.Errorf("%s has ended (%w):\n%s", p.name, p.err, lastLines(text, 10))
	default:
		return nil
	}
}

// reservePorts returns free ports of loopback. No other program gets them until release is called, except one that shares
// ports as the programs of the control plane do.
func reservePorts(count int) (ports []int, release func(), err error) {
	var sockets []int
	release = func() {
		for _, s := range sockets {
			_ = unix.Close(s) // the socket never had a connection
		}
	}
	for range count {
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			release()
			return nil, nil, err
		}
		sockets = append(sockets, s)
		port, err := reserve(s)
		if err != nil {
			release()
			return nil, nil, fmt.Errorf("reserve a port: %w", err)
		}
		ports = append(ports, port)
	}
	return ports, release, nil
}

// reserve binds a socket to a free port. It does not listen, so connections go to the program that shares the port.
func reserve(socket int) (int, error) {
	if err := unix.SetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return 0, err
	}
	if err := unix.Bind(socket, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	address, err := unix.Getsockname(socket)
	if err != nil {
		return 0, err
	}
	return address.(*unix.SockaddrInet4).Port, nil
}
