package capacity

import (
	"math"

	"gonum.org/v1/gonum/stat"
)

// A response says how the headroom of one limit falls with the rate, for servers that run the same model on the same
// GPU.
type response struct {
	fall    float64 // fall of the headroom when the rate grows by a factor of e
	fallErr float64 // standard error of fall
	priorResponse
}

// A priorResponse is what is known about the response of a limit before anything is measured. Its figures come from
// simulated servers.
type priorResponse struct {
	fall, fallErr, minFall float64
	noise                  float64 // standard deviation of one probe's headroom, in a comparison with another server
	lineNoise              float64 // standard deviation of one probe's headroom, around the line through probes with several draws
	within                 float64 // a headroom beyond this only says that the rate is far away
	grows                  bool    // the limit is on a queue that may grow without end
}

// The prior responses. A time per token grows about as the batch does. A time to first token jumps where a queue forms.
var (
	perToken = priorResponse{fall: 1, fallErr: 0.6, minFall: 0.15, noise: 0.025, lineNoise: 0.03, within: 0.5}
	queue    = priorResponse{fall: 10, fallErr: 8, minFall: 0.7, noise: 0.25, lineNoise: 0.4, within: 2, grows: true}
)

// clamp limits a headroom to ±within. Only within these limits does a headroom say how far away the boundary is.
func (u priorResponse) clamp(headroom float64) float64 {
	return max(-u.within, min(u.within, headroom))
}

// betweenServers is the relative difference in fall between two servers that run the same model on the same GPU.
const betweenServers = 0.3

// responses returns the response of each limit, as the steps of a server show it. The responses have the order of the
// limits in the evidence.
func responses(steps []Step) (all []response) {
	probes := evidenceOf(steps)
	if len(probes) == 0 {
		return nil
	}
	for i, limit := range probes[0].Limits {
		all = append(all, respond(probes, i, limit.prior()))
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

// prior returns the priorResponse of a limit.
func (l LimitEvidence) prior() priorResponse {
	if l.Queue {
		return queue
	}
	return perToken
}

// respond fits the fall of a limit's headroom to the probes: a line over their ln rates. The priorResponse is the prior
// of this fit.
func respond(probes []*Evidence, limit int, u priorResponse) response {
	var x, y []float64
	for _, e := range probes {
		x, y = append(x, math.Log(e.Rate)), append(y, u.clamp(e.Limits[limit].Headroom))
	}
	information, sum := 1/(u.fallErr*u.fallErr), u.fall/(u.fallErr*u.fallErr)
	if n := float64(len(x) - 1); n > 0 {
		variance := u.lineNoise * u.lineNoise
		information += n * stat.Variance(x, nil) / variance
		sum -= n * stat.Covariance(x, y, nil) / variance
	}
	return response{fall: max(u.minFall, sum/information), fallErr: 1 / math.Sqrt(information), priorResponse: u}
}

// boundary returns ln of the rate at which the requests of a step would just keep the limit, and its standard error in
// a comparison with another server. If the step does not show that rate, ok is false.
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

// A queue that has broken its limit may grow until the probe ends. Its headroom then says little about the rate. But
// the share of slow requests says how far ln rate is past the boundary: grownPast + grownPastShare·share. The standard
// error of that distance is grownErr + grownErrShare·share. If a share of more than maxGrown is slow, the probe shows
// no distance. The figures come from 150 probes of three simulated servers. Probes with 40 to 70 % slow requests lay
// 0.32 ± 0.24 past the boundary, and probes with more slow requests lay 1.1 ± 0.6 past it.
const (
	grownPast, grownPastShare = 0.10, 0.35
	grownErr, grownErrShare   = 0.10, 0.20
	maxGrown                  = 0.7
)
