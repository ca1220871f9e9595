// Package deploy holds the manifests that run a study on Kubernetes. It never talks to a cluster. The study file, not
// this package, decides how to measure.
package deploy

import "embed"

// Manifests holds the YAML files for `kubectl apply -k`: the Job with its study file and, in the directory volumes, the
// volumes. The directory reader has a pod that prints results. docs/kubernetes.md says what to change in them first.
//
//go:embed *.yaml volumes/*.yaml reader/*.yaml borrow/*.yaml rights/*.yaml
var Manifests embed.FS
