package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
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
			namespaceFlag("of all three"),
			&cli.DurationFlag{Name: "study-timeout", Value: time.Hour, Usage: "give the GPU back if no pod of the study has run for this `time`"},
			&cli.DurationFlag{Name: "drain-timeout", Value: 15 * time.Minute, Usage: "give the GPU back if the Deployment's pods have not ended after this `time`"},
		},
		Action: func(c *cli.Context) error {
			settings, names, err := guardOf(c)
			if err != nil {
				return err
			}
			api, err := connect(names)
			if err != nil {
				return err
			}
			g := guard.Guard{Cluster: api, Settings: settings, Stop: finish, Say: sayTo(c.App.ErrWriter)}
			return guardError(g.Run(c.Context), c.App.ErrWriter)
		},
	}
}

// connect returns the objects with these names in the cluster that is configured. Without a namespace, it is the configured one.
func connect(names cluster.Names) (*cluster.Cluster, error) {
	config, namespace, err := cluster.Config(version)
	if err != nil {
		return nil, usage("Deployment %s: %w", names.Deployment, err)
	}
	if names.Namespace == "" {
		names.Namespace = namespace
	}
	return cluster.New(config, names)
}

// sayTo returns a function that writes what the guard does, with the time.
func sayTo(w io.Writer) func(string) {
	return func(text string) { fmt.Fprintf(w, "%s %s\n", time.Now().UTC().Format(time.RFC3339), text) }
}

func restoreCommand() *cli.Command {
	return &cli.Command{
		Name:      "restore",
		Usage:     "give a borrowed GPU back to its Deployment",
		ArgsUsage: "DEPLOYMENT",
		Description: `Gives the Deployment its replicas back at once, as the ConfigMap
tuner-restore-DEPLOYMENT has them, and ends the study, which can be resumed.
It needs neither the guard nor the study, but the rights of the guard, which
are in deploy/rights/rbac.yaml.

Example:
  tuner restore vllm --namespace team-a`,
		Flags: []cli.Flag{namespaceFlag("of the Deployment")},
		Action: func(c *cli.Context) error {
			name, err := oneArg(c, "a Deployment")
			if err != nil {
				return err
			}
			names := cluster.Names{Namespace: c.String("namespace"), Deployment: name}
			if err := checkNames(c, map[string]string{"DEPLOYMENT": name}); err != nil {
				return err
			}
			return restore(c.Context, names, c.App.Writer, c.App.ErrWriter)
		},
	}
}

// restore ends the loan of a Deployment, whoever began it.
func restore(ctx context.Context, names cluster.Names, stdout, stderr io.Writer) error {
	api, err := connect(names)
	if err != nil {
		return err
	}
	record, err := api.ReadRecord(ctx)
	if err != nil {
		return guardError(err, stderr)
	}
	if record == nil {
		fmt.Fprintf(stdout, "nothing is borrowed from Deployment %s in namespace %s\n", names.Deployment, api.Namespace)
		return nil
	}
	now := make(chan struct{})
	close(now)
	api.Job, api.Container = record.Study, record.Container
	settings := guard.Settings{Study: record.Study, Container: record.Container, StopReason: "tuner restore was called"}
	g := guard.Guard{Cluster: api, Settings: settings, Stop: now, Say: sayTo(stderr)}
	err = g.Run(ctx)
	if _, over := errors.AsType[*guard.OutcomeError](err); over || err == nil || errors.Is(err, guard.ErrStudyFailed) || errors.Is(err, guard.ErrNoStudy) {
		fmt.Fprintf(stdout, "Deployment %s has its replicas back\n", names.Deployment)
		return nil
	}
	return guardError(err, stderr)
}

func namespaceFlag(of string) cli.Flag {
	return &cli.StringFlag{Name: "namespace", Usage: "`namespace` " + of + " (default: that of the pod, or of kubectl)"}
}

// checkNames returns an error if one of the names, or that of the namespace, is not one of Kubernetes. The names are by flag.
func checkNames(c *cli.Context, names map[string]string) error {
	if c.IsSet("namespace") {
		names["--namespace"] = c.String("namespace")
	}
	for _, flag := range slices.Sorted(maps.Keys(names)) {
		if wrong := validation.IsDNS1123Subdomain(names[flag]); len(wrong) > 0 {
			return usage("%s %.100q: no object of Kubernetes has such a name: %s", flag, names[flag], strings.Join(wrong, "; "))
		}
	}
	return nil
}

// guardOf returns the settings that the command line gives.
func guardOf(c *cli.Context) (s guard.Settings, n cluster.Names, err error) {
	if c.Args().Present() {
		return s, n, usage("tuner guard takes no argument, but got %q", c.Args().First())
	}
	const longest = 24 * time.Hour
	for _, flag := range []string{"drain-timeout", "study-timeout"} {
		if t := c.Duration(flag); t <= 0 || t > longest {
			return s, n, usage("--%s %s: write a time such as 15m, at most %s", flag, t, longest)
		}
	}
	names := map[string]string{}
	for _, flag := range []string{"deployment", "container", "job"} {
		if names["--"+flag] = c.String(flag); names["--"+flag] == "" {
			return s, n, usage("--%s is missing: give --deployment, --container and --job", flag)
		}
	}
	if err := checkNames(c, names); err != nil {
		return s, n, err
	}
	n = cluster.Names{Namespace: c.String("namespace"), Deployment: c.String("deployment"), Container: c.String("container"), Job: c.String("job")}
	return guard.Settings{Study: n.Job, Container: n.Container, DrainTimeout: c.Duration("drain-timeout"), StudyTimeout: c.Duration("study-timeout")}, n, nil
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
