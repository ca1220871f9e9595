package gpu

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"
)

func read(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestParseDCGM(t *testing.T) {
	for _, row := range []struct {
		name, file string
		want       []GPU
	}{
		{"two GPUs of an exporter of 2026", "testdata/dcgm.prom", []GPU{
			{
				Index: 0, UUID: "GPU-6d5c0ac5", Name: "NVIDIA H200", Driver: "590.48.01",
				TotalMiB: new(143771.0), UsedMiB: new(55.0), FreeMiB: new(143102.0), Utilization: new(0.0), PowerW: new(76.5),
				SMClockMHz: new(345.0), MemoryClockMHz: new(3201.0), TemperatureC: new(29.0), Throttle: []string{"idle"},
			},
			{
				Index: 1, UUID: "GPU-7e4d1bd6", Name: "NVIDIA H200", Driver: "590.48.01",
				TotalMiB: new(143157.0), UsedMiB: new(129000.0), FreeMiB: new(14157.0), Utilization: new(100.0),
				SMClockMHz: new(1710.0), MemoryClockMHz: new(3201.0), TemperatureC: new(71.0), Throttle: []string{"power cap"},
			},
		}},
		{"the instances of a divided GPU, and the old name of the reasons", "testdata/dcgm_mig.prom", []GPU{
			{
				Index: 0, UUID: "GPU-1f027ee8", Name: "NVIDIA A800-SXM4-80GB", Driver: "535.129.03", MIG: "2g.20gb #3", Profile: "2g.20gb",
				TotalMiB: new(19968.0), UsedMiB: new(10.0), FreeMiB: new(19958.0), Throttle: []string{},
			},
			{
				Index: 0, UUID: "GPU-1f027ee8", Name: "NVIDIA A800-SXM4-80GB", Driver: "535.129.03", MIG: "2g.20gb #5", Profile: "2g.20gb",
				TotalMiB: new(19968.0), UsedMiB: new(9000.0), FreeMiB: new(10968.0),
			},
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := parseDCGM(read(t, row.file))
			if err != nil || !reflect.DeepEqual(got, row.want) {
				t.Errorf("parseDCGM() = %s, %v\nwant %s", asJSON(t, got), err, asJSON(t, row.want))
			}
		})
	}
}

func TestDCGMQuery(t *testing.T) {
	t.Parallel()
	page := read(t, "testdata/dcgm.prom")
	stop := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, page) })
	mux.HandleFunc("/none", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "go_goroutines 7\n") })
	mux.HandleFunc("/garbage", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "\x00<html>{{{\n") })
	mux.HandleFunc("/hang", func(http.ResponseWriter, *http.Request) { <-stop })
	mux.HandleFunc("/huge", func(w http.ResponseWriter, _ *http.Request) {
		for line := strings.Repeat("x 1\n", 1<<14); ; {
			if _, err := io.WriteString(w, line); err != nil {
				return
			}
		}
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	defer close(stop)

	for _, address := range []string{server.URL, server.URL + "/", server.URL + "/metrics"} {
		got, err := (&DCGM{URL: address, Timeout: testLimit}).Query(t.Context())
		if err != nil || len(got.GPUs) != 2 {
			t.Errorf("Query of %s = %v, %v, want two GPUs", address, got, err)
		}
	}
	for _, row := range []struct {
		name, url, want string
		timeout         time.Duration
	}{
		{"another page", server.URL + "/none", "has no GPU", testLimit},
		{"garbage", server.URL + "/garbage", "line 1 of its answer", testLimit},
		{"a page that is not there", server.URL + "/nowhere", "answers 404 Not Found", testLimit},
		{"an exporter that hangs", server.URL + "/hang", "no answer within 200 ms", 200 * time.Millisecond},
		{"a page without an end", server.URL + "/huge", "more than 8 MiB", testLimit},
		{"nobody there", "http://127.0.0.1:1", "refused", testLimit},
		{"no URL", "http://[", "its URL is not valid", testLimit},
	} {
		t.Run(row.name, func(t *testing.T) {
			got, err := (&DCGM{URL: row.url, Timeout: row.timeout}).Query(t.Context())
			_, failed := errors.AsType[*Failure](err)
			if !failed || !strings.Contains(err.Error(), row.want) {
				t.Errorf("Query() = %v, %v, want a *Failure with %q", got, err, row.want)
			}
		})
	}
}

func TestDCGMKeepsAPasswordToItself(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	for _, address := range []string{
		strings.Replace(server.URL, "://", "://me:sesame@", 1), "http://me:sesame@127.0.0.1:1", "http://me:sesame@[", "http://me:sesame@%zz",
	} {
		if _, err := (&DCGM{URL: address, Timeout: testLimit}).Query(t.Context()); err == nil || strings.Contains(err.Error(), "sesame") {
			t.Errorf("Query() = %v, want an error without the password", err)
		}
	}
}

func FuzzParseDCGM(f *testing.F) {
	f.Add(read(f, "testdata/dcgm.prom"))
	f.Add(read(f, "testdata/dcgm_mig.prom"))
	f.Add("DCGM_FI_DEV_FB_USED NaN\nDCGM_FI_DEV_FB_FREE{gpu=\"-1\",UUID=\"\"} -5\n")
	f.Add("# TYPE DCGM_FI_DEV_FB_USED histogram\nDCGM_FI_DEV_FB_USED_bucket{le=\"1\"} 2\n")
	f.Add("DCGM_FI_DEV_CLOCKS_EVENT_REASONS 1e300\n")
	f.Fuzz(func(t *testing.T, text string) {
		gpus, err := parseDCGM(text)
		if err == nil && len(gpus) == 0 {
			t.Error("no GPU and no error")
		}
		if _, err := json.Marshal(gpus); err != nil {
			t.Error(err)
		}
	})
}
