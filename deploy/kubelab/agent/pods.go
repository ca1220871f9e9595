package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"
)

// pods gives each pod of the node a worker, and waits for the workers at the end.
type pods struct {
	*Agent
	known chan struct{} // closed when every pod of the node has its worker

	mu       sync.Mutex
	workers  map[types.UID]*worker
	shutting bool // the machine shuts down, so new pods are rejected
	running  sync.WaitGroup
}

func newPods(a *Agent) *pods {
	return &pods{Agent: a, known: make(chan struct{}), workers: map[types.UID]*worker{}}
}

// run follows the node's pods in the API until ctx ends.
func (p *pods) run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(p.kube, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", p.Node).String()
	}))
	registration, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { p.see(ctx, object.(*corev1.Pod)) },
		UpdateFunc: func(_, object any) { p.see(ctx, object.(*corev1.Pod)) },
		DeleteFunc: func(object any) { p.lose(object) },
	})
	if err != nil {
		return err
	}
	factory.Start(ctx.Done())
	if cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) { // each pod has gone through AddFunc
		p.endOrphans(ctx)
		close(p.known)
	}
	<-ctx.Done()
	factory.Shutdown()
	p.running.Wait()
	return nil
}

// see tells the pod's worker the newest state of its pod. A pod without a worker gets one.
func (p *pods) see(ctx context.Context, pod *corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.workers[pod.UID]
	if w == nil {
		w = newWorker(ctx, p.Agent, pod)
		p.workers[pod.UID] = w
		rejected := p.shutting
		p.running.Go(func() {
			w.run(ctx, rejected)
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.workers, pod.UID)
		})
	}
	w.see(pod)
}

// lose ends a pod that somebody removed from the API without waiting for its containers.
func (p *pods) lose(object any) {
	if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = unknown.Obj
	}
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.workers[pod.UID]; w != nil {
		w.see(pod)
		w.lose()
	}
}

// endOrphans ends the containers of pods that were removed from the API while no agent ran.
func (p *pods) endOrphans(ctx context.Context) {
	entries, err := os.ReadDir(p.podsDir())
	if err != nil {
		p.Log.Error("look for pods without an object", "error", err)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, entry := range entries {
		if p.workers[types.UID(entry.Name())] == nil {
			p.running.Go(func() {
				if err := endOrphan(ctx, filepath.Join(p.podsDir(), entry.Name())); err != nil && ctx.Err() == nil {
					p.Log.Error("end a pod without an object", "uid", entry.Name(), "error", err)
				}
			})
		}
	}
}

// shutDown ends all pods because the machine shuts down, and returns when their last state is in the API.
func (p *pods) shutDown(ctx context.Context) error {
	p.mu.Lock()
	p.shutting = true
	workers := make([]*worker, 0, len(p.workers))
	for _, w := range p.workers {
		workers = append(workers, w)
	}
	p.mu.Unlock()
	for _, w := range workers {
		w.shutDown()
	}
	var err error
	for _, w := range workers {
		err = errors.Join(err, w.waitForEnd(ctx))
	}
	return err
}
