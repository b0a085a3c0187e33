"""One engine's part of a job: it executes assignments, reports to Redis and loads published weights."""
