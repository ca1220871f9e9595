package plan

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/tuner/studyfile"
)

// imageVariable is the environment variable with the name of the container image. A container cannot find out this name
// itself.
const imageVariable = "TUNER_IMAGE"

// Dataset is the key of the dataset's hash in a World.
const Dataset = "dataset sha256"

// Begin returns the settings that a new study stores, and that a continued study must match. Call it after
// Machine.Check, which finds the GPUs.
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
	if len(p.Machine.GPUs) > 0 {
		study.Found["gpu"] = p.Machine.gpuNames()
		study.Noted["driver"] = p.Machine.GPUs[0].Driver
	}
	return study, nil
}

// World returns what must not change during the study: settings of the study file and a hash of the dataset.
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
