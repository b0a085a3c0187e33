"""One engine's part of a job: it executes assignments, reports to Redis and loads published weights."""

from rollout_worker.job.engine_worker.worker import EngineWorker

__all__ = ["EngineWorker"]
