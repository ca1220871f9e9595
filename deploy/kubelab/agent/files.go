package agent

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A file is one file of a volume whose content comes from the API. It is written once, when the pod starts.
type file struct {
	name string
	text []byte
	mode int32
}

// files returns the content of a volume that is made of objects of the API.
func (w *worker) files(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) ([]file, error) {
	switch {
	case v.ConfigMap != nil:
		data, err := w.configMap(ctx, pod.Namespace, v.ConfigMap.Name, v.ConfigMap.Optional)
		if err != nil {
			return nil, err
		}
		return choose(data, v.ConfigMap.Items, *v.ConfigMap.DefaultMode, v.ConfigMap.Optional)
	case v.Secret != nil:
		data, err := w.secret(ctx, pod.Namespace, v.Secret.SecretName, v.Secret.Optional)
		if err != nil {
			return nil, err
		}
		return choose(data, v.Secret.Items, *v.Secret.DefaultMode, v.Secret.Optional)
	case v.DownwardAPI != nil:
		return w.downward(pod, v.DownwardAPI.Items, *v.DownwardAPI.DefaultMode)
	case v.Projected != nil:
		var all []file
		for i := range v.Projected.Sources {
			some, err := w.projected(ctx, pod, &v.Projected.Sources[i], *v.Projected.DefaultMode)
			if err != nil {
				return nil, err
			}
			all = append(all, some...)
		}
		return all, nil
	}
	return nil, fmt.Errorf("volume %s is of a kind that kubelab does not support", v.Name)
}

func (w *worker) projected(ctx context.Context, pod *corev1.Pod, p *corev1.VolumeProjection, mode int32) ([]file, error) {
	switch {
	case p.ConfigMap != nil:
		data, err := w.configMap(ctx, pod.Namespace, p.ConfigMap.Name, p.ConfigMap.Optional)
		if err != nil {
			return nil, err
		}
		return choose(data, p.ConfigMap.Items, mode, p.ConfigMap.Optional)
	case p.Secret != nil:
		data, err := w.secret(ctx, pod.Namespace, p.Secret.Name, p.Secret.Optional)
		if err != nil {
			return nil, err
		}
		return choose(data, p.Secret.Items, mode, p.Secret.Optional)
	case p.DownwardAPI != nil:
		return w.downward(pod, p.DownwardAPI.Items, mode)
	case p.ServiceAccountToken != nil:
		token, err := w.token(ctx, pod, p.ServiceAccountToken)
		return []file{{p.ServiceAccountToken.Path, []byte(token), mode}}, err
	}
	return nil, fmt.Errorf("a projected volume has a source that kubelab does not support")
}

// token asks for a token that is bound to the pod. Nobody renews it.
func (w *worker) token(ctx context.Context, pod *corev1.Pod, p *corev1.ServiceAccountTokenProjection) (string, error) {
	request := authenticationv1.TokenRequestSpec{
		ExpirationSeconds: p.ExpirationSeconds,
		BoundObjectRef:    &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID},
	}
	if p.Audience != "" {
		request.Audiences = []string{p.Audience}
	}
	answer, err := w.kube.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, pod.Spec.ServiceAccountName,
		&authenticationv1.TokenRequest{Spec: request}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return answer.Status.Token, nil
}

func (a *Agent) configMap(ctx context.Context, namespace, name string, optional *bool) (map[string][]byte, error) {
	config, err := a.kube.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && isTrue(optional) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	data := maps.Clone(config.BinaryData)
	if data == nil {
		data = map[string][]byte{}
	}
	for key, text := range config.Data {
		data[key] = []byte(text)
	}
	return data, nil
}

func (a *Agent) secret(ctx context.Context, namespace, name string, optional *bool) (map[string][]byte, error) {
	secret, err := a.kube.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) && isTrue(optional) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return secret.Data, nil
}

// choose returns the files of a ConfigMap or a Secret: all of them, or those that items name.
func choose(data map[string][]byte, items []corev1.KeyToPath, mode int32, optional *bool) ([]file, error) {
	var files []file
	if len(items) == 0 {
		for _, key := range slices.Sorted(maps.Keys(data)) {
			files = append(files, file{key, data[key], mode})
		}
		return files, nil
	}
	for _, item := range items {
		text, ok := data[item.Key]
		if !ok && !isTrue(optional) {
			return nil, fmt.Errorf("references non-existent config key: %s", item.Key)
		}
		if ok {
			files = append(files, file{item.Path, text, *orDefault(item.Mode, &mode)})
		}
	}
	return files, nil
}

func (w *worker) downward(pod *corev1.Pod, items []corev1.DownwardAPIVolumeFile, mode int32) ([]file, error) {
	var files []file
	for _, item := range items {
		var text string
		var err error
		if item.FieldRef != nil {
			text, err = w.field(pod, item.FieldRef.FieldPath)
		} else {
			text, err = resourceField(pod, nil, item.ResourceFieldRef)
		}
		if err != nil {
			return nil, err
		}
		files = append(files, file{item.Path, []byte(text), *orDefault(item.Mode, &mode)})
	}
	return files, nil
}

// writeFiles makes a directory with the files. It appears as a whole, so a restarted agent finds all or nothing.
func writeFiles(dir string, files []file) error {
	unfinished := dir + ".new"
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	if err := os.MkdirAll(unfinished, 0o755); err != nil {
		return err
	}
	for _, f := range files {
		path := filepath.Join(unfinished, f.name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, f.text, os.FileMode(f.mode)); err != nil {
			return err
		}
	}
	return os.Rename(unfinished, dir)
}

func isTrue(b *bool) bool { return b != nil && *b }

// orDefault returns the first pointer unless it is nil.
func orDefault[T any](value, byDefault *T) *T {
	if value != nil {
		return value
	}
	return byDefault
}
