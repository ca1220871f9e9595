package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/tuner/studyfile"
)

// imageVariable is where a pod says what image its containers run: none can find that out by itself.
const imageVariable = "TUNER_IMAGE"

// begin is what the study begins with, or goes on with, on this machine, which was looked at before.
func (p *plan) begin(ctx context.Context) (studies.New, error) {
	world, err := p.world()
	if err != nil {
		return studies.New{}, err
	}
	study := studies.New{
		Name: p.file.Name, Seed: p.file.Sampler.Seed, File: p.file.Text, World: world, Final: []string{studyfile.SLOKey},
		Found: map[string]string{}, Noted: map[string]string{"tuner": version},
	}
	if host, err := os.Hostname(); err == nil {
		study.Noted["host"] = host
	}
	if image := os.Getenv(imageVariable); image != "" {
		study.Found["image"] = image
	}
	if len(p.gpus) > 0 {
		study.Found["gpu"] = p.gpuNames()
		study.Noted["driver"] = p.gpus[0].Driver
	}
	return study, ctx.Err()
}

// gpuNames says what GPUs the server will use, such as "2 × NVIDIA H200". Which ones of a kind they are does not matter.
func (p *plan) gpuNames() string {
	counts := map[string]int{}
	var names []string
	for _, g := range p.gpus {
		name := g.Name
		if g.MIG != "" {
			profile, _, _ := strings.Cut(g.MIG, " #")
			name += ", MIG " + profile
		}
		if counts[name]++; counts[name] == 1 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for i, name := range names {
		names[i] = fmt.Sprintf("%d × %s", counts[name], name)
	}
	return strings.Join(names, "; ")
}

// world is what must not change while the study goes on: what the file says, and what is in the dataset.
func (p *plan) world() (map[string]string, error) {
	world := p.file.World()
	path := p.file.WorkloadSpec().Path
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
	world["dataset sha256"] = hex.EncodeToString(hash.Sum(nil))
	return world, nil
}
