package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"vllmtuner/serverctl/exposition"
)

// maxMetrics is how many bytes of an exporter's page are read. Sixteen GPUs with all profiling fields take 200 KiB.
const maxMetrics = 8 << 20

// DCGM queries NVIDIA's DCGM exporter, which runs on the nodes of most clusters. It sees every GPU of its node, even
// those of other containers: see Visible.
type DCGM struct {
	URL     string        // such as http://10.0.0.7:9400; /metrics is added where there is no path
	HTTP    *http.Client  // nil means a client without a proxy: the exporter is on our node
	Timeout time.Duration // limit for one answer; 0 means ten seconds
}

// Query reads the exporter's page. The values are as old as the exporter's interval, 30 s by default.
func (d *DCGM) Query(ctx context.Context) (Reading, error) {
	limit := cmp.Or(d.Timeout, queryLimit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errTimeout)
	defer cancel()
	text, err := d.page(ctx)
	if err == nil {
		var gpus []GPU
		if gpus, err = parseDCGM(text); err == nil {
			return Reading{At: time.Now(), GPUs: gpus}, nil
		}
	}
	switch cause := context.Cause(ctx); {
	case cause == errTimeout:
		err = fmt.Errorf("no answer within %v", limit)
	case cause != nil:
		return Reading{}, fmt.Errorf("ask the DCGM exporter: %w", cause)
	}
	return Reading{}, &Failure{
		Doing: "ask the DCGM exporter", Why: err.Error(), Remedy: "name the exporter of this node, such as http://NODE:9400/metrics",
	}
}

// page gets the exporter's text.
func (d *DCGM) page(ctx context.Context) (string, error) {
	address, err := url.Parse(d.URL)
	if err != nil {
		return "", errors.New("its URL is not valid") // the parser's own words would show a password
	}
	if address.Path == "" || address.Path == "/" {
		address.Path = "/metrics"
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address.String(), nil)
	if err != nil {
		return "", errors.New("its URL is not valid")
	}
	client := d.HTTP
	if client == nil {
		client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	}
	answer, err := client.Do(request)
	if err != nil {
		return "", err // net/http hides passwords
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s answers %s", address.Redacted(), answer.Status)
	}
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxMetrics+1))
	if err == nil && len(text) > maxMetrics {
		err = fmt.Errorf("%s answers more than %d MiB", address.Redacted(), maxMetrics>>20)
	}
	return string(text), err
}

// dcgmFields maps the names of dcgm_fields.h to our fields. Memory is in MiB, power in W, clocks in MHz.
var dcgmFields = map[string]func(*GPU) **float64{
	"DCGM_FI_DEV_FB_TOTAL":               func(g *GPU) **float64 { return &g.TotalMiB },
	"DCGM_FI_DEV_FB_USED":                func(g *GPU) **float64 { return &g.UsedMiB },
	"DCGM_FI_DEV_FB_FREE":                func(g *GPU) **float64 { return &g.FreeMiB },
	"DCGM_FI_DEV_GPU_UTIL":               func(g *GPU) **float64 { return &g.Utilization },
	"DCGM_FI_DEV_POWER_USAGE":            func(g *GPU) **float64 { return &g.PowerW },
	"DCGM_FI_DEV_POWER_MGMT_LIMIT":       func(g *GPU) **float64 { return &g.PowerLimitW },
	"DCGM_FI_DEV_SM_CLOCK":               func(g *GPU) **float64 { return &g.SMClockMHz },
	"DCGM_FI_DEV_MEM_CLOCK":              func(g *GPU) **float64 { return &g.MemoryClockMHz },
	"DCGM_FI_DEV_GPU_TEMP":               func(g *GPU) **float64 { return &g.TemperatureC },
	dcgmReserved:                         nil,
	"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": nil, // up to DCGM 3.2
	"DCGM_FI_DEV_CLOCKS_EVENT_REASONS":   nil, // the same mask since
}

// dcgmReserved is the memory that the driver keeps. Reserved, used and free make up the total.
const dcgmReserved = "DCGM_FI_DEV_FB_RESERVED"

// dcgmBlank is the lowest value that stands for "no value" (DCGM_INT32_BLANK in dcgm_structs.h; those of 64 bits and
// of floating point are higher). The exporter omits most of them.
const dcgmBlank = 0x7ffffff0

// parseDCGM parses the exporter's text. A device that MIG has divided shows each of its instances.
func parseDCGM(text string) ([]GPU, error) {
	samples, err := exposition.Parse(text)
	if err != nil {
		return nil, err
	}
	gpus, reserved := map[string]*GPU{}, map[string]float64{}
	for _, s := range samples {
		of, known := dcgmFields[s.Name]
		if !known {
			continue
		}
		key := s.Labels["gpu"] + " " + s.Labels["UUID"] + " " + s.Labels["GPU_I_ID"]
		g := gpus[key]
		if g == nil {
			g = device(s.Labels)
			gpus[key] = g
		}
		switch {
		case math.IsNaN(s.Value) || s.Value < 0 || s.Value >= dcgmBlank:
		case of != nil:
			*of(g) = &s.Value
		case s.Name == dcgmReserved:
			reserved[key] = s.Value
		default:
			g.Throttle = throttle(uint64(s.Value))
		}
	}
	if len(gpus) == 0 {
		return nil, errors.New("its answer has no GPU: no sample of DCGM_FI_DEV_FB_USED, DCGM_FI_DEV_GPU_UTIL or the like")
	}
	list := make([]GPU, 0, len(gpus))
	for _, key := range slices.Sorted(maps.Keys(gpus)) {
		g := gpus[key]
		if g.TotalMiB == nil && g.UsedMiB != nil && g.FreeMiB != nil {
			g.TotalMiB = new(*g.UsedMiB + *g.FreeMiB + reserved[key])
		}
		list = append(list, *g)
	}
	sortGPUs(list)
	return list, nil
}

// device returns a GPU with the labels of a sample. All samples of one GPU have the same labels.
func device(labels map[string]string) *GPU {
	g := &GPU{UUID: labels["UUID"], Name: labels["modelName"], Driver: labels["DCGM_FI_DRIVER_VERSION"]}
	if n, err := strconv.Atoi(labels["gpu"]); err == nil && n >= 0 {
		g.Index = n
	}
	if profile := labels["GPU_I_PROFILE"]; profile != "" {
		g.MIG = fmt.Sprintf("%s #%s", profile, labels["GPU_I_ID"])
	}
	return g
}
