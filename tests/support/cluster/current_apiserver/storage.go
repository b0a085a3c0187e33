// How the API server stores, updates and deletes objects of built-in kinds.

package main

import (
	"context"
	"errors"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/names"
)

// strategy is how objects of any built-in kind are created, updated and deleted.
type strategy struct {
	runtime.ObjectTyper
	names.NameGenerator
	namespaced bool
	// updatesStatus distinguishes the subresource "status" from the object itself.
	updatesStatus bool
}

func fieldOf(object runtime.Object, name string) reflect.Value {
	return reflect.ValueOf(object).Elem().FieldByName(name)
}

func (s strategy) NamespaceScoped() bool { return s.namespaced }

func (s strategy) PrepareForCreate(_ context.Context, object runtime.Object) {
	metadata, _ := meta.Accessor(object)
	metadata.SetGeneration(1)
	if status := fieldOf(object, "Status"); status.IsValid() {
		status.SetZero()
	}
	if pod, isPod := object.(*corev1.Pod); isPod {
		pod.Status.Phase = corev1.PodPending
	}
	setDefaults(object)
}

func (s strategy) PrepareForUpdate(_ context.Context, object, old runtime.Object) {
	metadata, _ := meta.Accessor(object)
	oldMetadata, _ := meta.Accessor(old)
	metadata.SetGeneration(oldMetadata.GetGeneration())
	if s.updatesStatus {
		managedFields, resourceVersion := metadata.GetManagedFields(), metadata.GetResourceVersion()
		for _, name := range []string{"Spec", "ObjectMeta"} {
			if unchanged := fieldOf(object, name); unchanged.IsValid() {
				unchanged.Set(fieldOf(old, name))
			}
		}
		metadata.SetManagedFields(managedFields)
		metadata.SetResourceVersion(resourceVersion)
		return
	}
	if status := fieldOf(object, "Status"); status.IsValid() {
		status.Set(fieldOf(old, "Status"))
	}
	setDefaults(object)
	spec := fieldOf(object, "Spec")
	if spec.IsValid() && !reflect.DeepEqual(spec.Interface(), fieldOf(old, "Spec").Interface()) {
		metadata.SetGeneration(oldMetadata.GetGeneration() + 1)
	}
}

func (strategy) Validate(context.Context, runtime.Object) field.ErrorList { return nil }

func (strategy) ValidateUpdate(context.Context, runtime.Object, runtime.Object) field.ErrorList { return nil }

func (strategy) WarningsOnCreate(context.Context, runtime.Object) []string { return nil }

