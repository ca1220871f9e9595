// Package deploy holds the manifests that run a study on Kubernetes. It never talks to a cluster. The study file, not
// this package, decides how to measure.
package deploy

import "embed"

// Manifests holds the YAML files for `kubectl apply -k`: the Job, the ConfigMap with its study file, the volumes, and
// the kustomization. docs/kubernetes.md says what to change in them first.
//
//go:embed *.yaml
var Manifests embed.FS
