"""A real Kubernetes control plane and node, the installed chart, and the operator's process."""
