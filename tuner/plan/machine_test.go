package plan

import (
	"testing"

	"vllmtuner/serverctl/gpu"
)

func TestGPUNamesLeaveOutTheNumberOfAnInstance(t *testing.T) {
	p := Machine{GPUs: []gpu.GPU{
		{Name: "NVIDIA A800", MIG: "2g.20gb #3", Profile: "2g.20gb"}, {Name: "NVIDIA A800", MIG: "2g.20gb #5", Profile: "2g.20gb"},
		{Name: "NVIDIA A800", MIG: "enabled"}, {Name: "NVIDIA H200"},
	}}
	if got, want := p.gpuNames(), "2 × NVIDIA A800, MIG 2g.20gb; 1 × NVIDIA A800, MIG enabled; 1 × NVIDIA H200"; got != want {
		t.Errorf("gpuNames() = %q, want %q", got, want)
	}
}
