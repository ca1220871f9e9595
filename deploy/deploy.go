// Package deploy holds the manifests that run a study on Kubernetes.
package deploy
