"""Bundles: archives with all that is known about a job, from which passwords and tokens are removed."""
