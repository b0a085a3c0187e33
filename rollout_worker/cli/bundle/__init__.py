"""The command ``rollout bundle``: all that is known about a job, in one archive."""
