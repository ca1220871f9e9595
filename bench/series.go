package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"time"
)

// seriesColumns names each list of a stored Series, and says which field of Second the list holds.
var seriesColumns = []struct {
	name  string
	field func(*Second) *int
}{
	{"sent", func(s *Second) *int { return &s.Sent }}, // always stored: its length is the length of the series
	{"ended", func(s *Second) *int { return &s.Ended }},
	{"failed", func(s *Second) *int { return &s.Failed }},
	{"in_flight", func(s *Second) *int { return &s.InFlight }},
	{"chunks", func(s *Second) *int { return &s.Chunks }},
}

// MarshalJSON writes one list for each field of Second. It leaves out a list that has only zeros, except sent. Every
// probe stores a series, and a list of objects would be four times as long.
func (s Series) MarshalJSON() ([]byte, error) {
	lists := make(map[string][]int)
	for _, column := range seriesColumns {
		list, some := make([]int, len(s)), column.name == "sent"
		for i := range s {
			list[i] = *column.field(&s[i])
			some = some || list[i] != 0
		}
		if some {
			lists[column.name] = list
		}
	}
	return json.Marshal(lists)
}

// UnmarshalJSON reads what MarshalJSON writes.
func (s *Series) UnmarshalJSON(text []byte) error {
	var lists map[string][]int
	if err := json.Unmarshal(text, &lists); err != nil {
		return fmt.Errorf("series: %w", err)
	}
	all := make(Series, len(lists["sent"]))
	for _, column := range seriesColumns {
		list, ok := lists[column.name]
		if ok && len(list) != len(all) {
			return fmt.Errorf("series: the column %q has %d seconds, but the column \"sent\" has %d", column.name, len(list), len(all))
		}
		for i, n := range list {
			*column.field(&all[i]) = n
		}
	}
	*s = all
	return nil
}

// secondAt returns the given second of the series. If the series is too short, this method extends it.
func (s *Series) secondAt(second int) *Second {
	for len(*s) <= second {
		*s = append(*s, Second{})
	}
	return &(*s)[second]
}

// Sent counts a request that was sent at the given time of the run.
func (s *Series) Sent(at time.Duration) { s.secondAt(second(at)).Sent++ }

// Ended counts a request that ended or failed at the given time of the run.
func (s *Series) Ended(at time.Duration, failed bool) {
	if failed {
		s.secondAt(second(at)).Failed++
	} else {
		s.secondAt(second(at)).Ended++
	}
}

// Chunks counts n more chunks with output in the given second of the run.
func (s *Series) Chunks(second, n int) { s.secondAt(second).Chunks += n }

// Close computes InFlight for each second. Call it when all requests have been counted.
func (s Series) Close() {
	inFlight := 0
	for i := range s {
		inFlight += s[i].Sent - s[i].Ended - s[i].Failed
		s[i].InFlight = inFlight
	}
}

// between sums up the fields Ended and Chunks of the seconds that lie wholly between two times. It also returns the
// number of these seconds.
func (s Series) between(from, to time.Duration) (sum Second, n int) {
	first, end := int(math.Ceil(from.Seconds())), min(second(to), len(s))
	for i := max(first, 0); i < end; i++ {
		sum.Ended += s[i].Ended
		sum.Chunks += s[i].Chunks
		n++
	}
	return sum, n
}

// peakChunks returns the largest number of chunks in a second that lies at least partly between two times.
func (s Series) peakChunks(from, to time.Duration) int {
	peak := 0
	for i := max(second(from), 0); i < len(s) && time.Duration(i)*time.Second <= to; i++ {
		peak = max(peak, s[i].Chunks)
	}
	return peak
}
