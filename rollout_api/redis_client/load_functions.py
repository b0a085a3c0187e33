"""Load all functions on a Redis server or cluster, for users who may not do so themselves.

``rollout-redis-users`` does this on the server that it manages. For others, an administrator runs it once per release::

    ROLLOUT_REDIS_ADMIN_URL=redis://… python -m rollout_api.redis_client.load_functions
"""

from __future__ import annotations

import os
import sys

import redis

from rollout_api.redis_client.connection import RedisUnusableError, connect_history, explain_error
from rollout_api.redis_client.server_functions import load_everywhere


def main() -> None:
    """Load the functions on the server whose URL is in ``ROLLOUT_REDIS_ADMIN_URL``."""
    url = os.environ.get("ROLLOUT_REDIS_ADMIN_URL", "")
    try:
        with connect_history(url) as client:
            load_everywhere(client)
    except redis.RedisError as error:
        sys.exit(str(explain_error(error, url)))
    except RedisUnusableError as error:
        sys.exit(f"ROLLOUT_REDIS_ADMIN_URL: {error}")


if __name__ == "__main__":
    main()
