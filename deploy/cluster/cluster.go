// Package cluster shows the guard a Kubernetes cluster, and does there what the guard decides. It decides nothing itself.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"vllmtuner/deploy/guard"
)

// manager is the name under which Kubernetes notes the tuner's changes (metadata.managedFields).
const manager = "tuner"

// The annotations on the study's Job, and the key of the record in its ConfigMap.
const (
	loanAnnotation    = "tuner.dev/loan"
	outcomeAnnotation = "tuner.dev/outcome"
	recordKey         = "record"
)

var (
	deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	jobs        = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}
	pods        = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	configMaps  = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
)

// Names say which objects of a namespace the guard works with.
type Names struct {
	Namespace  string
	Deployment string // production
	Container  string // the container of the Deployment that serves
	Job        string // the study's Job
}

// Record is the name of the ConfigMap with the record of the loan. It contains the Deployment's name, so that only one study
// can borrow from a Deployment.
func (n Names) Record() string { return "tuner-restore-" + n.Deployment }

// A Cluster is a guard.Cluster on the API of Kubernetes. It remembers which versions of the objects the last View saw.
type Cluster struct {
	Names
	api dynamic.Interface

	deployment, record, job string // resource versions of the last View
	owner                   metav1.OwnerReference
}

// New returns a Cluster that uses the API server of a configuration.
func New(config *rest.Config, names Names) (*Cluster, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 20, 40 // a View takes five requests
	api, err := dynamic.NewForConfig(config)
	return &Cluster{Names: names, api: api}, err
}

func (c *Cluster) in(kind schema.GroupVersionResource) dynamic.ResourceInterface {
	return c.api.Resource(kind).Namespace(c.Namespace)
}

// get reads an object into to. It reports false if the object does not exist.
func (c *Cluster) get(ctx context.Context, kind schema.GroupVersionResource, name string, to any) (bool, error) {
	found, err := c.in(kind).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, problem(err)
	}
	return true, runtime.DefaultUnstructuredConverter.FromUnstructured(found.Object, to)
}

// problem returns an error of the API as the guard knows it.
func problem(err error) error {
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%w: %w", guard.ErrConflict, err)
	case apierrors.IsForbidden(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return fmt.Errorf("%w: %w; bind a role with this rule to the guard's service account", guard.ErrForbidden, err)
	}
	return err
}

// View reads production, the record and the study's Job.
func (c *Cluster) View(ctx context.Context) (v guard.View, err error) {
	var d appsv1.Deployment
	found, err := c.get(ctx, deployments, c.Deployment, &d)
	if err != nil {
		return v, err
	}
	c.deployment = d.ResourceVersion
	if found {
		c.owner = metav1.OwnerReference{APIVersion: "apps/v1", Kind: "Deployment", Name: d.Name, UID: d.UID}
		selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
		if err != nil {
			return v, err
		}
		of, err := c.podsOf(ctx, selector.String())
		if err != nil {
			return v, err
		}
		v.Deployment = new(productionOf(d, c.Container, of))
	}
	if v.Record, err = c.ReadRecord(ctx); err != nil {
		return v, err
	}
	v.Job, err = c.readJob(ctx)
	return v, err
}

// podsOf returns the pods with labels that have not ended.
func (c *Cluster) podsOf(ctx context.Context, selector string) (alive []corev1.Pod, err error) {
	list, err := c.in(pods).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, problem(err)
	}
	for _, item := range list.Items {
		var p corev1.Pod
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(item.Object, &p); err != nil {
			return nil, err
		}
		if p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			alive = append(alive, p)
		}
	}
	return alive, nil
}

// ReadRecord returns the record of the loan; nil if nothing is borrowed.
func (c *Cluster) ReadRecord(ctx context.Context) (*guard.Record, error) {
	var m corev1.ConfigMap
	found, err := c.get(ctx, configMaps, c.Record(), &m)
	c.record = m.ResourceVersion
	if !found || err != nil {
		return nil, err
	}
	r := new(guard.Record)
	if err := json.Unmarshal([]byte(m.Data[recordKey]), r); err != nil {
		return nil, fmt.Errorf("ConfigMap %s is no record of a loan (%w); delete it if nothing is borrowed from Deployment %s", m.Name, err, c.Deployment)
	}
	return r, nil
}

func (c *Cluster) readJob(ctx context.Context) (guard.Job, error) {
	var j batchv1.Job
	found, err := c.get(ctx, jobs, c.Job, &j)
	c.job = j.ResourceVersion
	if err != nil {
		return guard.Job{}, err
	}
	of, err := c.podsOf(ctx, batchv1.JobNameLabel+"="+c.Job)
	if err != nil {
		return guard.Job{}, err
	}
	runs := slices.ContainsFunc(of, func(p corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil })
	job := guard.Job{State: guard.Missing, Outcome: guard.Outcome(j.Annotations[outcomeAnnotation]), Runs: runs}
	if !found {
		return job, nil
	}
	job.State = stateOf(j)
	if text := j.Annotations[loanAnnotation]; text != "" {
		job.Loan = new(guard.Record)
		if err := json.Unmarshal([]byte(text), job.Loan); err != nil {
			return job, fmt.Errorf("annotation %s of Job %s: %w", loanAnnotation, j.Name, err)
		}
	}
	return job, nil
}

