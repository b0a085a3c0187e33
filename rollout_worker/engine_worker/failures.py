"""Which errors end an engine's part in its job."""

from __future__ import annotations

import redis

from rollout_api.redis_client.retry import concerns_server
from rollout_worker.engine.engine import Engine


def ends_engine(error: Exception, engine: Engine) -> bool:
    """Return whether *error* ends the part of *engine* in its job.

    It does if the engine has stopped, or the job's Redis server cannot be used. Whatever else goes wrong concerns one
    rollout or one weight version, which another engine, or this one after a restart, would fail with again.
    """
    return engine.stopped or (isinstance(error, redis.RedisError) and concerns_server(error))
