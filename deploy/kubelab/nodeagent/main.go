// Command nodeagent is a node of a cluster for tests. Its first argument names the part of the node: "machine" is the
// first process, which starts the others; "agent" is the node agent; the rest are parts of a container.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"vllmtuner/deploy/kubelab/agent"
	"vllmtuner/deploy/kubelab/container"
	"vllmtuner/deploy/kubelab/machine"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "nodeagent:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("want the name of a part")
	}
	switch args[0] {
	case "machine":
		return machine.Main(os.Stdin, os.Stdout)
	case "agent":
		return runAgent(args[1:])
	}
	return container.Main(args)
}

func runAgent(args []string) error {
	a := &agent.Agent{Labels: map[string]string{}, Images: map[string]agent.Image{}, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	kubeconfig, err := parse(a, args)
	if err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	shutdown := make(chan os.Signal, 1)
	signal.Notify(shutdown, syscall.SIGPWR) // init gets this signal when the power is about to fail
	return a.Run(ctx, config, shutdown)
}

// parse reads the flags of the agent.
func parse(a *agent.Agent, args []string) (kubeconfig string, err error) {
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	flags.StringVar(&kubeconfig, "kubeconfig", "", "`file` with the address and the credentials of the API server")
	flags.StringVar(&a.Node, "node", "", "`name` of the node")
	flags.IntVar(&a.GPUs, "gpus", 0, "`number` of nvidia.com/gpu that the node offers")
	flags.StringVar(&a.CPU, "cpu", "64", "`CPUs` that the node offers, whatever the machine has")
	flags.StringVar(&a.Memory, "memory", "512Gi", "`memory` that the node offers, whatever the machine has")
	flags.StringVar(&a.Dir, "dir", "", "`directory` of this node; it must survive the agent")
	flags.StringVar(&a.Logs, "logs", "", "`directory` for the output of the containers")
	flags.StringVar(&a.Volumes, "volumes", "", "`directory` with one directory for each PersistentVolume")
	flags.BoolVar(&a.Isolated, "isolated", false, "give each pod a network of its own with only loopback")
	flags.DurationVar(&a.ShutdownGrace, "shutdown-grace", 30*time.Second, "the longest grace period when the machine shuts down")
	flags.Func("label", "`key=value` of the node (repeatable)", func(s string) error {
		key, value, ok := strings.Cut(s, "=")
		if !ok {
			return fmt.Errorf("want key=value")
		}
		a.Labels[key] = value
		return nil
	})
	flags.Func("taint", "`key=value:effect` of the node (repeatable)", func(s string) error {
		taint, err := parseTaint(s)
		a.Taints = append(a.Taints, taint)
		return err
	})
	flags.Func("image", "`name=directory` of an image, laid out as the bundle of a container (repeatable)", func(s string) (err error) {
		name, dir, ok := strings.Cut(s, "=")
		if !ok {
			return fmt.Errorf("want name=directory")
		}
		a.Images[name], err = agent.ReadImage(dir)
		return err
	})
	return kubeconfig, flags.Parse(args)
}

func parseTaint(s string) (corev1.Taint, error) {
	rest, effect, ok := strings.Cut(s, ":")
	key, value, _ := strings.Cut(rest, "=")
	if !ok || key == "" {
		return corev1.Taint{}, fmt.Errorf("want key=value:effect")
	}
	return corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffect(effect)}, nil
}
