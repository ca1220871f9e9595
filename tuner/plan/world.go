package plan

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/foreign"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/studies"
	"vllmtuner/tuner/studyfile"
)

// imageVariable is the environment variable with the name of the container image. A container cannot find out this name
// itself.
const imageVariable = "TUNER_IMAGE"

// Dataset is the key of the dataset's hash in a World.
const Dataset = "dataset sha256"

// Begin returns the settings that a new study stores, and that a continued study must match. Call it after
// CheckMachine, which finds the GPUs.
func (p *Plan) Begin(version string) (studies.New, error) {
	world, err := p.World()
	if err != nil {
		return studies.New{}, err
	}
	study := studies.New{
		Name: p.File.Name, Seed: p.File.Sampler.Seed, File: p.File.Text, World: world, Final: []string{studyfile.SLOKey},
		Found: map[string]string{}, Noted: map[string]string{"tuner": version},
	}
	if host, err := os.Hostname(); err == nil {
		study.Noted["host"] = host
	}
	if image := os.Getenv(imageVariable); image != "" {
		study.Found["image"] = image
	}
	if len(p.GPUs) > 0 {
		study.Found["gpu"] = p.gpuNames()
		study.Noted["driver"] = p.GPUs[0].Driver
	}
	return study, nil
}

// gpuNames returns the kinds and numbers of the GPUs that the server will use, such as "2 × NVIDIA H200". It leaves out
// their indexes, because two GPUs of one kind count as equal.
func (p *Plan) gpuNames() string {
	counts := lo.CountValuesBy(p.GPUs, func(g gpu.GPU) string {
		if g.MIG == "" {
			return g.Name
		}
		return g.Name + ", MIG " + cmp.Or(g.Profile, g.MIG)
	})
	var names []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		names = append(names, fmt.Sprintf("%d × %s", counts[name], name))
	}
	return strings.Join(names, "; ")
}

// World returns what must not change during the study: settings of the file and a hash of the dataset.
func (p *Plan) World() (map[string]string, error) {
	world := p.File.World()
	path := p.File.WorkloadSpec().Path
	if path == "" {
		return world, nil
	}
	f, err := foreign.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return nil, fmt.Errorf("read the dataset: %w", err)
	}
	world[Dataset] = hex.EncodeToString(hash.Sum(nil))
	return world, nil
}
