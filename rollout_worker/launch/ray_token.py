"""The token by which the Ray processes of a job recognize each other."""

from __future__ import annotations

import os

from rollout_api.redis_client.retry import retry
from rollout_worker.job.job_store.launcher import LauncherStore


def share_token(job: LauncherStore) -> str:
    """Return the job's Ray token; create it in Redis if there is none. ``RAY_AUTH_TOKEN`` takes precedence.

    Only processes that can read the job's Redis, or that are given the token, can then join the job's Ray cluster.
    """
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    return retry(job.ray_token)


def ray_auth_environment(token: str) -> dict[str, str]:
    """Return the environment variables with which Ray uses *token*; Ray 2.60 reads them when it is imported."""
    return {"RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"}
