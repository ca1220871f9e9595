package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"k8s.io/apimachinery/pkg/util/validation"

	"vllmtuner/deploy/cluster"
	"vllmtuner/deploy/guard"
)

func guardCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:  "guard",
		Usage: "borrow the GPU of a Deployment for a study, and give it back",
		Description: `Runs in a pod without a GPU. Scales the Deployment to 0, starts the study's
Job, and gives the Deployment its replicas back when the Job has ended.
It may be killed at any time: started again, it goes on. SIGTERM gives the
GPU back at once, and ends the study. A ConfigMap has what production had.

Example:
  tuner guard --deployment vllm --container vllm --job tune-llama70b`,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "deployment", Usage: "`name` of the Deployment to borrow from"},
			&cli.StringFlag{Name: "container", Usage: "`name` of its container that serves"},
			&cli.StringFlag{Name: "job", Usage: "`name` of the study's Job, created with suspend: true"},
			&cli.StringFlag{Name: "namespace", Usage: "`namespace` of all three (default: that of the pod, or of kubectl)"},
			&cli.DurationFlag{Name: "drain-timeout", Value: 15 * time.Minute, Usage: "give the GPU back if the Deployment's pods have not ended after this `time`"},
		},
		Action: func(c *cli.Context) error {
			settings, names, err := guardOf(c)
			if err != nil {
				return err
			}
			config, namespace, err := cluster.Config(version)
			if err != nil {
				return usage("borrow from Deployment %s, container %s, for Job %s: %w", names.Deployment, names.Container, names.Job, err)
			}
			if names.Namespace == "" {
				names.Namespace = namespace
			}
			api, err := cluster.New(config, names)
			if err != nil {
				return err
			}
			say := func(text string) {
				fmt.Fprintf(c.App.ErrWriter, "%s %s\n", time.Now().UTC().Format(time.RFC3339), text)
			}
			g := guard.Guard{Cluster: api, Settings: settings, Stop: finish, Say: say}
			return guardError(g.Run(c.Context), c.App.ErrWriter)
		},
	}
}

// guardOf returns the settings that the command line gives.
func guardOf(c *cli.Context) (s guard.Settings, n cluster.Names, err error) {
	if c.Args().Present() {
		return s, n, usage("tuner guard takes no argument, but got %q", c.Args().First())
	}
	const longest = 24 * time.Hour
	if t := c.Duration("drain-timeout"); t <= 0 || t > longest {
		return s, n, usage("--drain-timeout %s: write a time such as 15m, at most %s", t, longest)
	}
	for _, flag := range []string{"deployment", "container", "job", "namespace"} {
		name := c.String(flag)
		if flag == "namespace" && !c.IsSet(flag) {
			continue
		}
		if name == "" {
			return s, n, usage("--%s is missing: give --deployment, --container and --job", flag)
		}
		if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 {
			return s, n, usage("--%s %.100q: no object of Kubernetes has such a name: %s", flag, name, strings.Join(wrong, "; "))
		}
	}
	n = cluster.Names{Namespace: c.String("namespace"), Deployment: c.String("deployment"), Container: c.String("container"), Job: c.String("job")}
	return guard.Settings{Study: n.Job, DrainTimeout: c.Duration("drain-timeout")}, n, nil
}

// guardError gives an error of the guard its exit code: 2 if no retry helps. In a pod, the guard of a loan that is over ends
// without an error, because Kubernetes would start it again. The study's Job shows what became of the study.
func guardError(err error, w io.Writer) error {
	_, over := errors.AsType[*guard.OutcomeError](err)
	if inPod() && (over || errors.Is(err, guard.ErrStudyFailed)) {
		fmt.Fprintln(w, err)
		return nil
	}
	for _, hopeless := range []error{guard.ErrForbidden, guard.ErrNoDeployment, guard.ErrNoContainer, guard.ErrNothingToBorrow} {
		if errors.Is(err, hopeless) {
			return usageError{err}
		}
	}
	return err
}
