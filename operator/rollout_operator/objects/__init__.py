"""Kubernetes objects as the operator sees and builds them: pure functions and data."""
