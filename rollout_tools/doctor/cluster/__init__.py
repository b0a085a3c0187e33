"""Examines a Kubernetes cluster: what is installed there, and whether it admits the pods of jobs and can run them."""
