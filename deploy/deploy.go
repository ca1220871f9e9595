// Package deploy holds the manifests that run a study on Kubernetes. It never talks to a cluster, and it decides nothing
// about the measurement: the study file does.
package deploy

import "embed"

// Manifests holds the YAML files for `kubectl apply -k`: the Job, the ConfigMap with its study file, the volumes, and the
// kustomization. Change them first as docs/kubernetes.md says.
//
//go:embed *.yaml
var Manifests embed.FS
