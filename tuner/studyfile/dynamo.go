package studyfile

import "vllmtuner/serverctl"

// readDynamo replaces the command of a Dynamo worker by `vllm serve` with the same engine flags, and moves Dynamo's own
// flags from the args to Server.Dynamo. It runs last, because the checks report problems by their place in the file.
func (d *decoder) readDynamo(f *File) {
	s := &f.Server
	worker, ok := serverctl.DynamoWorker(s.Command)
	if !ok {
		return
	}
	if worker.Model != "" && f.Model != "" && worker.Model != f.Model {
		d.failAt("server.command", "server.command has --model %s, but model is %s; keep one of them", worker.Model, f.Model)
	}
	d.checkFlags(f, "server.command", func(int) string { return "server.command" }, worker.Args, true)
	own, dynamo := serverctl.SplitDynamo(s.Args)
	s.Command = worker.Command
	s.Args = append(worker.Args, own...)
	s.Dynamo = append(worker.Dynamo, dynamo...)
	s.Current, _ = serverctl.SplitDynamo(s.Current)
	if f.Sweep != nil {
		for i := range f.Sweep.Configs {
			c := &f.Sweep.Configs[i]
			c.Args, _ = serverctl.SplitDynamo(c.Args)
		}
	}
}
