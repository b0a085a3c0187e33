"""The live view of a job: ``rollout top``."""
