package workload

import (
	"strings"
	"testing"
	"time"
)

func FuzzFiles(f *testing.F) {
	f.Add([]byte(`{"prompt":"x","messages":[{"role":"user","content":"y"}],"output_tokens":3}`))
	f.Add([]byte(`[{"conversations":[{"value":"a longer question"},{"value":"a longer answer, too"}]}]`))
	f.Add([]byte(`[{"conversations":[{"value":"a longer question"},{"value":"a longer answer, too"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, endpoint := range []string{Completions, Chat} {
			for _, skip := range []bool{false, true} {
				spec := Spec{Endpoint: endpoint}
				lines, err := readJSONL(strings.NewReader(string(data)), spec, &badRows{skip: skip})
				check(t, lines, err, endpoint)
				entries, err := readShareGPT(strings.NewReader(string(data)), spec, &badRows{skip: skip})
				check(t, entries, err, endpoint)
			}
		}
	})
}

func FuzzTraces(f *testing.F) {
	f.Add([]byte(burstHead + "5,a,472,18,490,x\n6,a,3,0,3,x\n"))
	f.Add([]byte(azureHead + "2023-11-16 18:15:46.6805900,374,44\n2024-05-10 00:00:00.009930+00:00,2,5\n"))
	f.Add([]byte(`{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}` + "\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		in := &traced{spec: Spec{VocabSize: 100}}
		if err := in.read(strings.NewReader(string(data)), true, &badRows{skip: len(data)%2 == 0}); err != nil {
			return
		}
		at, longest, _ := in.source(1)
		for i, row := range in.rows {
			if row.input < 1 || row.output < 1 || row.input+row.output > longest || row.at.Abs() > maxTime {
				t.Fatalf("row %d is %+v", i, row)
			}
			if row.input < 10_000 {
				if r := at(i); len(r.Tokens) != row.input || r.OutputTokens != row.output {
					t.Fatalf("row %d of %+v asks for %d tokens after %d", i, row, r.OutputTokens, len(r.Tokens))
				}
			}
		}
	})
}

func FuzzCaptures(f *testing.F) {
	f.Add([]byte(`{"timestamp":1770109200.5,"body":{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"max_tokens":9}}`))
	f.Add([]byte(`{"request":{"prompt":[[1,2]],"n":1},"response":{"body":{"usage":{"completion_tokens":11}}}}`))
	f.Add([]byte(`{"body":"{\"prompt\":[ ],\"max_tokens\":4}"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, endpoint := range []string{Completions, Chat} {
			in := &captured{spec: Spec{Endpoint: endpoint}}
			err := in.read(strings.NewReader(string(data)), len(data)%2 == 0, &badRows{skip: true})
			if (err == nil) != (len(in.requests) > 0) || len(in.came) != len(in.requests) {
				t.Fatalf("%d requests at %d times with error %v", len(in.requests), len(in.came), err)
			}
			for i, r := range in.requests {
				ways := 0
				for _, is := range []bool{r.Tokens != nil, r.Text != "", r.Messages != nil} {
					if is {
						ways++
					}
				}
				if ways != 1 || r.OutputTokens < 1 || in.came[i].Abs() > maxTime {
					t.Fatalf("request %+v at %s", r, in.came[i])
				}
			}
		}
	})
}

func FuzzTalks(f *testing.F) {
	f.Add([]byte(talks))
	f.Add([]byte(`[{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"},{"from":"human","value":"c"},{"from":"gpt","value":"d"}]}]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, kind := range ChatKinds {
			list, err := readTalks(strings.NewReader(string(data)), Spec{Kind: kind, Endpoint: Chat}, &badRows{skip: true})
			if err != nil {
				continue
			}
			l := &live{order: newOrder(1, len(list)), talks: list, think: time.Second}
			for i := range list {
				for r := l.Request(WindowStream, i); ; {
					if r.OutputTokens < 1 || len(r.Messages) == 0 || r.Messages[len(r.Messages)-1].Role == "assistant" {
						t.Fatalf("turn %d of session %d is %+v", r.Turn, i, r)
					}
					if r.Next == nil {
						break
					}
					r, _ = r.Next("answer")
				}
			}
		}
	})
}
