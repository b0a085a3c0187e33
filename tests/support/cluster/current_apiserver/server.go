// Assembles the API server from the libraries of Kubernetes.

package main

import (
	"context"
	"net"
	"time"

	"current_apiserver/openapi"

	"go.opentelemetry.io/otel/trace/noop"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	crdserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	crdoptions "k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	crdopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	openapicommon "k8s.io/kube-openapi/pkg/common"
)

const discoveryPeriod = 200 * time.Millisecond

// serve runs the server until the context is canceled.
func serve(ctx context.Context, run *options.ServerRunOptions, recommended *options.RecommendedOptions) error {
	scheme := runtime.NewScheme()
	codecs := serializer.NewCodecFactory(scheme)
	kinds, err := registerKinds(scheme)
	if err != nil {
		return err
	}
	recommended.Etcd.StorageConfig.Codec = codecs.LegacyCodec(servedVersions...)
	recommended.Features.EnablePriorityAndFairness = false
	config, err := newConfig(run, recommended, scheme, codecs)
	if err != nil {
		return err
	}
	crds, err := newCRDServer(config, recommended)
	if err != nil {
		return err
	}
	config.MergedResourceConfig = serverstorage.NewResourceConfig()
	config.MergedResourceConfig.EnableVersions(servedVersions...)
	server, err := config.Complete().New("current-apiserver", crds.GenericAPIServer)
	if err != nil {
		return err
	}
	if err := installKinds(server, config, kinds, scheme, codecs); err != nil {
		return err
	}
	err = server.AddPostStartHook("namespaces-and-discovery", func(hook genericapiserver.PostStartHookContext) error {
		go announceCRDs(hook, server, crds)
		return createNamespaces(hook, config.LoopbackClientConfig)
	})
	if err != nil {
		return err
	}
	return server.PrepareRun().RunWithContext(ctx)
}

func newConfig(
	run *options.ServerRunOptions, recommended *options.RecommendedOptions, scheme *runtime.Scheme,
	codecs serializer.CodecFactory,
) (*genericapiserver.RecommendedConfig, error) {
	loopback := []net.IP{net.IPv4(127, 0, 0, 1)}
	if err := recommended.SecureServing.MaybeDefaultWithSelfSignedCerts("localhost", nil, loopback); err != nil {
		return nil, err
	}
	config := genericapiserver.NewRecommendedConfig(codecs)
	recommended.Authentication.RemoteKubeConfigFileOptional = true
	for _, apply := range []func() error{
		func() error { return run.ApplyTo(&config.Config) },
		func() error { return recommended.Etcd.ApplyTo(&config.Config) },
		func() error { return recommended.SecureServing.ApplyToConfig(&config.Config) },
		func() error {
			return recommended.Authentication.ApplyTo(&config.Config.Authentication, config.SecureServing, nil)
		},
		func() error { return recommended.Audit.ApplyTo(&config.Config) },
	} {
		if err := apply(); err != nil {
			return nil, err
		}
	}
	if recommended.Authorization.RemoteKubeConfigFile == "" {
		config.Authorization.Authorizer = authorizerfactory.NewPrivilegedGroups("system:masters")
	} else if err := recommended.Authorization.ApplyTo(&config.Config.Authorization); err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config.LoopbackClientConfig)
	if err != nil {
		return nil, err
	}
	dynamicClient, err := dynamic.NewForConfig(config.LoopbackClientConfig)
	if err != nil {
		return nil, err
	}
	config.ClientConfig = config.LoopbackClientConfig
	config.SharedInformerFactory = informers.NewSharedInformerFactory(client, 10*time.Minute)
	if err := recommended.Features.ApplyTo(&config.Config, client, config.SharedInformerFactory); err != nil {
		return nil, err
	}
	err = recommended.Admission.ApplyTo(
		&config.Config, config.SharedInformerFactory, client, dynamicClient, feature.DefaultFeatureGate,
		config.EffectiveVersion)
	if err != nil {
		return nil, err
	}
	namer := openapinamer.NewDefinitionNamer(scheme, crdserver.Scheme)
	config.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(openAPIDefinitions, namer)
	config.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(openAPIDefinitions, namer)
	config.AggregatedDiscoveryGroupManager = aggregated.NewResourceManager("apis")
	return config, nil
}

func openAPIDefinitions(reference openapicommon.ReferenceCallback) map[string]openapicommon.OpenAPIDefinition {
	definitions := crdopenapi.GetOpenAPIDefinitions(reference)
	for name, definition := range openapi.GetOpenAPIDefinitions(reference) {
		definitions[name] = definition
	}
	return definitions
}

