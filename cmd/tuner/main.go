// Command tuner finds the vLLM flags that let one GPU server carry the most traffic within its latency limits. It joins the
// other packages, which do not know each other.
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

// run runs the command and handles its signals. The first signal asks the subcommand to finish its current step, such as a
// probe. The second one stops it at once.
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
			fmt.Fprintln(notes, "tuner: finishing the current step; interrupt again to stop at once")
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
	printError(notes, err)
	return exitCode(err)
}

// printError prints why a command failed.
func printError(notes io.Writer, err error) {
	if err != nil && err.Error() != "" {
		render.Lines(notes, "tuner: "+render.Error(err)+remedy(err))
	}
}

// remedy says what to do about an error that a lower package reports.
func remedy(err error) string {
	if errors.Is(err, studies.ErrOwned) && !errors.Is(err, studies.ErrSilent) {
		return "\nwait until it ends, or stop it there with Ctrl-C or SIGTERM; `tuner status` shows its progress"
	}
	return ""
}

// endSignals are the signals that ask for an end. A terminal that closes sends SIGHUP. If nohup ignores SIGHUP, so must we:
// signal.Notify would undo that.
func endSignals() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// hideMemory keeps secrets, such as an API key, out of core dumps and from other processes of this user. Child programs are not
// hidden, because exec resets the flag; a limit on the core's size would be inherited. A simulated server is not hidden either:
// it has no secrets, and its parent looks for its port among its open files.
func hideMemory() {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // it cannot fail for the calling process
}
