package vllm

import (
	"cmp"
	"embed"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"vllmtuner/serverctl/sim"
)

// shapeFiles are the answers of each version, as recorded from real servers (testdata/recordings). Each line is a
// shape: its name, and its JSON in which $name stands for a value. The hash at the end of a system fingerprint is
// always 0; in vLLM it is a hash of the configuration.
//
//go:embed versions/*/answers.txt
var shapeFiles embed.FS

// shapes has the JSON of each shape of one version, by the shape's name.
type shapes map[string]string

// fields maps each $name in a shape to its value.
type fields map[string]string

// fill returns the JSON of the named shape with these values.
func (s shapes) fill(name string, parts fields) string {
	return os.Expand(s[name], func(part string) string { return parts[part] })
}

func shapesOf(f *release) shapes { return allShapes()[f.version] }

var allShapes = sync.OnceValue(func() map[string]shapes {
	all := map[string]shapes{}
	for _, version := range sim.Versions {
		text, err := shapeFiles.ReadFile("versions/" + version + "/answers.txt")
		if err != nil {
			panic("vllm: the answers of vLLM " + version + ": " + err.Error()) // tests use the files of all versions
		}
		all[version] = shapes{}
		for line := range strings.Lines(string(text)) {
			name, shape, _ := strings.Cut(strings.TrimSpace(line), ": ")
			all[version][name] = shape
		}
	}
	return all
})

// An answer is the answer to one request. It has one or several sequences, and is sent as one body or as a stream of
// chunks.
type answer struct {
	w       http.ResponseWriter
	shapes  shapes
	id      uint64
	model   string
	chat    bool
	usage   bool // a stream ends with a chunk that has the token counts (usage)
	always  bool // every chunk has the token counts so far
	details bool // the token counts include the cached tokens

	sequences []*sequence
	prompt    int   // number of tokens in all prompts
	sent      []int // number of tokens sent so far, for each sequence

	head string // first fields of the body or of each chunk
}

// eventStream is the content type of a streamed answer.
const eventStream = "text/event-stream; charset=utf-8"

// kind returns the word with which the names of this answer's shapes begin.
func (s *answer) kind() string {
	if s.chat {
		return "chat"
	}
	return "completion"
}

// begin prepares the head. For a streamed chat it also sends the role chunks. The caller calls begin when the first
// token comes, because vLLM sends the role chunks then.
func (s *answer) begin(stream bool) error {
	object, prefix := "text_completion", "cmpl"
	switch {
	case s.chat && stream:
		object, prefix = "chat.completion.chunk", "chatcmpl"
	case s.chat:
		object, prefix = "chat.completion", "chatcmpl"
	}
	s.head = fmt.Sprintf(`"id":"%s-%016x","object":"%s","created":%d,"model":%s`,
		prefix, s.id, object, time.Now().Unix(), toJSON(s.model))
	if !s.chat || !stream {
		return nil
	}
	for i := range s.sequences {
		if err := s.send("chat role chunk", i, fields{}); err != nil {
			return err
		}
	}
	return s.flush()
}

// tokens sends an update as one chunk.
func (s *answer) tokens(u update) error {
	index := u.sequence.index
	parts := fields{"text": words(s.sent[index], u.tokens)}
	s.sent[index] += u.tokens
	shape := s.kind() + " chunk"
	if u.last {
		shape = s.kind() + " last chunk"
		if !s.usage {
			parts["fingerprint"] = s.shapes["fingerprint"]
		}
	}
	if err := s.send(shape, index, parts); err != nil {
		return err
	}
	return s.flush()
}

// send writes a chunk of one sequence, and adds the token counts if the client wants them in every chunk.
func (s *answer) send(shape string, index int, parts fields) error {
	parts["head"] = s.head
	parts["index"], parts["usage"] = strconv.Itoa(index), s.shapes[s.kind()+" chunk without usage"]
	if s.always {
		counts := counts(s.sequences[index].request.Prompt, s.sent[index])
		parts["usage"] = s.shapes.fill(s.kind()+" chunk usage", fields{"counts": counts})
	}
	return s.write(s.shapes.fill(shape, parts))
}

// write writes an event of a stream. It fails when the client has disconnected.
func (s *answer) write(event string) error {
	_, err := s.w.Write([]byte("data: " + event + "\n\n"))
	return err
}

func (s *answer) flush() error { return http.NewResponseController(s.w).Flush() }

// end sends the usage, if the request wants it, and the last event.
func (s *answer) end() error {
	if s.usage {
		details := s.cached()
		if details != "" {
			details = `,"prompt_tokens_details":` + details
		}
		parts := fields{"head": s.head, "counts": s.total(), "details": details}
		if err := s.write(s.shapes.fill("usage chunk", parts)); err != nil {
			return err
		}
	}
	return s.write("[DONE]")
}

// whole sends the answer as one body.
func (s *answer) whole() {
	_ = s.begin(false) // cannot fail, because it sends nothing
	var choices []string
	for i, q := range s.sequences {
		s.sent[i] = q.request.Output
		parts := fields{"index": strconv.Itoa(i), "text": words(0, q.request.Output)}
		choices = append(choices, s.shapes.fill(s.kind()+" choice", parts))
	}
	usage := s.shapes.fill("usage", fields{"counts": s.total(), "details": cmp.Or(s.cached(), "null")})
	s.w.Header().Set("Content-Type", "application/json")
	body := s.shapes.fill(s.kind(), fields{"head": s.head, "choices": strings.Join(choices, ","), "usage": usage})
	_, _ = s.w.Write([]byte(body)) // fails only when the client has disconnected
}

// total returns the token counts of all sequences so far, as JSON fields.
func (s *answer) total() string {
	output := 0
	for _, n := range s.sent {
		output += n
	}
	return counts(s.prompt, output)
}

// counts returns token counts as the JSON fields of a usage.
func counts(prompt, output int) string {
	return fmt.Sprintf(`"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d`, prompt, prompt+output, output)
}

// cached returns the number of cached tokens as JSON. It returns "" if no tokens were cached, or if the usage does not
// report them.
func (s *answer) cached() string {
	n := 0
	for _, q := range s.sequences {
		n += max(0, q.request.Cached)
	}
	if !s.details || n == 0 {
		return ""
	}
	return fmt.Sprintf(`{"cached_tokens":%d}`, n)
}

// words returns n tokens of an answer as text. Each token is a word with its number, and the numbers begin with first.
func words(first, n int) string {
	var to []byte
	for i := first; i < first+n; i++ {
		to = append(to, " w"...)
		to = strconv.AppendInt(to, int64(i), 10)
	}
	return string(to)
}
