"""The history service, which maintains all histories of a Redis server, and its command line."""
