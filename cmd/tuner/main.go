// Command tuner finds the vLLM flags with which one GPU server carries the most traffic within its latency limits. It
// puts the other packages together.
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
	proc.Main() // does not return if a tuner started this process as its watchdog
	os.Exit(run())
}

// run runs the command and handles its signals. The first signal asks the subcommand to finish its current step, such
// as a probe. The second signal stops the subcommand at once.
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
		go func() { // this goroutine ends after the second signal, or with the process
			<-second
			cancel(errStoppedNow)
		}()
		stop()
	})
	defer unwatch() // must run before the deferred stop: stop ends finish, and AfterFunc would then call the function above
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

// remedy returns a hint to add to an error of a lower package, or an empty text.
func remedy(err error) string {
	const wait = "\nwait until it ends, or stop it there with Ctrl-C or SIGTERM"
	switch {
	case errors.Is(err, studies.ErrOwned) && !errors.Is(err, studies.ErrSilent):
		return wait + "; `tuner status` shows its progress"
	case errors.Is(err, studies.ErrLocked): // a sweep has no status
		return wait
	}
	return ""
}

// endSignals returns the signals that ask for an end. A terminal that closes sends SIGHUP. Under nohup the process
// ignores SIGHUP, and endSignals leaves it out: signal.Notify would make the process receive it again.
func endSignals() []os.Signal {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// hideMemory keeps secrets, such as an API key, out of core dumps and from other processes of this user. A core size
// limit would also affect child programs, but exec resets the flag that hideMemory sets. run does not call hideMemory
// for a simulated server, which has no secrets. The parent of such a server must read the server's open files to find
// its port.
func hideMemory() {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // this call cannot fail for the calling process
}
