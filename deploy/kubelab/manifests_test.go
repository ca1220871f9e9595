package kubelab

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// shipped is the directory of the project's manifests.
const shipped = ".."

// A site is a copy of the shipped manifests in which the names that docs/kubernetes.md lists are those of one test. All
// else is as shipped.
type site struct {
	namespace string
	product   string // GPU model of the node
	study     string // the study file
	dir       string
}

// These are names of a site.
const (
	tunerImage = "registry.test/tuner"
	vllmImage  = "vllm/vllm-openai" // without the tag, which changes with vLLM
	jobName    = "tune-llama70b"
	studyName  = "small" // in smallStudy
)

// newSite copies the manifests and changes the names in them.
func newSite(t *testing.T, namespace, study string) site {
	t.Helper()
	s := site{namespace: namespace, product: "NVIDIA-H200-" + namespace, study: study, dir: t.TempDir()}
	must(t, fs.WalkDir(os.DirFS(shipped), ".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case path == "kubelab":
			return fs.SkipDir
		case entry.IsDir() || filepath.Ext(path) != ".yaml":
			return nil
		}
		text, err := os.ReadFile(filepath.Join(shipped, path))
		if err == nil {
			writeFile(t, filepath.Join(s.dir, path), string(text))
		}
		return err
	}))
	s.change(t, "kustomization.yaml", "namespace: default", "namespace: "+namespace)
	s.change(t, "kustomization.yaml", "newName: registry.example.com/tuner", "newName: "+tunerImage)
	s.change(t, "volumes/kustomization.yaml", "namespace: default", "namespace: "+namespace)
	s.change(t, "volumes/volumes.yaml", "server: nfs.example.com", "server: nfs.test")
	s.change(t, "job.yaml", "nvidia.com/gpu.product: NVIDIA-H200", "nvidia.com/gpu.product: "+s.product)
	writeFile(t, filepath.Join(s.dir, "study.yaml"), study)
	return s
}

// change replaces a name in a manifest.
func (s site) change(t *testing.T, file, from, to string) {
	t.Helper()
	path := filepath.Join(s.dir, file)
	text, err := os.ReadFile(path)
	must(t, err)
	if !strings.Contains(string(text), from) {
		t.Fatalf("%s has no %q, which docs/kubernetes.md tells users to change", file, from)
	}
	writeFile(t, path, strings.ReplaceAll(string(text), from, to))
}

// makeNamespace makes the namespace of the site.
func (s site) makeNamespace(t *testing.T, c *Cluster) {
	t.Helper()
	_, err := c.Client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: s.namespace,
		// docs/kubernetes.md says that the namespace may enforce this standard.
		Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "baseline"},
	}}, metav1.CreateOptions{})
	must(t, err)
}

// apply starts the study as docs/kubernetes.md says.
func (s site) apply(t *testing.T, c *Cluster) {
	t.Helper()
	s.makeNamespace(t, c)
	c.Kubectl(t, "apply", "--validate=strict", "--warnings-as-errors", "-k", filepath.Join(s.dir, "volumes"))
	c.Kubectl(t, "apply", "--validate=strict", "--warnings-as-errors", "-k", s.dir)
}

// volume is the directory of the site's volume for studies, which stands in for the NFS export.
func (s site) volume(c *Cluster) string {
	return filepath.Join(c.Volumes, "tuner-studies."+s.namespace)
}

// testManifestsAreAccepted lets the API server check all manifests, as they are shipped and in a site.
func testManifestsAreAccepted(t *testing.T, c *Cluster) {
	s := newSite(t, "accepted", smallStudy)
	s.makeNamespace(t, c)
	borrowing := newSite(t, "borrowing", smallStudy)
	borrowing.makeNamespace(t, c)
	borrowing.change(t, "kustomization.yaml", "# components:\n#   - borrow\n", "components:\n  - borrow\n")
	for _, m := range []struct{ what, namespace, dir string }{
		{"as shipped", "default", shipped},
		{"in a namespace of its own", s.namespace, s.dir},
		{"borrowing a GPU", borrowing.namespace, borrowing.dir},
	} {
		texts := []string{
			c.Kubectl(t, "kustomize", m.dir),
			c.Kubectl(t, "kustomize", filepath.Join(m.dir, "volumes")),
		}
		reader, err := os.ReadFile(filepath.Join(m.dir, "reader/reader.yaml"))
		must(t, err)
		for _, text := range append(texts, string(reader)) {
			if warnings := c.DryRun(t, m.namespace, []byte(text)); len(warnings) > 0 {
				t.Errorf("the API server warns of the manifests %s: %q\n%s", m.what, warnings, text)
			}
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, []byte(text), 0o644))
}
