package plan

import (
	"context"
	"slices"
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
	if err := p.Server.checkWeights(say); err != nil {
		return err
	}
	return p.Load.checkRequests(say)
}

// CheckFlags checks that the server knows the flags of the study. If askServer is false, it does not ask a real server,
// which takes 10 to 60 s to list its flags.
func (p *Plan) CheckFlags(ctx context.Context, say Say, askServer bool) error {
	return p.Server.checkFlags(ctx, slices.Concat(p.File.Server.Args, p.Search.sampleArgs()), say, askServer)
}
