// Command tuner finds the vLLM flags with which one GPU server carries the most traffic inside its latency promises.
// It wires the rooms together; no other package does.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"vllmtuner/serverctl/proc"
)

func main() {
	proc.Main() // this program is also the watchdog of the servers that it starts
	os.Exit(run())
}

// run is the command with its signals: the first SIGINT or SIGTERM asks the study to finish its probe, which is up to the
// subcommand; the second ends it at once.
func run() int {
	finish, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	now, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	unwatch := context.AfterFunc(finish, func() {
		if !viewing.Load() {
			fmt.Fprintln(os.Stderr, freshLine(os.Stderr)+"tuner: finishing what is at hand; once more stops at once")
		}
		second := make(chan os.Signal, 1)
		signal.Notify(second, os.Interrupt, syscall.SIGTERM)
		go func() { // ends with the process, or with the second signal
			<-second
			cancel(errStoppedNow)
		}()
		stop()
	})
	defer unwatch() // before stop, which ends finish too
	err := app(os.Stdout, os.Stderr, finish.Done()).RunContext(now, flagsFirst(os.Args))
	if err != nil && err.Error() != "" {
		fmt.Fprintln(os.Stderr, "tuner:", err)
	}
	return exitCode(err)
}
