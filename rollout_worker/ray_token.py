"""What the Ray processes of a job show each other."""

from __future__ import annotations

import os
import secrets
from typing import Any

import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_worker.history.connection import retry


def share_token(server: redis.Redis, keys: MessageKeys) -> None:
    """Have Ray take nobody in who cannot read the job's Redis: its token is there, unless the environment has one.

    To be called before Ray is imported, which reads it then and never again (2.60).
    """
    if "RAY_AUTH_TOKEN" not in os.environ:
        token: Any = retry(server.get, keys.ray_token)
        if token is None:  # not at each start: a server that is full takes no writes
            retry(lambda: server.set(keys.ray_token, secrets.token_hex(32), nx=True))
            token = retry(server.get, keys.ray_token)
        os.environ["RAY_AUTH_TOKEN"] = token.decode()
    os.environ["RAY_AUTH_MODE"] = "token"
