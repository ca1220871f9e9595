package cluster

import (
	"fmt"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config returns how to reach the API server, and the namespace in use: from kubectl's configuration (KUBECONFIG), or from the
// pod's service account. version goes into the audit log of the API server.
func Config(version string) (config *rest.Config, namespace string, err error) {
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(clientcmd.NewDefaultClientConfigLoadingRules(), nil)
	if config, err = loader.ClientConfig(); err != nil {
		return nil, "", fmt.Errorf("no Kubernetes cluster is configured (%w); set KUBECONFIG, or run in a pod with a service account", err)
	}
	config.UserAgent = "tuner/" + version
	namespace, _, err = loader.Namespace()
	return config, namespace, err
}
