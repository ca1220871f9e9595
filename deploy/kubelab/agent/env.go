package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/api/v1/resource"
	"k8s.io/kubernetes/pkg/fieldpath"
	"k8s.io/kubernetes/third_party/forked/golang/expansion"
)

// environment returns the variables of a container. The later of two with the same name wins.
func (w *worker) environment(ctx context.Context, pod *corev1.Pod, c *corev1.Container, user int) (map[string]string, error) {
	env := map[string]string{
		"PATH":     "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME":     home(user),
		"HOSTNAME": pod.Name,
		// A pod always finds the API server, even if it wants no variables of other services.
		"KUBERNETES_SERVICE_HOST": w.api.Hostname(),
		"KUBERNETES_SERVICE_PORT": w.api.Port(),
	}
	for i := range c.EnvFrom {
		if err := w.addAll(ctx, env, pod, &c.EnvFrom[i]); err != nil {
			return nil, err
		}
	}
	for i := range c.Env {
		if err := w.add(ctx, env, pod, c, &c.Env[i]); err != nil {
			return nil, err
		}
	}
	return env, nil
}

func home(user int) string {
	if user == 0 {
		return "/root"
	}
	return "/"
}

// variables returns the environment as a program gets it.
func variables(env map[string]string) []string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(env)) {
		list = append(list, name+"="+env[name])
	}
	return list
}

// expand replaces $(NAME) in each text.
func expand(texts []string, env map[string]string) []string {
	expanded := make([]string, 0, len(texts))
	for _, text := range texts {
		expanded = append(expanded, expansion.Expand(text, expansion.MappingFuncFor(env)))
	}
	return expanded
}

// addAll adds all keys of a ConfigMap or a Secret.
func (w *worker) addAll(ctx context.Context, env map[string]string, pod *corev1.Pod, from *corev1.EnvFromSource) error {
	var data map[string][]byte
	var err error
	switch {
	case from.ConfigMapRef != nil:
		data, err = w.configMap(ctx, pod.Namespace, from.ConfigMapRef.Name, from.ConfigMapRef.Optional)
	case from.SecretRef != nil:
		data, err = w.secret(ctx, pod.Namespace, from.SecretRef.Name, from.SecretRef.Optional)
	}
	for key, text := range data {
		env[from.Prefix+key] = string(text)
	}
	return err
}

// add adds one variable.
func (w *worker) add(ctx context.Context, env map[string]string, pod *corev1.Pod, c *corev1.Container, v *corev1.EnvVar) error {
	from := v.ValueFrom
	if from == nil {
		env[v.Name] = expansion.Expand(v.Value, expansion.MappingFuncFor(env))
		return nil
	}
	var text string
	var err error
	switch {
	case from.FieldRef != nil:
		text, err = w.field(pod, from.FieldRef.FieldPath)
	case from.ResourceFieldRef != nil:
		text, err = resourceField(pod, c, from.ResourceFieldRef)
	case from.ConfigMapKeyRef != nil:
		var data map[string][]byte
		if data, err = w.configMap(ctx, pod.Namespace, from.ConfigMapKeyRef.Name, from.ConfigMapKeyRef.Optional); err == nil {
			return setKey(env, v.Name, data, from.ConfigMapKeyRef.Key, from.ConfigMapKeyRef.Optional)
		}
	case from.SecretKeyRef != nil:
		var data map[string][]byte
		if data, err = w.secret(ctx, pod.Namespace, from.SecretKeyRef.Name, from.SecretKeyRef.Optional); err == nil {
			return setKey(env, v.Name, data, from.SecretKeyRef.Key, from.SecretKeyRef.Optional)
		}
	default:
		err = fmt.Errorf("variable %s has a source that kubelab does not support", v.Name)
	}
	env[v.Name] = text
	return err
}

func setKey(env map[string]string, name string, data map[string][]byte, key string, optional *bool) error {
	text, ok := data[key]
	if !ok && !isTrue(optional) {
		return fmt.Errorf("couldn't find key %s", key)
	}
	if ok {
		env[name] = string(text)
	}
	return nil
}

// field returns what a fieldRef names. The kubelet's own code knows only the metadata.
func (w *worker) field(pod *corev1.Pod, path string) (string, error) {
	switch path {
	case "spec.nodeName":
		return w.Node, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs":
		return w.ip, nil
	}
	return fieldpath.ExtractFieldPathAsString(pod, path)
}

// resourceField returns a request or a limit of the container that the reference names, or else of c.
func resourceField(pod *corev1.Pod, c *corev1.Container, ref *corev1.ResourceFieldSelector) (string, error) {
	if ref.ContainerName != "" || c == nil {
		return resource.ExtractResourceValueByContainerName(ref, pod, ref.ContainerName)
	}
	return resource.ExtractContainerResourceValue(ref, c)
}

// port returns the number of a port that a probe names.
func port(c *corev1.Container, name string) (int, error) {
	if number, err := strconv.Atoi(name); err == nil {
		return number, nil
	}
	for _, p := range c.Ports {
		if p.Name == name {
			return int(p.ContainerPort), nil
		}
	}
	return 0, fmt.Errorf("couldn't find port: %s", name)
}
