package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/securitycontext"

	"vllmtuner/deploy/kubelab/container"
)

// spec says how to start a container. Errors may pass, because what the container lacks may come later.
func (w *worker) spec(ctx context.Context, pod *corev1.Pod, c *corev1.Container, volumes volumes, attempt int) (container.Spec, error) {
	image := w.image(c.Image)
	security := securitycontext.DetermineEffectiveSecurityContext(pod, c)
	user, group := image.User, image.User
	if security.RunAsUser != nil {
		user = int(*security.RunAsUser)
	}
	if security.RunAsGroup != nil {
		group = int(*security.RunAsGroup)
	}
	if isTrue(security.RunAsNonRoot) && user == 0 {
		return container.Spec{}, errors.New("container has runAsNonRoot and image will run as root")
	}
	env, err := w.environment(ctx, pod, c, user)
	if err != nil {
		return container.Spec{}, err
	}
	mounts, err := mounts(c, volumes, env)
	if err != nil {
		return container.Spec{}, err
	}
	command := c.Command
	if len(command) == 0 {
		command = image.Entrypoint
	}
	args := expand(slices.Concat(command, c.Args), env)
	if len(args) == 0 {
		return container.Spec{}, errors.New("no command specified")
	}
	spec := container.Spec{
		Hostname: cmp.Or(pod.Spec.Hostname, pod.Name), Image: image.Dir, Mounts: mounts, Args: args, Env: variables(env),
		WorkingDir: cmp.Or(c.WorkingDir, "/"), User: user, Group: group, Capabilities: capabilities(security),
		NoNewPrivileges: securitycontext.AddNoNewPrivileges(security), ReadOnlyRoot: isTrue(security.ReadOnlyRootFilesystem),
		Log: logFile(w.Agent, pod, c.Name, attempt), MessagePath: cmp.Or(c.TerminationMessagePath, defaultMessage),
	}
	if pod.Spec.SecurityContext != nil {
		for _, g := range pod.Spec.SecurityContext.SupplementalGroups {
			spec.Groups = append(spec.Groups, int(g))
		}
	}
	if w.Isolated && !pod.Spec.HostNetwork {
		spec.Network = w.networkFile()
	}
	return spec, os.MkdirAll(filepath.Dir(spec.Log), 0o755)
}

// logFile returns where a container's output goes. The names are those of a kubelet's /var/log/pods.
func logFile(a *Agent, pod *corev1.Pod, name string, attempt int) string {
	return filepath.Join(a.Logs, pod.Namespace+"_"+pod.Name+"_"+string(pod.UID), name, strconv.Itoa(attempt)+".log")
}

// capabilities returns what a container may keep of root's rights.
func capabilities(security *corev1.SecurityContext) []string {
	if isTrue(security.Privileged) {
		return container.AllCapabilities()
	}
	kept := slices.Clone(container.DefaultCapabilities)
	if security.Capabilities == nil {
		return kept
	}
	full := func(c corev1.Capability) string {
		return "CAP_" + strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_")
	}
	for _, c := range security.Capabilities.Drop {
		kept = slices.DeleteFunc(kept, func(k string) bool { return c == "ALL" || k == full(c) })
	}
	for _, c := range security.Capabilities.Add {
		if c == "ALL" {
			return container.AllCapabilities()
		}
		kept = append(kept, full(c))
	}
	return kept
}

// mounts returns the mounts of a container's volumes.
func mounts(c *corev1.Container, volumes volumes, env map[string]string) ([]container.Mount, error) {
	mounts := make([]container.Mount, 0, len(c.VolumeMounts))
	for _, m := range c.VolumeMounts {
		v, ok := volumes[m.Name]
		if !ok {
			return nil, fmt.Errorf("the pod has no volume %s", m.Name)
		}
		source := v.path
		if sub := cmp.Or(m.SubPath, expand([]string{m.SubPathExpr}, env)[0]); sub != "" {
			if !filepath.IsLocal(sub) {
				return nil, fmt.Errorf("subPath %s leaves its volume", sub)
			}
			source = filepath.Join(v.path, sub)
			if _, err := os.Stat(source); err != nil && !v.readOnly {
				if err := os.MkdirAll(source, 0o755); err != nil {
					return nil, err
				}
			}
		}
		mounts = append(mounts, container.Mount{Source: source, Target: m.MountPath, ReadOnly: m.ReadOnly || v.readOnly})
	}
	return mounts, nil
}
