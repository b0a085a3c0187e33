// Command current-apiserver is a stand-in for the API server of a current Kubernetes, for tests.
//
// Debian packages the libraries of Kubernetes 1.36 but not its API server. This server consists of these libraries:
// storage, watches, discovery, server-side apply, strict decoding, custom resources with CEL rules, admission policies
// and webhooks are the code of Kubernetes. The built-in kinds have the real types, but neither validation nor
// defaulting (see defaults.go for the exceptions). There is no RBAC, Pod Security, eviction, controller or scheduler.
//
// With --authorization-kubeconfig it serves custom resources behind the aggregation layer of another API server, which
// then decides about every request.
package main

import (
	"os"

	"github.com/spf13/cobra"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/options"
	"k8s.io/component-base/cli"
)

func main() {
	run := options.NewServerRunOptions()
	recommended := options.NewRecommendedOptions("/registry", nil)
	command := &cobra.Command{
		Use:          "current-apiserver",
		SilenceUsage: true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return run.ComponentGlobalsRegistry.Set()
		},
		RunE: func(command *cobra.Command, _ []string) error {
			if err := run.Complete(); err != nil {
				return err
			}
			return serve(command.Context(), run, recommended)
		},
	}
	command.SetContext(genericapiserver.SetupSignalContext())
	run.AddUniversalFlags(command.Flags())
	recommended.AddFlags(command.Flags())
	os.Exit(cli.Run(command))
}
