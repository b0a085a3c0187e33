"""What the project promises, measured beside its peers: ``python -m benchmarks.NAME --json FILE``; see ``--help``."""
