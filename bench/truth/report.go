package truth

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"syscall"
	"time"
)

// A Report is the server's record of a run.
type Report struct {
	Began    time.Time     `json:"began"`    // when Serve started
	CPU      time.Duration `json:"cpu_ns"`   // CPU time of the process since Began
	Tokens   int           `json:"tokens"`   // tokens written
	Requests []Request     `json:"requests"` // in the order of arrival; none with Config.Forget
}

// A Request is the server's record of one request. Times are microseconds since Report.Began.
type Request struct {
	ID       string  `json:"id"`       // its X-Request-Id
	Received int64   `json:"received"` // when its last byte reached this machine's kernel (SO_TIMESTAMPNS)
	Due      []int64 `json:"due"`      // due time of each token
	Writes   []int64 `json:"writes"`   // time just before the call that wrote each token
}

// TTFT returns the true time to first token, or 0 without tokens.
func (r Request) TTFT() time.Duration {
	if len(r.Writes) == 0 {
		return 0
	}
	return time.Duration(r.Writes[0]-r.Received) * time.Microsecond
}

// TPOT returns the true mean time per token after the first, or 0 with fewer than two tokens.
func (r Request) TPOT() time.Duration {
	n := len(r.Writes)
	if n < 2 {
		return 0
	}
	return time.Duration(r.Writes[n-1]-r.Writes[0]) * time.Microsecond / time.Duration(n-1)
}

// Gaps returns the true times between tokens.
func (r Request) Gaps() []time.Duration {
	var gaps []time.Duration
	for i := 1; i < len(r.Writes); i++ {
		gaps = append(gaps, time.Duration(r.Writes[i]-r.Writes[i-1])*time.Microsecond)
	}
	return gaps
}

// Lateness returns how late the server wrote each token, counted from the token's due time. A large value means that
// the machine was too slow for the server.
func (r Request) Lateness() []time.Duration {
	late := make([]time.Duration, len(r.Writes))
	for i, at := range r.Writes {
		late[i] = time.Duration(at-r.Due[i]) * time.Microsecond
	}
	return late
}

// reportPath is the URL path at which the server gives its report.
const reportPath = "/truth"

// Fetch gets the report of a server in another process.
func Fetch(ctx context.Context, url string) (*Report, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+reportPath, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("ask the truth server: %w", err)
	}
	defer response.Body.Close()
	report := new(Report)
	if err := json.NewDecoder(response.Body).Decode(report); err != nil {
		return nil, fmt.Errorf("read the report of the truth server (%s): %w", response.Status, err)
	}
	return report, nil
}

// CPUTime returns the CPU time of this process, user and system.
func CPUTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
