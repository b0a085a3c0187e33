"""Names that the parts of the adapter for verl share, and how it finds the job's Redis."""

from __future__ import annotations

import os

NAME = "das"
"""Name under which the replica, and the checkpoint engine that sends weights from memory, are registered."""
FILES_NAME = "das-files"
"""Name under which the checkpoint engine that only writes files is registered."""
REDIS_URL_VARIABLE = "ROLLOUT_REDIS_URL"
"""Environment variable with the URL of the job's Redis."""


def redis_url() -> str:
    """Return the URL of the job's Redis.

    Raises:
        ValueError: the environment does not contain it.
    """
    try:
        return os.environ[REDIS_URL_VARIABLE]
    except KeyError:
        raise ValueError(f"set {REDIS_URL_VARIABLE} to the URL of the job's Redis, for every process of verl") from None
