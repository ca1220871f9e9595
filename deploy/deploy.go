// Package deploy holds the manifests that run a study on Kubernetes, and nothing that talks to a cluster.
// It never decides what is measured: that is the study file's.
package deploy

import "embed"

// Manifests are the objects of one study as plain YAML, ready for `kubectl apply -k`: the Job, the ConfigMap with
// its study file, the volumes, and the kustomization that joins them. docs/kubernetes.md says what to change first.
//
//go:embed *.yaml
var Manifests embed.FS