// CreateRecord creates the ConfigMap with the record. The Deployment owns it, so both are deleted together.
func (c *Cluster) CreateRecord(ctx context.Context, r guard.Record) error {
	m, err := c.configMapOf(r)
	if err != nil {
		return err
	}
	_, err = c.in(configMaps).Create(ctx, m, metav1.CreateOptions{FieldManager: manager})
	return problem(err)
}

func (c *Cluster) configMapOf(r guard.Record) (*unstructured.Unstructured, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{
			Name: c.Record(), Namespace: c.Namespace, OwnerReferences: []metav1.OwnerReference{c.owner},
			Labels: map[string]string{"app.kubernetes.io/name": "tuner", "app.kubernetes.io/instance": c.Job, "app.kubernetes.io/component": "record"},
		},
		Data: map[string]string{recordKey: string(text)},
	})
	return &unstructured.Unstructured{Object: object}, err
}

// UpdateRecord replaces the record.
func (c *Cluster) UpdateRecord(ctx context.Context, r guard.Record) error {
	m, err := c.configMapOf(r)
	if err != nil {
		return err
	}
	m.SetResourceVersion(c.record)
	_, err = c.in(configMaps).Update(ctx, m, metav1.UpdateOptions{FieldManager: manager})
	return problem(err)
}

// DeleteRecord deletes the record, unless it has changed.
func (c *Cluster) DeleteRecord(ctx context.Context) error {
	err := c.in(configMaps).Delete(ctx, c.Record(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &c.record}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return problem(err)
}

// Scale sets the number of replicas that production should have.
func (c *Cluster) Scale(ctx context.Context, replicas int32) error {
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&autoscalingv1.Scale{
		TypeMeta:   metav1.TypeMeta{APIVersion: "autoscaling/v1", Kind: "Scale"},
		ObjectMeta: metav1.ObjectMeta{Name: c.Deployment, Namespace: c.Namespace, ResourceVersion: c.deployment},
		Spec:       autoscalingv1.ScaleSpec{Replicas: replicas},
	})
	if err != nil {
		return err
	}
	// The converter leaves out a number of 0.
	if err := unstructured.SetNestedField(object, int64(replicas), "spec", "replicas"); err != nil {
		return err
	}
	_, err = c.in(deployments).Update(ctx, &unstructured.Unstructured{Object: object}, metav1.UpdateOptions{FieldManager: manager}, "scale")
	return problem(err)
}

// SetArgs sets the args of production's container.
func (c *Cluster) SetArgs(ctx context.Context, args []string) error {
	container := map[string]any{"name": c.Container, "args": args}
	return c.patch(ctx, deployments, c.Deployment, types.StrategicMergePatchType, c.deployment, map[string]any{
		"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": []any{container}}}},
	})
}

// NoteLoan keeps a copy of the record on the study's Job.
func (c *Cluster) NoteLoan(ctx context.Context, r guard.Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return c.annotate(ctx, loanAnnotation, string(text), nil)
}

// ResumeStudy lets the study's Job start its pod.
func (c *Cluster) ResumeStudy(ctx context.Context) error {
	return c.patch(ctx, jobs, c.Job, types.MergePatchType, c.job, map[string]any{"spec": map[string]any{"suspend": false}})
}

// NoteOutcome notes on the study's Job how the loan ended. A study that was returned early is suspended as well.
func (c *Cluster) NoteOutcome(ctx context.Context, o guard.Outcome) error {
	var spec map[string]any
	if o.Is(guard.Returned) {
		spec = map[string]any{"suspend": true}
	}
	return c.annotate(ctx, outcomeAnnotation, string(o), spec)
}

func (c *Cluster) annotate(ctx context.Context, name, text string, spec map[string]any) error {
	change := map[string]any{"metadata": map[string]any{"annotations": map[string]any{name: text}}}
	if spec != nil {
		change["spec"] = spec
	}
	return c.patch(ctx, jobs, c.Job, types.MergePatchType, c.job, change)
}

// patch changes an object, unless its version is another one.
func (c *Cluster) patch(ctx context.Context, kind schema.GroupVersionResource, name string, as types.PatchType, version string, change map[string]any) error {
	metadata, ok := change["metadata"].(map[string]any)
	if !ok {
		metadata = map[string]any{}
		change["metadata"] = metadata
	}
	metadata["resourceVersion"] = version
	text, err := json.Marshal(change)
	if err != nil {
		return err
	}
	_, err = c.in(kind).Patch(ctx, name, as, text, metav1.PatchOptions{FieldManager: manager})
	if apierrors.IsNotFound(err) {
		return errors.Join(guard.ErrConflict, err)
	}
	return problem(err)
}
