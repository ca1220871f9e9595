package agent

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestImageIsFoundWithoutItsTag(t *testing.T) {
	a := &Agent{Images: map[string]Image{"registry.test:5000/tuner": {Dir: "any"}, "vllm:v1": {Dir: "v1"}}}
	for name, want := range map[string]string{
		"registry.test:5000/tuner":                      "any",
		"registry.test:5000/tuner:v1":                   "any",
		"registry.test:5000/tuner:v1@sha256:0123456789": "any",
		"registry.test/tuner:v1":                        "",
		"vllm:v1":                                       "v1",
		"vllm:v2":                                       "",
	} {
		if got := a.image(name).Dir; got != want {
			t.Errorf("image(%q) has the files of %q, want %q", name, got, want)
		}
	}
}

func TestReadImage(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadImage(dir); err == nil {
		t.Error("a directory without rootfs is an image")
	}
	if err := os.Mkdir(filepath.Join(dir, "rootfs"), 0o755); err != nil {
		t.Fatal(err)
	}
	if image, err := ReadImage(dir); err != nil || image.User != 0 {
		t.Errorf("ReadImage without config.json = %+v, %v", image, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"User": 65532, "Entrypoint": ["/tuner"]}`), 0o644); err != nil {
		t.Fatal(err)
	}
	if image, err := ReadImage(dir); err != nil || image.User != 65532 || !slices.Equal(image.Entrypoint, []string{"/tuner"}) {
		t.Errorf("ReadImage = %+v, %v", image, err)
	}
}

func TestRestarts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		policy corev1.RestartPolicy
		isInit bool
		code   int
		want   bool
	}{
		{"Never means never", corev1.RestartPolicyNever, false, 1, false},
		{"OnFailure leaves a success alone", corev1.RestartPolicyOnFailure, false, 0, false},
		{"OnFailure repeats a failure", corev1.RestartPolicyOnFailure, false, 1, true},
		{"Always repeats a success", corev1.RestartPolicyAlways, false, 0, true},
		{"an init container succeeds once", corev1.RestartPolicyAlways, true, 0, false},
		{"an init container fails again and again", corev1.RestartPolicyAlways, true, 1, true},
	} {
		c := corev1.Container{Name: "c"}
		pod := &corev1.Pod{Spec: corev1.PodSpec{RestartPolicy: tt.policy}}
		if tt.isInit {
			pod.Spec.InitContainers = []corev1.Container{c}
		}
		if got := restarts(pod, &c, tt.code); got != tt.want {
			t.Errorf("%s: restarts = %v", tt.name, got)
		}
	}
}

func TestCapabilities(t *testing.T) {
	for _, tt := range []struct {
		name     string
		security corev1.SecurityContext
		number   int // how many are left
		kill     bool
	}{
		{"the defaults of containerd", corev1.SecurityContext{}, 14, true},
		{"none", corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}, 0, false},
		{"one is dropped", corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"KILL"}}}, 13, false},
		{"one is kept", corev1.SecurityContext{Capabilities: &corev1.Capabilities{
			Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"CAP_KILL"},
		}}, 1, true},
		{"privileged", corev1.SecurityContext{Privileged: new(true)}, 41, true},
	} {
		got := capabilities(&tt.security)
		if len(got) != tt.number || slices.Contains(got, "CAP_KILL") != tt.kill {
			t.Errorf("%s: capabilities = %q", tt.name, got)
		}
	}
}

func TestLastLines(t *testing.T) {
	for _, tt := range []struct {
		text  string
		limit int
		want  string
	}{
		{"", 2, ""},
		{"a\n", 2, "a\n"},
		{"a\nb\nc\n", 2, "b\nc\n"},
		{"a\nb\nc", 2, "b\nc"},
		{"a\n\n", 1, "\n"},
		{"a\nb\n", 0, ""},
	} {
		if got := string(lastLines([]byte(tt.text), tt.limit)); got != tt.want {
			t.Errorf("lastLines(%q, %d) = %q, want %q", tt.text, tt.limit, got, tt.want)
		}
	}
}
