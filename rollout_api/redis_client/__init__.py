"""Connections to Redis: addresses, connection settings, checks, retries, and functions that run in the server."""
