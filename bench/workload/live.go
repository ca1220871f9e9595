package workload

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// thinkCV is the spread of think times about their mean: the pauses of people vary about as much as they last.
const thinkCV = 1

// live is a source of conversations that go on with the real answers of the server. Its requests are their first turns.
type live struct {
	name   string
	order  *order
	talks  []liveTalk
	think  time.Duration
	policy policy
	bad    badRows
}

// A liveTalk is what the user of one conversation says.
type liveTalk []liveTurn

// A liveTurn is what is said before the server answers.
type liveTurn struct {
	messages []Message
	output   int // tokens of the answer
}

// OpenLive returns conversations in which turn t+1 follows the real answer to turn t after the user has thought for a time
// drawn from a lognormal distribution with the given mean. It takes the conversations of kind sharegpt, jsonl or capture at
// endpoint chat; recorded answers only say how long the real ones shall be. Request returns first turns, so that a Plan's
// rate is in sessions per second, and a Loop keeps sessions in flight.
//
// Under overload such load slows itself down, so that its figures cannot judge a server's flags.
func OpenLive(spec Spec, think time.Duration, seed uint64) (Source, error) {
	spec, err := spec.sound()
	switch {
	case err != nil:
		return nil, err
	case !slices.Contains(ChatKinds, spec.Kind):
		return nil, fmt.Errorf("workload %s has no conversations that can go on: for live ones use kind %s", spec.Kind, Or(ChatKinds))
	case spec.Endpoint != Chat:
		return nil, errors.New("live conversations need endpoint chat")
	case think < 0:
		return nil, fmt.Errorf("think time %s must not be negative", think)
	}
	l := &live{think: think, policy: spec.policy(seed), bad: badRows{skip: spec.SkipBadRows}}
	err = withFile(spec.Path, func(f io.Reader) (err error) {
		l.talks, err = readTalks(f, spec, &l.bad)
		return err
	})
	if err != nil {
		return nil, err
	}
	if l.talks, err = choose(l.talks, spec, seed); err != nil {
		return nil, err
	}
	l.order = newOrder(seed, len(l.talks))
	l.name = "live " + spec.titleOf(len(l.talks), l.bad.note())
	return l, nil
}

func (l *live) Name() string { return l.name }

func (l *live) Len() int { return len(l.talks) }

// Longest is unknown: it grows with the answers.
func (l *live) Longest() int { return 0 }

func (l *live) Request(stream Stream, i int) *Request {
	s := session{live: l, stream: stream, number: i, talk: l.talks[l.order.place(stream, i)]}
	first := s.turn(0, nil)
	if repetition := i / len(l.talks); repetition > 0 && l.policy.repeat == Salt {
		return s.turn(0, l.policy.salted(first, stream, repetition).Messages)
	}
	return first
}

// A session is one conversation as it is held once.
type session struct {
	*live
	stream Stream
	number int
	talk   liveTalk
}

// turn returns the request of a turn, 0-based. said is everything that has been said up to and with it; nil means only what
// the first turn says.
func (s session) turn(t int, said []Message) *Request {
	if said == nil {
		said = s.talk[t].messages
	}
	r := &Request{Messages: said, OutputTokens: s.talk[t].output, Conversation: s.number, Turn: t + 1}
	if t+1 < len(s.talk) {
		r.Next = func(answer string) (*Request, time.Duration) {
			next := append(slices.Clip(said), Message{Role: "assistant", Content: answer})
			return s.turn(t+1, append(next, s.talk[t+1].messages...)), s.thinkTime(t + 1)
		}
	}
	return r
}

// mostTurns is more turns than any conversation has, so that each has a draw of its own.
const mostTurns = 1 << 16

func (s session) thinkTime(t int) time.Duration {
	draw := chance(s.policy.seed, thinkDraws, s.stream, s.number*mostTurns+t)
	return time.Duration(float64(s.think) * lognormal(draw, thinkCV))
}

// readTalks reads the conversations of a file, those of one turn too.
func readTalks(from io.Reader, spec Spec, bad *badRows) ([]liveTalk, error) {
	var talks []liveTalk
	add := func(messages []Message, output int) error {
		talk, err := newTalk(messages, output, spec.OutputTokens)
		if err == nil {
			talks = append(talks, talk)
		}
		return err
	}
	var err error
	if spec.Kind == "sharegpt" {
		_, err = eachShareGPT(from, bad, func(entry shareGPTEntry) error {
			messages, err := entry.messages()
			if err != nil || len(messages) == 0 {
				return err
			}
			return add(messages, 0)
		})
	} else {
		err = newLineReader(from).each(bad, func(text []byte) error {
			request, err := parseLine(text, spec)
			if spec.Kind == "capture" {
				request, _, err = spec.parseCapture(text, false)
			}
			if err != nil {
				return err
			}
			return add(request.Messages, request.OutputTokens)
		})
	}
	switch {
	case err != nil:
		return nil, err
	case len(talks) == 0:
		return nil, bad.none()
	case !slices.ContainsFunc(talks, func(t liveTalk) bool { return len(t) > 1 }):
		return nil, fmt.Errorf("none of its %d conversations has a second turn: take a file of conversations", len(talks))
	}
	return talks, nil
}

// newTalk takes a recorded conversation apart: a turn is what stands in front of an answer. The length of a recorded answer
// is estimated from its text. That of an answer which is not recorded is last; 0 means that it is not asked for.
func newTalk(messages []Message, last, override int) (liveTalk, error) {
	var talk liveTalk
	var said []Message
	for _, m := range messages {
		if m.Role != "assistant" {
			said = append(said, m)
			continue
		}
		if len(said) > 0 { // else the server has spoken first, or twice
			talk = append(talk, liveTurn{said, max(1, estimate(m.Content))})
		}
		said = nil
	}
	if len(said) > 0 && last > 0 {
		talk = append(talk, liveTurn{said, last})
	}
	if override > 0 {
		for i := range talk {
			talk[i].output = override
		}
	}
	switch {
	case len(talk) == 0:
		return nil, errors.New("has no turn that is answered")
	case len(talk) > mostTurns:
		return nil, fmt.Errorf("has %d turns, more than %d", len(talk), mostTurns)
	}
	return talk, nil
}

// messages returns the conversation of an entry; none for one that has no user's turn with an answer, such as the second half
// of a conversation that was cut in two.
func (e shareGPTEntry) messages() ([]Message, error) {
	roles := map[string]string{
		"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
		"assistant": "assistant", "model": "assistant", "system": "system",
	}
	var messages []Message
	asked, answered := false, false
	for i, turn := range e.Conversations {
		role := roles[turn.From]
		if role == "" {
			return nil, fmt.Errorf("conversations[%d] is from %q: want human or gpt", i, turn.From)
		}
		asked = asked || role == "user"
		answered = answered || asked && role == "assistant"
		messages = append(messages, Message{Role: role, Content: turn.Value})
	}
	if !answered {
		return nil, nil
	}
	return messages, nil
}
