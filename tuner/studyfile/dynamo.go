package studyfile

import (
	"strings"

	"vllmtuner/serverctl"
	"vllmtuner/tuner/space"
)

// readDynamo replaces the command of a Dynamo worker by that of vLLM's own server with the same engine flags, and takes
// Dynamo's own flags out of the args: they are kept in Server.Dynamo. It goes through last, so that every problem has been
// reported where it stands in the file.
func (d *decoder) readDynamo(f *File) {
	s := &f.Server
	worker, ok := serverctl.DynamoWorker(s.Command)
	if !ok {
		return
	}
	if worker.Model != "" && f.Model != "" && worker.Model != f.Model {
		d.failAt("server.command", "server.command has --model %s, and model is %s; keep one of them", worker.Model, f.Model)
	}
	d.checkCommandFlags(f, worker.Args)
	own, dynamo := serverctl.SplitDynamo(s.Args)
	s.Command = worker.Command
	s.Args = append(worker.Args, own...)
	s.Dynamo = append(worker.Dynamo, dynamo...)
	s.Current, _ = serverctl.SplitDynamo(s.Current)
}

// checkCommandFlags holds the flags that came with a worker's command against what is searched, and against our own.
func (d *decoder) checkCommandFlags(f *File, args []string) {
	flags, err := space.Flags(args)
	if err != nil {
		d.failAt("server.command", "server.command: %v", err)
		return
	}
	for _, flag := range flags {
		name := searchedName(flag.Name)
		if remedy := ours[name]; remedy != "" {
			d.failAt("server.command", "server.command has --%s; %s", name, remedy)
		}
		for _, p := range f.Parameters {
			if p.Name == name || p.Name == space.SpeculativeTokens && name == "speculative-config" {
				d.failAt("server.command", "--%s is in server.command and searched; remove one of them", strings.TrimPrefix(flag.Name, "no-"))
			}
		}
	}
}