func (strategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string { return nil }

func (strategy) Canonicalize(runtime.Object) {}

func (strategy) AllowCreateOnUpdate() bool { return false }

func (strategy) AllowUnconditionalUpdate() bool { return true }

// podStrategy lets the kubelet confirm the deletion of pods that are bound to a node, as Kubernetes does.
type podStrategy struct{ strategy }

func (podStrategy) CheckGracefulDelete(_ context.Context, object runtime.Object, options *metav1.DeleteOptions) bool {
	pod := object.(*corev1.Pod)
	seconds := int64(30)
	if options.GracePeriodSeconds != nil {
		seconds = *options.GracePeriodSeconds
	} else if pod.Spec.TerminationGracePeriodSeconds != nil {
		seconds = *pod.Spec.TerminationGracePeriodSeconds
	}
	hasEnded := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	if pod.Spec.NodeName == "" || hasEnded {
		seconds = 0
	}
	options.GracePeriodSeconds = &seconds
	return true
}

// selectable returns the labels and fields by which objects can be selected.
func selectable(object runtime.Object) (labels.Set, fields.Set, error) {
	metadata, err := meta.Accessor(object)
	if err != nil {
		return nil, nil, err
	}
	values := fields.Set{"metadata.name": metadata.GetName(), "metadata.namespace": metadata.GetNamespace()}
	switch typed := object.(type) {
	case *corev1.Pod:
		values["spec.nodeName"] = typed.Spec.NodeName
		values["status.phase"] = string(typed.Status.Phase)
	case *corev1.Event:
		values["involvedObject.kind"] = typed.InvolvedObject.Kind
		values["involvedObject.name"] = typed.InvolvedObject.Name
	}
	return metadata.GetLabels(), values, nil
}

// newStorage returns the endpoints of a kind, by the resource's name.
func newStorage(k kind, scheme *runtime.Scheme, getter generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	plural, singular := meta.UnsafeGuessKindToResource(k.version.WithKind(k.name))
	objects := strategy{scheme, names.SimpleNameGenerator, k.namespaced, false}
	store := &registry.Store{
		NewFunc:     k.newObject,
		NewListFunc: k.newList,
		PredicateFunc: func(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
			return storage.SelectionPredicate{Label: label, Field: field, GetAttrs: selectable}
		},
		DefaultQualifiedResource:  plural.GroupResource(),
		SingularQualifiedResource: singular.GroupResource(),
		CreateStrategy:            objects,
		UpdateStrategy:            objects,
		DeleteStrategy:            objects,
		TableConvertor:            rest.NewDefaultTableConvertor(plural.GroupResource()),
	}
	if k.name == "Pod" {
		store.DeleteStrategy = podStrategy{objects}
		store.ReturnDeletedObject = true // Other kinds return a Status.
	}
	if err := store.CompleteWithOptions(&generic.StoreOptions{RESTOptions: getter, AttrFunc: selectable}); err != nil {
		return nil, err
	}
	endpoints := map[string]rest.Storage{plural.Resource: store}
	if k.hasStatus() {
		status := *store
		objects.updatesStatus = true
		status.UpdateStrategy = objects
		endpoints[plural.Resource+"/status"] = &statusEndpoint{&status}
	}
	if k.name == "Pod" {
		endpoints["pods/binding"] = bindingEndpoint{store}
	}
	return endpoints, nil
}

// statusEndpoint serves the subresource "status".
type statusEndpoint struct{ store *registry.Store }

func (e *statusEndpoint) New() runtime.Object { return e.store.New() }

func (e *statusEndpoint) Destroy() {}

func (e *statusEndpoint) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return e.store.Get(ctx, name, options)
}

func (e *statusEndpoint) Update(
	ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc,
	update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	return e.store.Update(ctx, name, info, create, update, false, options)
}

func (e *statusEndpoint) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	return e.store.ConvertToTable(ctx, object, options)
}

// bindingEndpoint serves the subresource "binding", by which a scheduler assigns a pod to a node.
type bindingEndpoint struct{ store *registry.Store }

func (bindingEndpoint) New() runtime.Object { return &corev1.Binding{} }

func (bindingEndpoint) Destroy() {}

func (bindingEndpoint) NamespaceScoped() bool { return true }

func (e bindingEndpoint) Create(
	ctx context.Context, name string, object runtime.Object, _ rest.ValidateObjectFunc, _ *metav1.CreateOptions,
) (runtime.Object, error) {
	bind := func(_ context.Context, _, old runtime.Object) (runtime.Object, error) {
		pod := old.DeepCopyObject().(*corev1.Pod)
		if pod.Spec.NodeName != "" {
			return nil, apierrors.NewConflict(corev1.Resource("pods/binding"), name, errors.New("the pod is bound"))
		}
		if len(pod.Spec.SchedulingGates) > 0 {
			return nil, apierrors.NewConflict(corev1.Resource("pods/binding"), name, errors.New("the pod is gated"))
		}
		pod.Spec.NodeName = object.(*corev1.Binding).Target.Name
		return pod, nil
	}
	info := rest.DefaultUpdatedObjectInfo(nil, bind)
	_, _, err := e.store.Update(
		ctx, name, info, rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	return &metav1.Status{Status: metav1.StatusSuccess}, err
}
