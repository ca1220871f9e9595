package deploy

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// mounts returns the container's mounts in a map, with the names of their volumes as keys.
func mounts(container corev1.Container) map[string]corev1.VolumeMount {
	return lo.KeyBy(container.VolumeMounts, func(mount corev1.VolumeMount) string { return mount.Name })
}

// volumes returns the pod's volumes in a map, with their names as keys.
func volumes(pod corev1.PodSpec) map[string]corev1.Volume {
	return lo.KeyBy(pod.Volumes, func(volume corev1.Volume) string { return volume.Name })
}

func TestJobRetriesOnlyWhatARetryCanFix(t *testing.T) {
	spec := theJob(t).Spec
	if got := spec.Template.Spec.RestartPolicy; got != corev1.RestartPolicyNever {
		t.Errorf("restartPolicy is %s; a podFailurePolicy demands Never", got)
	}
	if spec.PodReplacementPolicy == nil || *spec.PodReplacementPolicy != batchv1.Failed {
		t.Error("podReplacementPolicy is not Failed: two pods could own the study at the same time")
	}
	if spec.BackoffLimit == nil || *spec.BackoffLimit == 0 {
		t.Error("backoffLimit gives an interrupted study no second try")
	}
	if spec.PodFailurePolicy == nil || len(spec.PodFailurePolicy.Rules) != 2 {
		t.Fatal("want two rules in podFailurePolicy")
	}
	disrupted, hopeless := spec.PodFailurePolicy.Rules[0], spec.PodFailurePolicy.Rules[1]
	if disrupted.Action != batchv1.PodFailurePolicyActionIgnore || len(disrupted.OnPodConditions) != 1 ||
		disrupted.OnPodConditions[0].Type != corev1.DisruptionTarget ||
		disrupted.OnPodConditions[0].Status != corev1.ConditionTrue {
		t.Errorf("the first rule is %+v, want it to ignore disruptions", disrupted)
	}
	codes := hopeless.OnExitCodes
	if hopeless.Action != batchv1.PodFailurePolicyActionFailJob || codes == nil ||
		codes.Operator != batchv1.PodFailurePolicyOnExitCodesOpIn || !slices.Equal(codes.Values, []int32{2, 6}) {
		t.Errorf("the second rule is %+v, want it to fail the Job on exit codes 2 and 6", hopeless)
	} else if *codes.ContainerName != spec.Template.Spec.Containers[0].Name {
		t.Errorf("the second rule names container %q, which the pod does not have", *codes.ContainerName)
	}
}

func TestPodOwnsOneGPUWithCoresForItsLoad(t *testing.T) {
	pod := theJob(t).Spec.Template.Spec
	if len(pod.Containers) != 1 {
		t.Fatalf("the pod has %d containers, want 1", len(pod.Containers))
	}
	resources := pod.Containers[0].Resources
	if gpus := resources.Limits["nvidia.com/gpu"]; gpus.Value() != 1 {
		t.Errorf("the pod has %s GPUs, want 1", gpus.String())
	}
	// vLLM needs 2 CPUs and 1 for each GPU. The load generator needs 2.
	if cpus := resources.Requests.Cpu(); cpus.Value() < 5 {
		t.Errorf("the pod requests %s CPUs, want at least 5", cpus)
	}
	for _, container := range append(pod.InitContainers, pod.Containers...) {
		for name, request := range container.Resources.Requests {
			if limit := container.Resources.Limits[name]; limit.Cmp(request) != 0 {
				t.Errorf("%s requests %s %s but is limited to %s: the pod is not Guaranteed",
					container.Name, request.String(), name, limit.String())
			}
		}
	}

	shm := volumes(pod)["shm"].EmptyDir
	if mounts(pod.Containers[0])["shm"].MountPath != "/dev/shm" || shm == nil || shm.Medium != corev1.StorageMediumMemory {
		t.Fatalf("/dev/shm is not held in memory: %+v", shm)
	}
	if minimum := resource.MustParse("1Gi"); shm.SizeLimit == nil || shm.SizeLimit.Cmp(minimum) < 0 {
		t.Errorf("/dev/shm has the size limit %s, want at least %s", shm.SizeLimit, &minimum)
	}
}

func TestPodHasNoRightItDoesNotNeed(t *testing.T) {
	pod := theJob(t).Spec.Template.Spec
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("the pod gets a token of the API server")
	}
	if pod.EnableServiceLinks == nil || *pod.EnableServiceLinks {
		t.Error("the pod gets a Service's VLLM_PORT")
	}
	if pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Error("the pod has no seccomp profile")
	}
	if pod.HostIPC || pod.HostPID || pod.HostNetwork {
		t.Error("the pod shares a namespace with its node")
	}
	for _, container := range append(pod.InitContainers, pod.Containers...) {
		security := container.SecurityContext
		if security.AllowPrivilegeEscalation == nil || *security.AllowPrivilegeEscalation {
			t.Errorf("%s may gain privileges", container.Name)
		}
		if !slices.Equal(security.Capabilities.Drop, []corev1.Capability{"ALL"}) || security.Capabilities.Add != nil {
			t.Errorf("%s keeps capabilities", container.Name)
		}
	}
	writable := []string{"studies", "shm"}
	for name, mount := range mounts(pod.Containers[0]) {
		if mount.ReadOnly == slices.Contains(writable, name) {
			t.Errorf("%s is mounted with readOnly %v", name, mount.ReadOnly)
		}
	}
	annotations := theJob(t).Spec.Template.Annotations
	for name, want := range map[string]string{
		"cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
		"karpenter.sh/do-not-disrupt":                    "true",
		"sidecar.istio.io/inject":                        "false",
	} {
		if annotations[name] != want {
			t.Errorf("annotation %s is %q, want %q", name, annotations[name], want)
		}
	}
}

