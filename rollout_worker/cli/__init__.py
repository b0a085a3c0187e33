"""The ``rollout`` command."""
