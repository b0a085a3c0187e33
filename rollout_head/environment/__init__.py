"""Environments of dataset sources: the process that an environment runs in, and its supervision."""