func TestPodHasTimeToEndAndALivenessProbe(t *testing.T) {
	pod := theJob(t).Spec.Template.Spec
	if grace := pod.TerminationGracePeriodSeconds; grace == nil || *grace < 600 {
		t.Error("the tuner has less than 600 s to finish a probe, end vLLM and close the study")
	}
	container := pod.Containers[0]
	probe := container.LivenessProbe
	if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != "/healthz" {
		t.Fatalf("the liveness probe is %+v, want /healthz", probe)
	}
	if container.Ports[0].Name != probe.HTTPGet.Port.String() {
		t.Errorf("the liveness probe uses port %s, which the container does not name", probe.HTTPGet.Port.String())
	}
	listen := container.Args[slices.Index(container.Args, "--listen")+1]
	if want := "0.0.0.0:9090"; listen != want || container.Ports[0].ContainerPort != 9090 {
		t.Errorf("the tuner listens on %s, the port is %d, want %s", listen, container.Ports[0].ContainerPort, want)
	}
	if deadline := theJob(t).Spec.ActiveDeadlineSeconds; deadline == nil ||
		time.Duration(*deadline)*time.Second < 24*time.Hour {
		t.Error("the Job ends before the study has spent its budget")
	}
}

// TestTheBinaryComesFromTheImage checks that the binary gets from the image, through the init container, to the path in
// the pod's command.
func TestTheBinaryComesFromTheImage(t *testing.T) {
	dockerfile, err := os.ReadFile("../Dockerfile")
	must(t, err)
	pod := theJob(t).Spec.Template.Spec
	install, run := pod.InitContainers[0], pod.Containers[0]
	if len(install.Command) != 3 {
		t.Fatalf("the init container runs %q, want a copy of one file", install.Command)
	}
	for _, file := range install.Command[:2] {
		if !regexp.MustCompile(`(?m)^COPY --from=\S+ \S+ ` + regexp.QuoteMeta(file) + `$`).Match(dockerfile) {
			t.Errorf("the init container needs %s, which the Dockerfile does not put into the image", file)
		}
	}
	from, to := mounts(install)["tuner"], mounts(run)["tuner"]
	target := install.Command[2]
	if path.Dir(target) != from.MountPath {
		t.Errorf("the init container copies to %s, but its volume is at %s", target, from.MountPath)
	}
	if got, want := run.Command[0], path.Join(to.MountPath, path.Base(target)); got != want {
		t.Errorf("the main container runs %s, but the binary is at %s", got, want)
	}
	if volumes(pod)["tuner"].EmptyDir == nil {
		t.Error("the binary's volume is not an emptyDir")
	}
	if !strings.HasPrefix(run.Image, "vllm/vllm-openai:v") {
		t.Errorf("the main container runs in %s, want vLLM's own image with its version", run.Image)
	}
}

func TestEveryVolumeOfTheJobExists(t *testing.T) {
	pod := theJob(t).Spec.Template.Spec
	have := volumes(pod)
	for _, container := range append(pod.InitContainers, pod.Containers...) {
		for name := range mounts(container) {
			if _, ok := have[name]; !ok {
				t.Errorf("%s mounts %s, which the pod does not define", container.Name, name)
			}
		}
	}
	claims := named[*corev1.PersistentVolumeClaim](t, volumesFile)
	study := theKustomization(t).ConfigMapGenerator[0].Name
	for name, volume := range have {
		if claim := volume.PersistentVolumeClaim; claim != nil && claims[claim.ClaimName] == nil {
			t.Errorf("volume %s wants the claim %s, which %s does not hold", name, claim.ClaimName, volumesFile)
		}
		if config := volume.ConfigMap; config != nil && config.Name != study {
			t.Errorf("volume %s wants the ConfigMap %s, but the kustomization makes %s", name, config.Name, study)
		}
	}
}

// The study records the image in which its server runs.
func TestTheStudyKnowsItsImage(t *testing.T) {
	container := theJob(t).Spec.Template.Spec.Containers[0]
	image := lo.FindOrElse(container.Env, corev1.EnvVar{}, func(v corev1.EnvVar) bool { return v.Name == "TUNER_IMAGE" })
	if image.Value != container.Image {
		t.Errorf("TUNER_IMAGE is %q, the container's image %q", image.Value, container.Image)
	}
}

// The reader has the study's user, image and claim, and no way to write.
func TestTheReaderOnlyReads(t *testing.T) {
	reader, ok := read(t, readerFile)[0].(*corev1.Pod)
	if !ok || len(reader.Spec.Containers) != 1 {
		t.Fatalf("%s holds no pod with one container", readerFile)
	}
	job, container := theJob(t).Spec.Template.Spec, reader.Spec.Containers[0]
	claim := volumes(reader.Spec)["studies"].PersistentVolumeClaim
	if claim == nil || claim.ClaimName != volumes(job)["studies"].PersistentVolumeClaim.ClaimName || !claim.ReadOnly || !mounts(container)["studies"].ReadOnly {
		t.Errorf("the reader mounts %+v, want the claim of the studies, read-only", claim)
	}
	if container.Image != job.InitContainers[0].Image {
		t.Errorf("the reader has image %s, the Job takes the tuner from %s", container.Image, job.InitContainers[0].Image)
	}
	s := container.SecurityContext
	if *reader.Spec.AutomountServiceAccountToken || *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("the reader has rights that it does not need: %+v", s)
	}
}
