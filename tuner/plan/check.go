package plan

import (
	"context"
	"os"
	"slices"
	"strings"
)

// Say reports a finding of a check under a name. A finding is harmless unless its name is Warning.
type Say func(name, format string, args ...any)

// Warning is the name of a finding that does not stop a study but may harm it.
const Warning = "warning"

// CheckNeeds returns an error for the first need of a server that is not met. The commands check and run both call it,
// so that they refuse the same studies. It does not call CheckFlags, because run does that itself and only once.
func (p *Plan) CheckNeeds(ctx context.Context, say Say) error {
	if err := p.Machine.Check(ctx, say); err != nil {
		return err
	}
	p.sayInherited(say)
	if err := p.Server.checkWeights(say); err != nil {
		return err
	}
	return p.Load.checkRequests(say)
}

// CheckFlags checks that the server knows the flags of the study. If askServer is false, it does not ask a real server,
// which takes 10 to 60 s to list its flags.
func (p *Plan) CheckFlags(ctx context.Context, say Say, askServer bool) error {
	if err := p.Server.checkFlags(ctx, slices.Concat(p.File.Server.Args, p.Search.sampleArgs()), say, askServer); err != nil {
		return err
	}
	if names := p.Search.Variables(); len(names) > 0 {
		say(Warning, "%s: the server's help lists no environment variables, so names and values are not checked; a wrong name has no effect",
			strings.Join(names, ", "))
	}
	return nil
}

// sayInherited warns about searched environment variables that are set where the tuner runs.
func (p *Plan) sayInherited(say Say) {
	for _, name := range p.Search.Variables() {
		if value, set := os.LookupEnv(name); set && !slices.ContainsFunc(p.File.Server.CurrentEnv, func(word string) bool { return strings.HasPrefix(word, name+"=") }) {
			say(Warning, "%s is %q where the tuner runs; the study searches it, so the default runs without it. If your server has it today, add %q to server.current",
				name, value, name+"="+value)
		}
	}
}
