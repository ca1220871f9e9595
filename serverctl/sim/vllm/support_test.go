package vllm

import (
	"testing"

	"vllmtuner/serverctl/sim"
)

func profile(t testing.TB, name string) *sim.Profile {
	t.Helper()
	p, err := sim.LoadProfile(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
