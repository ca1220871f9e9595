package workload

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"vllmtuner/render"
)

// thinkCV is the coefficient of variation of think times. It is 1 because the standard deviation of people's pauses is
// about as large as their mean.
const thinkCV = 1

// live is a source of conversations that go on with the server's real answers. Its method Request returns first turns
// only.
type live struct {
	population
	talks []liveTalk
	think time.Duration
}

// A liveTalk is the user's part of one conversation.
type liveTalk []liveTurn

// A liveTurn is what the user says before the server answers once.
type liveTurn struct {
	messages []Message
	output   int // number of tokens to ask for
}

// OpenLive returns conversations in which turn t+1 follows the real answer to turn t after a think time. Think times
// have a lognormal distribution with the given mean. The conversations come from a file of kind sharegpt, jsonl or
// capture, with endpoint chat. A recorded answer only gives the length of the real answer. The source's method Request
// returns first turns only. So the rate of a Plan is in conversations per second, and a Loop keeps a number of
// conversations in flight.
//
// Under overload, live conversations slow themselves down, because a next turn waits for an answer. So figures of such
// a load cannot be used to compare flags of a server.
func OpenLive(spec Spec, think time.Duration, seed uint64) (Source, error) {
	spec, err := spec.checked()
	switch {
	case err != nil:
		return nil, err
	case !slices.Contains(ChatKinds, spec.Kind):
		return nil, fmt.Errorf("workload %s has no conversations that can go on: for live conversations use kind %s", spec.Kind, Or(ChatKinds))
	case spec.Endpoint != Chat:
		return nil, errors.New("live conversations need endpoint chat")
	case think < 0:
		return nil, fmt.Errorf("think time %s must not be negative", think)
	}
	bad := badRows{skip: spec.SkipBadRows}
	var talks []liveTalk
	err = withFile(spec.Path, func(f io.Reader) (err error) {
		talks, err = readTalks(f, spec, &bad)
		return err
	})
	if err != nil {
		return nil, err
	}
	if talks, err = choose(talks, spec, seed); err != nil {
		return nil, err
	}
	l := &live{newPopulation("live "+spec.titleOf(len(talks), bad.note()), spec, seed, len(talks)), talks, think}
	l.bad = bad
	return l, nil
}

// Longest returns 0, which means unknown, because prompts grow with the real answers.
func (l *live) Longest() int { return 0 }

func (l *live) Request(stream Stream, i int) *Request {
	s := session{live: l, stream: stream, number: i, talk: l.talks[l.index(stream, i)]}
	return l.salted(s.turn(0, s.talk[0].messages), stream, i)
}

// A session is one conversation that is being held. A finite source may hold the same recorded conversation again.
type session struct {
	*live
	stream Stream
	number int
	talk   liveTalk
}

// turn returns the request of turn t, counted from 0. The history is the conversation up to and including that turn.
func (s session) turn(t int, history []Message) *Request {
	r := &Request{Messages: history, OutputTokens: s.talk[t].output, Conversation: s.number, Turn: t + 1}
	if t+1 < len(s.talk) {
		r.Next = func(answer string) (*Request, time.Duration) {
			next := append(slices.Clip(history), Message{Role: "assistant", Content: answer})
			return s.turn(t+1, append(next, s.talk[t+1].messages...)), s.thinkTime(t + 1)
		}
	}
	return r
}

// maxTurns is the limit on the turns of a conversation. Because of the limit, every turn of every session has its own
// number and so its own random think time.
const maxTurns = 1 << 16

func (s session) thinkTime(t int) time.Duration {
	draw := chance(s.seed, thinkDraws, s.stream, s.number*maxTurns+t)
	return time.Duration(float64(s.think) * lognormal(draw, thinkCV))
}

// readTalks reads the conversations of a file, even those with only one turn.
func readTalks(from io.Reader, spec Spec, bad *badRows) ([]liveTalk, error) {
	var talks []liveTalk
	var err error
	if spec.Kind == "sharegpt" {
		_, err = eachShareGPT(from, bad, func(entry shareGPTEntry) error {
			messages, err := entry.messages()
			if err != nil || len(messages) == 0 {
				return err
			}
			talk, err := newTalk(messages, 0, spec.OutputTokens)
			if err == nil {
				talks = append(talks, talk)
			}
			return err
		})
		if err == nil && len(talks) == 0 {
			err = bad.noUsableRow()
		}
	} else {
		talks, err = readLines(from, bad, func(text []byte) (liveTalk, error) {
			request, err := parseLine(text, spec)
			if spec.Kind == "capture" {
				request, _, err = spec.parseCapture(text, false)
			}
			if err != nil {
				return nil, err
			}
			return newTalk(request.Messages, request.OutputTokens, spec.OutputTokens)
		})
	}
	switch {
	case err != nil:
		return nil, err
	case !slices.ContainsFunc(talks, func(t liveTalk) bool { return len(t) > 1 }):
		return nil, fmt.Errorf("it has %s, but none has a second turn: use a file of conversations", render.Count(len(talks), "conversation"))
	}
	return talks, nil
}

// newTalk splits a recorded conversation into turns. Each turn has the messages before an answer. The length of a
// recorded answer is estimated from its text. If the conversation ends with the user, its last answer is missing. The
// missing answer gets the length lastAnswer; if that is 0, the last turn is left out. If override is above 0, it
// replaces all lengths.
func newTalk(messages []Message, lastAnswer, override int) (liveTalk, error) {
	var talk liveTalk
	var said []Message
	for _, m := range messages {
		if m.Role != "assistant" {
			said = append(said, m)
			continue
		}
		if len(said) > 0 { // otherwise the server spoke first or twice, and nothing was asked
			talk = append(talk, liveTurn{said, max(1, estimate(m.Content))})
		}
		said = nil
	}
	if len(said) > 0 && lastAnswer > 0 {
		talk = append(talk, liveTurn{said, lastAnswer})
	}
	if override > 0 {
		for i := range talk {
			talk[i].output = override
		}
	}
	switch {
	case len(talk) == 0:
		return nil, errors.New("has no turn with an answer")
	case len(talk) > maxTurns:
		return nil, fmt.Errorf("has %d turns, more than %d", len(talk), maxTurns)
	}
	return talk, nil
}

// messages returns the conversation of an entry. It returns no messages if no user's turn has an answer. That happens
// in the second half of a conversation that was cut in two.
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
			return nil, fmt.Errorf("conversations[%d] is from %q, must be human or gpt", i, turn.From)
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
