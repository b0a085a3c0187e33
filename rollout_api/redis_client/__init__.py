"""Connections to Redis: addresses, connection settings, retries, and access rules."""
