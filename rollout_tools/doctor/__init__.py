"""``rollout doctor``: examines whether a machine, a Redis server, a manifest and a cluster are fit for rollout jobs."""
