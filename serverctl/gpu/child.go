package gpu

import (
	"bytes"
	"errors"
	"io"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

const (
	// maxOutput is how many bytes of an answer are read. Sixteen GPUs take 4 KiB.
	maxOutput = 1 << 20
	// pipeGrace is how long to wait for the output of a dead nvidia-smi. The wait must end, because a process that
	// nvidia-smi left behind may hold the pipe open.
	pipeGrace = 500 * time.Millisecond
	// killGrace is how long a killed nvidia-smi may take to disappear. A process that waits inside a hanging driver
	// never disappears.
	killGrace = 2 * time.Second
)

// A child is one run of nvidia-smi, in its own process group. The kernel kills the child when this process dies;
// otherwise nvidia-smi -lms would run for ever.
type child struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when the child was reaped and its output is complete
	err    error         // result of Wait; read it only after exited is closed
}

// start starts a child. Its one goroutine ends with the child.
func start(path string, args []string, stdout, stderr io.Writer) (*child, error) {
	c := &child{cmd: exec.Command(path, args...), exited: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr = stdout, stderr
	c.cmd.WaitDelay = pipeGrace
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The kernel sends the parent-death signal when the thread that forked the child ends. Go may end idle threads
		// at any time.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err == nil {
			c.err = c.cmd.Wait()
			close(c.exited)
		}
	}()
	return c, <-started
}

// end kills the child and its process group, and waits until the child is gone. It returns false if the child still
// exists after killGrace. The goroutine then keeps waiting, and nobody else may use the writers of the child's output.
func (c *child) end(kill func(pid int) error) bool {
	select {
	case <-c.exited:
		return true // the child has ended, so its PID may already be reused
	default:
	}
	_ = kill(-c.cmd.Process.Pid) // kill fails only if the child has just ended
	select {
	case <-c.exited:
		return true
	case <-time.After(killGrace):
		return false
	}
}

// sigkill is the kill function outside tests.
func sigkill(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) }

// A boundedBuffer keeps the first maxOutput bytes that are written to it.
type boundedBuffer struct {
	buf  bytes.Buffer
	full bool // more than maxOutput bytes were written
}

// Write fails when the buffer is full. That closes the pipe of the child, which then dies of SIGPIPE.
func (b *boundedBuffer) Write(p []byte) (int, error) {
	n, _ := b.buf.Write(p[:min(len(p), maxOutput-b.buf.Len())]) // this Write never fails
	if n < len(p) {
		b.full = true
		return n, errors.New("the buffer is full")
	}
	return n, nil
}
