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

	"vllmtuner/render"
	"vllmtuner/serverctl/exposition"
)

// maxMetrics is how many bytes of an exporter's page are read. Sixteen GPUs with all profiling fields take 200 KiB.
const maxMetrics = 8 << 20

// DCGM queries NVIDIA's DCGM exporter, which runs on the nodes of most clusters. It reports every GPU of its node, even
// the GPUs of other containers: see Visible.
type DCGM struct {
	URL     string        // such as http://10.0.0.7:9400; if it has no path, /metrics is added
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
		err = fmt.Errorf("no answer within %s", render.Took(limit))
	case cause != nil:
		return Reading{}, fmt.Errorf("query the DCGM exporter: %w", cause)
	}
	return Reading{}, &Failure{
		Doing: "query the DCGM exporter", Why: err.Error(), Remedy: "name the exporter of this node, such as http://NODE:9400/metrics",
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
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // no proxy is used, because the exporter is on our node
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
		err = fmt.Errorf("%s answers more than %s", address.Redacted(), render.Bytes(maxMetrics))
	}
	return string(text), err
}

// dcgmFigures maps the names of DCGM to the figures of a GPU.
var dcgmFigures = func() map[string]func(*GPU) **float64 {
	named := map[string]func(*GPU) **float64{}
	for _, f := range figures {
		named[f.dcgm] = f.of
	}
	return named
}()

const (
	// dcgmReserved names the metric of the memory that the driver keeps. Reserved, used and free memory make up the
	// total.
	dcgmReserved = "DCGM_FI_DEV_FB_RESERVED"
	// dcgmThrottle names the mask of throttle reasons up to DCGM 3.2, and dcgmEvents names it in later versions.
	dcgmThrottle, dcgmEvents = "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"
)

// dcgmBlank is the lowest value that stands for "no value" (DCGM_INT32_BLANK in dcgm_structs.h). The values that mean
// "no value" in 64-bit and floating-point fields are higher. The exporter omits most of them.
const dcgmBlank = 0x7ffffff0

// parseDCGM parses the exporter's text. For a device that MIG has divided, it returns each instance as a GPU.
func parseDCGM(text string) ([]GPU, error) {
	samples, err := exposition.Parse(text)
	if err != nil {
		return nil, err
	}
	gpus, reserved := map[string]*GPU{}, map[string]float64{}
	for _, s := range samples {
		of := dcgmFigures[s.Name]
		if of == nil && !slices.Contains([]string{dcgmReserved, dcgmThrottle, dcgmEvents}, s.Name) {
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
		g.MIG, g.Profile = fmt.Sprintf("%s #%s", profile, labels["GPU_I_ID"]), profile
	}
	return g
}
