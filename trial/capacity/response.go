package capacity

import (
	"math"

	"gonum.org/v1/gonum/stat"
)

// A response says how the headroom of one limit falls with the rate, for servers that run the same model on the same
// GPU.
type response struct {
	fall    float64 // fall of the headroom where the rate grows by a factor of e
	fallErr float64 // standard error of fall
	usual
}

// A usual response is what is known of a limit before anything is measured. Its figures come from simulated servers.
type usual struct {
	fall, fallErr, minFall float64
	noise                  float64 // of the headroom of one probe, in a comparison with another server
	lineNoise              float64 // of the headroom of one probe, around the line through probes with several draws
	within                 float64 // a headroom beyond this only says that the rate is far away
	grows                  bool    // the limit is on a queue that may grow without end
}

// The usual responses. A time per token grows about as the batch does. A time to first token jumps where a queue forms.
var (
	perToken = usual{fall: 1, fallErr: 0.6, minFall: 0.15, noise: 0.025, lineNoise: 0.03, within: 0.5}
	queue    = usual{fall: 10, fallErr: 8, minFall: 0.7, noise: 0.25, lineNoise: 0.4, within: 2, grows: true}
)

// betweenServers is how much the fall of two servers differs that run the same model on the same GPU, as a part of it.
const betweenServers = 0.3

// responses returns what the steps of a server show of its limits, in the order of the limits in its evidence.
func responses(steps []Step) (all []response) {
	probes := evidenceOf(steps)
	if len(probes) == 0 {
		return nil
	}
	for i, limit := range probes[0].Limits {
		all = append(all, respond(probes, i, limit.usual()))
	}
	return all
}

// evidenceOf returns the evidence of the steps that have some, and whose load generator was on time.
func evidenceOf(steps []Step) (probes []*Evidence) {
	for _, step := range inTime(steps) {
		if step.Evidence != nil {
			probes = append(probes, step.Evidence)
		}
	}
	return probes
}

// usual returns the usual response of a limit.
func (l LimitEvidence) usual() usual {
	if l.Queue {
		return queue
	}
	return perToken
}

// respond fits the fall of a limit's headroom to the probes: a line through their ln rates, with what is usual as the
// prior.
func respond(probes []*Evidence, limit int, u usual) response {
	var x, y []float64
	for _, e := range probes {
		x, y = append(x, math.Log(e.Rate)), append(y, max(-u.within, min(u.within, e.Limits[limit].Headroom)))
	}
	information, sum := 1/(u.fallErr*u.fallErr), u.fall/(u.fallErr*u.fallErr)
	if n := float64(len(x) - 1); n > 0 {
		variance := u.lineNoise * u.lineNoise
		information += n * stat.Variance(x, nil) / variance
		sum -= n * stat.Covariance(x, y, nil) / variance
	}
	return response{fall: max(u.minFall, sum/information), fallErr: 1 / math.Sqrt(information), usual: u}
}

// boundary returns ln of the rate at which a step's draw would just keep the limit, and its standard error in a
// comparison with another server. ok is false if the step does not tell.
func (r response) boundary(s Step, limit LimitEvidence) (logRate, stdErr float64, ok bool) {
	logRate = math.Log(s.Rate)
	if r.grows && limit.Headroom < 0 {
		judged, broken := limit.count()
		share := broken / max(1, judged)
		if share > maxGrown {
			return logRate, 0, false
		}
		past, off := grownPast+grownPastShare*share, grownErr+grownErrShare*share
		return logRate + max(-past, limit.Headroom/r.fall), off, true
	}
	slope := 1 / r.fall
	slopeErr := slope * math.Hypot(betweenServers, min(1, r.fallErr/r.fall))
	return logRate + slope*limit.Headroom, math.Hypot(slope*r.noise, slopeErr*limit.Headroom), true
}

// Where a queue has broken its limit, it may grow until the probe ends, and its headroom tells little of the rate. The
// share of slow requests tells how far ln rate is past the boundary: by grownPast, and more with the share, with an error
// that grows with the share too. Where more than maxGrown are slow, only the fail itself tells (150 probes of points on
// three simulated servers: 40 to 70 % slow lie .32 ± .24 past the boundary; above 70 % it is 1.1 ± .6).
const (
	grownPast, grownPastShare = 0.10, 0.35
	grownErr, grownErrShare   = 0.10, 0.20
	maxGrown                  = 0.7
)
