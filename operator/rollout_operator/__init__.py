"""The Kubernetes operator for RolloutJobs: observe, plan (pure), apply."""
