package main

import (
	"fmt"
	"math"

	"vllmtuner/serverctl/host"
)

// checkFiles checks the limit of open files for runs with so many requests in flight. Where only a rate is given, about as
// many are in flight as are sent in a second. It is an error where the runs would surely fail.
func (b *benching) checkFiles(limit *host.Limit) error {
	need := host.Need{Certain: true}
	for _, s := range b.shots {
		streams := s.concurrency
		if streams == 0 {
			need.Certain = false
			streams = int(math.Ceil(max(s.rate, s.from, s.to)))
			if b.client.MaxInFlight > 0 {
				streams = min(streams, b.client.MaxInFlight)
			}
		}
		need.Streams = max(need.Streams, streams)
	}
	for _, f := range host.CheckFiles(limit, need) {
		text := fmt.Sprintf("%s: %s, wanted %s; %s", f.What, f.Have, f.Need, f.Remedy)
		if f.Severity == host.Error {
			return usage("%s", text)
		}
		warn(b.stderr, "%s", text)
	}
	return nil
}
