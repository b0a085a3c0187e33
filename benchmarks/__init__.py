"""Benchmarks that measure the project beside its peers: ``python -m benchmarks.NAME --json FILE``; see README.md."""
