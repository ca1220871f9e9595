package deploy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
)

// decode reads the documents of a manifest as the API server does with fieldValidation=Strict. An unknown field, a
// field that is given twice, or a field name in the wrong case is an error.
func decode(text []byte) ([]runtime.Object, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(batchv1.AddToScheme(scheme), corev1.AddToScheme(scheme), rbacv1.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yamlutil.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	var objects []runtime.Object
	for {
		document, err := documents.Read()
		if err == io.EOF {
			return objects, nil
		}
		if err != nil {
			return nil, err
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", len(objects)+1, err)
		}
		objects = append(objects, object)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// read decodes a file of Manifests.
func read(t *testing.T, name string) []runtime.Object {
	t.Helper()
	text, err := Manifests.ReadFile(name)
	must(t, err)
	objects, err := decode(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return objects
}

// theJob returns the only Job of the manifests.
func theJob(t *testing.T) *batchv1.Job {
	t.Helper()
	job, ok := read(t, "job.yaml")[0].(*batchv1.Job)
	if !ok {
		t.Fatal("job.yaml holds no Job")
	}
	return job
}

// named returns the manifest's objects of type T in a map, with their names as keys.
func named[T runtime.Object](t *testing.T, file string) map[string]T {
	t.Helper()
	found := make(map[string]T)
	for _, object := range read(t, file) {
		if typed, ok := object.(T); ok {
			accessor, err := meta.Accessor(object)
			must(t, err)
			found[accessor.GetName()] = typed
		}
	}
	return found
}

func TestDecodeIsStrict(t *testing.T) {
	const head = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\n"
	for name, text := range map[string]string{
		"an unknown field":            head + "spec: {template: {spec: {restartpolicyy: Never}}}\n",
		"a field in the wrong case":   head + "spec: {template: {spec: {restartpolicy: Never}}}\n",
		"a field written twice":       head + "spec: {backoffLimit: 1, backoffLimit: 2}\n",
		"a number where text belongs": head + "spec: {template: {spec: {nodeSelector: {a: 1}}}}\n",
		"an unknown kind":             "apiVersion: batch/v1\nkind: Jop\nmetadata: {name: x}\n",
	} {
		if _, err := decode([]byte(text)); err == nil {
			t.Errorf("%s: decoded without an error", name)
		}
	}
}

// A kustomization has the fields of a kustomization.yaml that the tests need.
type kustomization struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Namespace  string   `json:"namespace"`
	Resources  []string `json:"resources"`
	Images     []struct {
		Name string `json:"name"`
	} `json:"images"`
	ConfigMapGenerator []struct {
		Name  string   `json:"name"`
		Files []string `json:"files"`
	} `json:"configMapGenerator"`
}

func readKustomization(t *testing.T, name string) (k kustomization) {
	t.Helper()
	text, err := Manifests.ReadFile(name)
	must(t, err)
	must(t, yaml.Unmarshal(text, &k))
	if kind := k.APIVersion + " " + k.Kind; kind != "kustomize.config.k8s.io/v1beta1 Kustomization" && kind != "kustomize.config.k8s.io/v1alpha1 Component" {
		t.Errorf("%s is a %s", name, kind)
	}
	return k
}

// theKustomization returns the kustomization of the Job.
func theKustomization(t *testing.T) kustomization {
	t.Helper()
	k := readKustomization(t, "kustomization.yaml")
	if len(k.ConfigMapGenerator) != 1 {
		t.Fatalf("kustomization.yaml makes %d ConfigMaps, want 1", len(k.ConfigMapGenerator))
	}
	return k
}

func TestKustomizationsListEveryManifest(t *testing.T) {
	k, v := theKustomization(t), readKustomization(t, "volumes/kustomization.yaml")
	if k.Namespace == "" || k.Namespace != v.Namespace {
		t.Errorf("the Job is in namespace %q, its volumes in %q", k.Namespace, v.Namespace)
	}
	listed := slices.Concat(k.Resources, k.ConfigMapGenerator[0].Files, []string{"kustomization.yaml", "volumes/kustomization.yaml", readerFile})
	for _, name := range v.Resources {
		listed = append(listed, "volumes/"+name)
	}
	for _, dir := range []string{"borrow/", "rights/"} {
		listed = append(listed, dir+"kustomization.yaml")
		for _, name := range readKustomization(t, dir+"kustomization.yaml").Resources {
			listed = append(listed, dir+name)
		}
	}
	if r := readKustomization(t, "rights/kustomization.yaml"); r.Namespace != k.Namespace {
		t.Errorf("the Job is in namespace %q, the guard's rights in %q", k.Namespace, r.Namespace)
	}
	var files []string
	must(t, fs.WalkDir(Manifests, ".", func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			files = append(files, path)
		}
		return err
	}))
	slices.Sort(listed)
	slices.Sort(files)
	if !slices.Equal(listed, files) {
		t.Errorf("the kustomizations list %q, want every manifest: %q", listed, files)
	}

	pod := theJob(t).Spec.Template.Spec
	for _, container := range append(pod.InitContainers, pod.Containers...) {
		name, _, _ := strings.Cut(container.Image, ":")
		if !slices.ContainsFunc(k.Images, func(i struct {
			Name string `json:"name"`
		}) bool {
			return i.Name == name
		}) {
			t.Errorf("container %s has image %s, but kustomization.yaml has no line to rename it", container.Name, name)
		}
	}
}

const volumesFile, readerFile = "volumes/volumes.yaml", "reader/reader.yaml"

func TestVolumesAreMountedHard(t *testing.T) {
	volumes := named[*corev1.PersistentVolume](t, volumesFile)
	claims := named[*corev1.PersistentVolumeClaim](t, volumesFile)
	if len(volumes) != 3 || len(claims) != 3 {
		t.Fatalf(volumesFile+" holds %d volumes and %d claims, want 3 of each", len(volumes), len(claims))
	}
	for name, claim := range claims {
		volume := volumes[claim.Spec.VolumeName]
		if volume == nil {
			t.Errorf("claim %s binds %q, which %s does not hold", name, claim.Spec.VolumeName, volumesFile)
			continue
		}
		for _, option := range []string{"hard", "nfsvers=4.1", "timeo=600", "retrans=2"} {
			if !slices.Contains(volume.Spec.MountOptions, option) {
				t.Errorf("volume %s is mounted with %q, want %s among them", name, volume.Spec.MountOptions, option)
			}
		}
		if volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain {
			t.Errorf("volume %s is not retained when its claim is deleted", name)
		}
		if !slices.Equal(volume.Spec.AccessModes, claim.Spec.AccessModes) {
			t.Errorf("claim %s asks for %v, but its volume gives %v", name, claim.Spec.AccessModes, volume.Spec.AccessModes)
		}
		if claim.Spec.StorageClassName == nil || *claim.Spec.StorageClassName != "" {
			t.Errorf("claim %s has no empty storage class, so a default class may make a volume for it", name)
		}
	}
	if got := claims["tuner-studies"].Spec.AccessModes; !slices.Contains(got, corev1.ReadWriteMany) {
		t.Errorf("tuner-studies has the access modes %v, want ReadWriteMany", got)
	}
}
