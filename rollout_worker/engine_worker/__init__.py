"""One engine's part of a job: it executes assignments, reports to Redis and loads published weights."""

from rollout_worker.engine_worker.worker import EngineWorker

__all__ = ["EngineWorker"]
