"""What the parts of the adapter for verl share: names, the URL of Redis, and the versions of verl that fit.

Importing this module checks the installed version, before modules of verl are imported.
"""

from __future__ import annotations

import os
from importlib.metadata import version

NAME = "das"
"""Name under which the replica, and the checkpoint engine that sends weights from memory, are registered."""
FILES_NAME = "das-files"
"""Name under which the checkpoint engine that only writes files is registered."""
REDIS_URL_VARIABLE = "ROLLOUT_REDIS_URL"
"""Environment variable with the URL of the job's Redis."""
TESTED = "0.9.1"
"""Version of verl that the adapter is tested with."""


def redis_url() -> str:
    """Return the URL of the job's Redis.

    Raises:
        ValueError: the environment does not contain it.
    """
    try:
        return os.environ[REDIS_URL_VARIABLE]
    except KeyError:
        raise ValueError(f"set {REDIS_URL_VARIABLE} to the URL of the job's Redis, for every process of verl") from None


def check(installed: str) -> None:
    """Check that the adapter supports a version of verl.

    Raises:
        ImportError: it does not; the interfaces that it implements differ between minor versions.
    """
    if installed.split(".")[:2] != TESTED.split(".")[:2]:
        raise ImportError(
            f"rollout_api.integrations.verl supports verl {TESTED.rpartition('.')[0]}, but verl {installed} is "
            f"installed; install verl=={TESTED}"
        )


check(version("verl"))