// newCRDServer returns the server of custom resources, which handles all requests that concern no built-in kind.
func newCRDServer(
	config *genericapiserver.RecommendedConfig, recommended *options.RecommendedOptions,
) (*crdserver.CustomResourceDefinitions, error) {
	crdConfig := *config
	crdConfig.SharedInformerFactory = nil
	crdConfig.PostStartHooks = map[string]genericapiserver.PostStartHookConfigEntry{}
	crdConfig.RESTOptionsGetter = nil
	crdConfig.MergedResourceConfig = crdserver.DefaultAPIResourceConfigSource()
	crdConfig.Serializer = crdserver.Codecs
	etcd := *recommended.Etcd
	etcd.StorageConfig.Codec = crdserver.Codecs.LegacyCodec(apiextensionsv1.SchemeGroupVersion)
	etcd.SkipHealthEndpoints = true
	if err := etcd.ApplyTo(&crdConfig.Config); err != nil {
		return nil, err
	}
	getter := crdoptions.NewCRDRESTOptionsGetter(etcd, config.ResourceTransformers, config.StorageObjectCountTracker)
	resolver := webhook.NewDefaultAuthenticationInfoResolverWrapper(
		nil, nil, config.LoopbackClientConfig, noop.NewTracerProvider())
	complete := (&crdserver.Config{
		GenericConfig: &crdConfig,
		ExtraConfig: crdserver.ExtraConfig{
			CRDRESTOptionsGetter: getter,
			MasterCount:          1,
			ServiceResolver:      webhook.NewDefaultServiceResolver(),
			AuthResolverWrapper:  resolver,
		},
	}).Complete()
	return complete.New(genericapiserver.NewEmptyDelegate())
}

func installKinds(
	server *genericapiserver.GenericAPIServer, config *genericapiserver.RecommendedConfig, kinds []kind,
	scheme *runtime.Scheme, codecs serializer.CodecFactory,
) error {
	endpoints := map[schema.GroupVersion]map[string]rest.Storage{}
	for _, served := range kinds {
		storages, err := newStorage(served, scheme, config.RESTOptionsGetter)
		if err != nil {
			return err
		}
		if endpoints[served.version] == nil {
			endpoints[served.version] = map[string]rest.Storage{}
		}
		for name, storage := range storages {
			endpoints[served.version][name] = storage
		}
	}
	for _, version := range servedVersions {
		parameters := runtime.NewParameterCodec(scheme)
		info := genericapiserver.NewDefaultAPIGroupInfo(version.Group, scheme, parameters, codecs)
		info.VersionedResourcesStorageMap[version.Version] = endpoints[version]
		var err error
		if version.Group == "" {
			err = server.InstallLegacyAPIGroup("/api", &info)
		} else {
			err = server.InstallAPIGroup(&info)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// announceCRDs adds the groups of custom resources to the unaggregated discovery at /apis, which older clients read.
func announceCRDs(
	ctx context.Context, server *genericapiserver.GenericAPIServer, crds *crdserver.CustomResourceDefinitions,
) {
	manager := server.DiscoveryGroupManager
	manager.AddGroup(apiGroup(apiextensions.GroupName, "v1"))
	announced := map[string]bool{}
	lister := crds.Informers.Apiextensions().V1().CustomResourceDefinitions().Lister()
	for ; ctx.Err() == nil; time.Sleep(discoveryPeriod) {
		existing := map[string]bool{}
		definitions, _ := lister.List(labels.Everything())
		for _, definition := range definitions {
			var versions []string
			for _, version := range definition.Spec.Versions {
				if version.Served {
					versions = append(versions, version.Name)
				}
			}
			if len(versions) > 0 {
				existing[definition.Spec.Group] = true
				manager.AddGroup(apiGroup(definition.Spec.Group, versions...))
			}
		}
		for group := range announced {
			if !existing[group] {
				manager.RemoveGroup(group)
			}
		}
		announced = existing
	}
}

func apiGroup(name string, versions ...string) metav1.APIGroup {
	group := metav1.APIGroup{Name: name}
	for _, version := range versions {
		discovered := metav1.GroupVersionForDiscovery{GroupVersion: name + "/" + version, Version: version}
		group.Versions = append(group.Versions, discovered)
	}
	group.PreferredVersion = group.Versions[0]
	return group
}

func createNamespaces(ctx context.Context, config *restclient.Config) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	for _, name := range []string{"default", "kube-system", "kube-public", "kube-node-lease"} {
		metadata := metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelMetadataName: name}}
		_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metadata}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}
