"""The Kubernetes operator for RolloutJobs: it observes, plans (a pure function) and applies."""
