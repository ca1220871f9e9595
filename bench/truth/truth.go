// Package truth is a server for checking the measurements of a client. It streams answers as vLLM does, on a fixed
// schedule, and records when each request arrived and when it wrote each token. It also records how late it was itself. It
// never generates anything, and only tests start it.
package truth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Config says how a Server answers.
type Config struct {
	Model  string        // name of the model; "" means tiny
	TTFT   time.Duration // from the last byte of a request to its first token
	TPOT   time.Duration // from one token to the next
	Step   bool          // write the tokens of all streams together in steps of TPOT, as an engine does
	Forget bool          // record no requests, for runs of millions
}

// A Server answers on one address. It is one loop in one goroutine, to leave the machine's CPU to the client: a token costs
// little more than the call that writes it.
type Server struct {
	config Config
	url    string
	listen int // file descriptor, as are poll and wake
	poll   int
	wake   int
}

// Listen opens an address, such as 127.0.0.1:0. The caller must call Serve, which closes it.
func Listen(address string, config Config) (*Server, error) {
	if config.Model == "" {
		config.Model = "tiny"
	}
	if config.TPOT <= 0 {
		return nil, fmt.Errorf("time per output token %s must be positive", config.TPOT)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	defer listener.Close() // the loop has its own descriptor
	s := &Server{config: config, url: "http://" + listener.Addr().String(), listen: -1, poll: -1, wake: -1}
	if err := s.open(listener.(*net.TCPListener)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", address, err), s.close())
	}
	return s, nil
}

// URL returns the server's base URL.
func (s *Server) URL() string { return s.url }

// open opens the loop's descriptors.
func (s *Server) open(listener *net.TCPListener) error {
	raw, err := listener.SyscallConn()
	if err != nil {
		return err
	}
	var dupErr error
	err = raw.Control(func(fd uintptr) { s.listen, dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, dupErr); err != nil {
		return err
	}
	if s.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	if s.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	return errors.Join(s.watch(s.listen, unix.EPOLLIN), s.watch(s.wake, unix.EPOLLIN))
}

func (s *Server) watch(fd int, events uint32) error {
	if err := unix.EpollCtl(s.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

func (s *Server) close() error {
	var all error
	for _, fd := range []int{s.listen, s.poll, s.wake} {
		if fd >= 0 {
			all = errors.Join(all, unix.Close(fd))
		}
	}
	return all
}

// Serve answers requests until ctx ends, and then closes everything. It returns an error only if a system call fails.
func (s *Server) Serve(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, s.close()) }()
	woken := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		_, err := unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		woken <- err
	})
	err = newLoop(s).run()
	if !stop() {
		err = errors.Join(err, <-woken) // the write must end before close closes its descriptor
	}
	return err
}

// A Report is the server's record of a run.
type Report struct {
	Began    time.Time     `json:"began"` // when Serve started
	TTFT     time.Duration `json:"ttft_ns"`
	TPOT     time.Duration `json:"tpot_ns"`
	CPU      time.Duration `json:"cpu_ns"`   // CPU time of the process since Began
	Answered int           `json:"answered"` // complete answers
	Tokens   int           `json:"tokens"`
	Blocked  int           `json:"blocked"`  // writes that the kernel did not take at once, because the client read too slowly
	Requests []Request     `json:"requests"` // in the order of arrival; none with Config.Forget
}

// A Request is the server's record of one request. Times are microseconds since Report.Began.
type Request struct {
	ID       string  `json:"id"`       // its X-Request-Id
	Received int64   `json:"received"` // when its last byte reached this machine's kernel (SO_TIMESTAMPNS)
	Seen     int64   `json:"seen"`     // when the server read it
	Due      []int64 `json:"due"`      // due time of each token
	Writes   []int64 `json:"writes"`   // time just before the call that wrote each token
}

// TTFT returns the true time to first token, or 0 without tokens.
func (r Request) TTFT() time.Duration {
	if len(r.Writes) == 0 {
		return 0
	}
	return time.Duration(r.Writes[0]-r.Received) * time.Microsecond
}

// TPOT returns the true mean time per token after the first, or 0 with fewer than two tokens.
func (r Request) TPOT() time.Duration {
	n := len(r.Writes)
	if n < 2 {
		return 0
	}
	return time.Duration(r.Writes[n-1]-r.Writes[0]) * time.Microsecond / time.Duration(n-1)
}

// Gaps returns the true times between tokens.
func (r Request) Gaps() []time.Duration {
	var gaps []time.Duration
	for i := 1; i < len(r.Writes); i++ {
		gaps = append(gaps, time.Duration(r.Writes[i]-r.Writes[i-1])*time.Microsecond)
	}
	return gaps
}

// Lateness returns how late the server wrote each token. A large value means that the machine was too slow for the server.
func (r Request) Lateness() []time.Duration {
	late := make([]time.Duration, len(r.Writes))
	for i, at := range r.Writes {
		late[i] = time.Duration(at-r.Due[i]) * time.Microsecond
	}
	return late
}

// Fetch gets the report of a server in another process.
func Fetch(ctx context.Context, url string) (*Report, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+reportPath, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask the truth server: %w", err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask the truth server: %s", response.Status)
	}
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("read the report of the truth server: %w", err)
	}
	report := new(Report)
	if err := json.Unmarshal(text, report); err != nil {
		return nil, fmt.Errorf("read the report of the truth server: %w", err)
	}
	return report, nil
}

// cpuTime returns the CPU time of this process, user and system.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
