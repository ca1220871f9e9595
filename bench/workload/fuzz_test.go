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
		rows, _, err := readTraced(strings.NewReader(string(data)), Spec{}, &badRows{skip: len(data)%2 == 0})
		if (err == nil) != (len(rows) > 0) {
			t.Fatalf("%d rows with error %v", len(rows), err)
		}
		for i, row := range rows {
			if row.PromptTokens < 1 || row.OutputTokens < 1 || row.at.Abs() > maxTime {
				t.Fatalf("row %d is %+v", i, row)
			}
			if row.PromptTokens < 10_000 {
				if r := row.draw(1, i, 100); len(r.Tokens) != row.PromptTokens || r.OutputTokens != row.OutputTokens {
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
			rows, err := readCaptures(strings.NewReader(string(data)), Spec{Endpoint: endpoint}, len(data)%2 == 0, &badRows{skip: true})
			if (err == nil) != (len(rows) > 0) {
				t.Fatalf("%d requests with error %v", len(rows), err)
			}
			for _, r := range rows {
				ways := 0
				for _, is := range []bool{r.Tokens != nil, r.Text != "", r.Messages != nil} {
					if is {
						ways++
					}
				}
				if ways != 1 || r.OutputTokens < 1 || r.at.Abs() > maxTime {
					t.Fatalf("request %+v", r)
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
			l := &live{newPopulation("", Spec{}, 1, len(list)), list, time.Second}
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
