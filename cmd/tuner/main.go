// Command tuner finds the vLLM flags with which one GPU server carries the most traffic inside its latency promises.
// It wires the rooms together; no other package does.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
)

func main() {
	proc.Main() // this program is also the watchdog of the servers that it starts
	os.Exit(run())
}

// run is the command with its signals: the first one that asks for an end asks the study to finish its probe, which is up to
// the subcommand; the second ends it at once.
func run() int {
	notes := foreign.NewWriter(os.Stderr)
	if len(os.Args) < 2 || os.Args[1] != "sim" {
		hideMemory()
	}
	finish, stop := signal.NotifyContext(context.Background(), endSignals()...)
	defer stop()
	now, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	unwatch := context.AfterFunc(finish, func() {
		if !viewing.Load() {
			render.EraseLine(os.Stderr)
			fmt.Fprintln(notes, "tuner: finishing what is at hand; once more stops at once")
		}
		second := make(chan os.Signal, 1)
		signal.Notify(second, endSignals()...)
		go func() { // ends with the process, or with the second signal
			<-second
			cancel(errStoppedNow)
		}()
		stop()
	})
	defer unwatch() // before stop, which ends finish too
	err := app(os.Stdout, os.Stderr, finish.Done()).RunContext(now, flagsFirst(os.Args))
	sayError(notes, err)
	return exitCode(err)
}

// sayError is the last word of a command.
func sayError(notes io.Writer, err error) {
	if err != nil && err.Error() != "" {
		render.Lines(notes, "tuner: "+render.Error(err)+remedy(err))
	}
}

// remedy is what to do about an error whose words come from far below.
func remedy(err error) string {
	if errors.Is(err, studies.ErrOwned) && !errors.Is(err, studies.ErrSilent) {
		return "\nwait until that one ends, or end it there (Ctrl-C, or SIGTERM); `tuner status` shows how far it is"
	}
	return ""
}

// endSignals are those that ask for an end. A terminal that is closed sends SIGHUP, unless nohup has it ignored: to ask for
// one that is ignored would be to heed it.
func endSignals() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// hideMemory keeps secrets, such as an API key, out of core dumps, and from other processes of this user. The programs that
// are started are not hidden: the kernel takes it back at exec, where a limit of the core's size would be inherited. Nor is a
// simulated server, which has none: who started it looks for its port among its open files.
func hideMemory() {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // it fails for no process of its own
}
