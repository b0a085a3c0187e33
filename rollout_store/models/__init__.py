"""Models, checkpoints and adapters on this machine."""
