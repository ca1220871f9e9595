package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"vllmtuner/deploy/kubelab/container"
)

// A volume is a file or directory of this machine that containers of a pod mount.
type volume struct {
	path     string
	readOnly bool
}

// volumes are a pod's volumes by their names.
type volumes map[string]volume

// prepare makes the pod's volumes, and its network if it has one of its own. It tries until others have made what the
// volumes need, such as a ConfigMap. An earlier life of the agent may have made some of them.
func (w *worker) prepare(ctx context.Context, pod *corev1.Pod) (volumes, error) {
	if err := os.MkdirAll(filepath.Join(w.dir, "volumes"), 0o755); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(w.networkDir(), 0o755); err != nil {
		return nil, err
	}
	if w.Isolated && !isMounted(w.networkFile(), unix.NSFS_MAGIC) {
		if err := container.MakeNetwork(w.networkFile()); err != nil {
			return nil, err
		}
	}
	made := volumes{}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		for {
			prepared, err := w.volume(ctx, pod, v)
			if err == nil {
				made[v.Name] = prepared
				break
			}
			if ctx.Err() == nil {
				w.tell(pod, corev1.EventTypeWarning, eventFailedMount, fmt.Sprintf("MountVolume.SetUp failed for volume %q : %v", v.Name, err))
			}
			if !pause(w.alive, retryAfter) {
				return nil, context.Cause(w.alive)
			}
		}
	}
	return made, nil
}

func (w *worker) networkDir() string  { return filepath.Join(w.dir, "network") }
func (w *worker) networkFile() string { return filepath.Join(w.networkDir(), "net") }

// volume makes one volume.
func (w *worker) volume(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) (volume, error) {
	dir := filepath.Join(w.dir, "volumes", v.Name)
	switch {
	case v.EmptyDir != nil:
		return volume{path: dir}, makeEmptyDir(dir, v.EmptyDir)
	case v.HostPath != nil:
		return volume{path: v.HostPath.Path}, makeHostPath(v.HostPath)
	case v.PersistentVolumeClaim != nil:
		return w.claimed(ctx, pod.Namespace, v.PersistentVolumeClaim)
	}
	if _, err := os.Stat(dir); err == nil {
		return volume{path: dir, readOnly: true}, nil // an earlier life of the agent has written the files
	}
	files, err := w.files(ctx, pod, v)
	if err != nil {
		return volume{}, err
	}
	return volume{path: dir, readOnly: true}, writeFiles(dir, files)
}

// claimed returns the directory of the PersistentVolume to which a claim is bound. Every node that has the same
// directory for volumes sees the same files, as with NFS.
func (w *worker) claimed(ctx context.Context, namespace string, source *corev1.PersistentVolumeClaimVolumeSource) (volume, error) {
	claim, err := w.kube.CoreV1().PersistentVolumeClaims(namespace).Get(ctx, source.ClaimName, metav1.GetOptions{})
	if err != nil {
		return volume{}, err
	}
	if claim.Status.Phase != corev1.ClaimBound {
		return volume{}, fmt.Errorf("the claim %s is not bound", claim.Name)
	}
	v, err := w.kube.CoreV1().PersistentVolumes().Get(ctx, claim.Spec.VolumeName, metav1.GetOptions{})
	if err != nil {
		return volume{}, err
	}
	readOnly := source.ReadOnly || slices.Contains(v.Spec.MountOptions, "ro") || v.Spec.NFS != nil && v.Spec.NFS.ReadOnly
	dir := filepath.Join(w.Volumes, v.Name)
	return volume{path: dir, readOnly: readOnly}, os.MkdirAll(dir, 0o755)
}

// makeEmptyDir makes a directory, or a tmpfs, for everybody.
func makeEmptyDir(dir string, source *corev1.EmptyDirVolumeSource) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	if source.Medium != corev1.StorageMediumMemory {
		return os.Chmod(dir, 0o777) // the umask has taken some bits
	}
	if isMounted(dir, unix.TMPFS_MAGIC) {
		return nil
	}
	options := "mode=777"
	if source.SizeLimit != nil {
		options += fmt.Sprintf(",size=%d", source.SizeLimit.Value())
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	return nil
}

// isMounted reports whether a file system of the kind is mounted at path. The directory around it must not be of this
// kind itself, so that looks at the device too.
func isMounted(path string, kind int64) bool {
	var fs unix.Statfs_t
	var at, above unix.Stat_t
	return unix.Statfs(path, &fs) == nil && fs.Type == kind &&
		unix.Stat(path, &at) == nil && unix.Stat(filepath.Dir(path), &above) == nil && at.Dev != above.Dev
}

func makeHostPath(source *corev1.HostPathVolumeSource) error {
	if source.Type != nil && *source.Type == corev1.HostPathDirectoryOrCreate {
		return os.MkdirAll(source.Path, 0o755)
	}
	_, err := os.Stat(source.Path)
	return err
}

// removePodDir removes what prepare and the containers of a pod have left.
func removePodDir(dir string) error {
	mounts, err := filepath.Glob(filepath.Join(dir, "volumes", "*"))
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if isMounted(m, unix.TMPFS_MAGIC) {
			err = errors.Join(err, unix.Unmount(m, 0))
		}
	}
	if network := filepath.Join(dir, "network", "net"); isMounted(network, unix.NSFS_MAGIC) {
		err = errors.Join(err, container.RemoveNetwork(network))
	}
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}
