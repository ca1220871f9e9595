package deploy

import (
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/tuner/studyfile"
)

// TestTheStudyFitsItsPod compares the study file with the Job.
func TestTheStudyFitsItsPod(t *testing.T) {
	job := theJob(t)
	pod := job.Spec.Template.Spec
	container := pod.Containers[0]
	inPod := mounts(container)

	path := container.Args[len(container.Args)-1]
	key, ok := strings.CutPrefix(path, inPod["study"].MountPath+"/")
	if !ok {
		t.Fatalf("the tuner runs %s, but the study file is mounted at %s", path, inPod["study"].MountPath)
	}
	if files := theKustomization(t).ConfigMapGenerator[0].Files; !slices.Equal(files, []string{key}) {
		t.Fatalf("the tuner runs %s, but the ConfigMap holds %q", path, files)
	}
	text, err := Manifests.ReadFile(key)
	must(t, err)
	study, err := studyfile.Parse(path, text)
	must(t, err)

	if job.Name != "tune-"+study.Name {
		t.Errorf("the Job is called %s, but its study %s", job.Name, study.Name)
	}
	if !strings.HasPrefix(study.Model, inPod["models"].MountPath+"/") {
		t.Errorf("the model %s is not on the volume at %s", study.Model, inPod["models"].MountPath)
	}
	if !strings.HasPrefix(study.Workload.Path, inPod["datasets"].MountPath+"/") {
		t.Errorf("the dataset %s is not on the volume at %s", study.Workload.Path, inPod["datasets"].MountPath)
	}
	grace := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second
	if study.Server.StopTimeout >= grace {
		t.Errorf("vLLM may take %v to stop, but the pod must end within %v", study.Server.StopTimeout, grace)
	}
	deadline := time.Duration(*job.Spec.ActiveDeadlineSeconds) * time.Second
	if study.Budget.GPUTime >= deadline {
		t.Errorf("the study may use %v of GPU time, but the Job ends after %v", study.Budget.GPUTime, deadline)
	}
}
