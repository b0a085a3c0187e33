// The built-in kinds that the API server serves.

package main

import (
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
)

// servedVersions are the API groups and versions whose built-in kinds are served.
var servedVersions = []schema.GroupVersion{
	{Version: "v1"},
	{Group: "admissionregistration.k8s.io", Version: "v1"},
	{Group: "apps", Version: "v1"},
	{Group: "autoscaling", Version: "v2"},
	{Group: "batch", Version: "v1"},
	{Group: "coordination.k8s.io", Version: "v1"},
	{Group: "discovery.k8s.io", Version: "v1"},
	{Group: "events.k8s.io", Version: "v1"},
	{Group: "networking.k8s.io", Version: "v1"},
	{Group: "node.k8s.io", Version: "v1"},
	{Group: "policy", Version: "v1"},
	{Group: "rbac.authorization.k8s.io", Version: "v1"},
	{Group: "resource.k8s.io", Version: "v1"},
	{Group: "scheduling.k8s.io", Version: "v1"},
	{Group: "storage.k8s.io", Version: "v1"},
}

// clusterScopedKinds are the served kinds whose objects are in no namespace.
var clusterScopedKinds = []string{
	"CSIDriver", "CSINode", "ClusterRole", "ClusterRoleBinding", "DeviceClass", "IPAddress", "IngressClass",
	"MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding", "MutatingWebhookConfiguration", "Namespace", "Node",
	"PersistentVolume", "PriorityClass", "ResourceSlice", "RuntimeClass", "ServiceCIDR", "StorageClass",
	"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ValidatingWebhookConfiguration",
	"VolumeAttachment", "VolumeAttributesClass",
}

// kindsWithoutStorage are kinds that Kubernetes does not store.
var kindsWithoutStorage = []string{"ComponentStatus", "RangeAllocation"}

// kind is a built-in kind that is served.
type kind struct {
	version    schema.GroupVersion
	name       string
	namespaced bool
	object     reflect.Type
	list       reflect.Type
}

func (k kind) newObject() runtime.Object { return reflect.New(k.object).Interface().(runtime.Object) }

func (k kind) newList() runtime.Object { return reflect.New(k.list).Interface().(runtime.Object) }

func (k kind) hasStatus() bool {
	_, found := k.object.FieldByName("Status")
	return found
}

// registerKinds adds the types of the served versions to a scheme, and returns the kinds that are stored.
func registerKinds(scheme *runtime.Scheme) ([]kind, error) {
	var kinds []kind
	for _, version := range servedVersions {
		metav1.AddToGroupVersion(scheme, version)
		internal := schema.GroupVersion{Group: version.Group, Version: runtime.APIVersionInternal}
		types := clientscheme.Scheme.KnownTypes(version)
		for name, object := range types {
			if strings.HasPrefix(object.PkgPath(), "k8s.io/apimachinery") || slices.Contains(kindsWithoutStorage, name) {
				continue
			}
			// The external types also serve as internal ones, so that no conversions are needed.
			for _, registered := range []schema.GroupVersion{version, internal} {
				scheme.AddKnownTypeWithName(registered.WithKind(name), reflect.New(object).Interface().(runtime.Object))
			}
			if list, found := types[name+"List"]; found {
				namespaced := !slices.Contains(clusterScopedKinds, name)
				kinds = append(kinds, kind{version, name, namespaced, object, list})
			}
		}
		if err := scheme.SetVersionPriority(version); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	unchanged := func(label, value string) (string, string, error) { return label, value, nil }
	for _, name := range []string{"Pod", "Event"} {
		if err := scheme.AddFieldLabelConversionFunc(corev1.SchemeGroupVersion.WithKind(name), unchanged); err != nil {
			return nil, err
		}
	}
	return kinds, nil
}
