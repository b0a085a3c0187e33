"""Ends a job whose head does not do so, because the job has failed or is deleted."""

from __future__ import annotations

import logging
from typing import Literal

import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_head.relay import Relay
from rollout_store.history.store import HistoryStore
from rollout_store.job.launcher import LauncherStore

logger = logging.getLogger(__name__)

EndState = Literal["failed", "deleted"]
"""Whether clients can read the results of an ended job for a day (``failed``), or its messages are deleted at once."""


def end_job(
    server: redis.Redis, keys: MessageKeys, store: HistoryStore, name: str, *, state: EndState, reason: str
) -> int:
    """Move finished rollouts to the history, tell clients that the job has ended, and remove its messages.

    No process of the job may be running. The call can be repeated.

    Args:
        server: the job's Redis.
        keys: keys of the job's messages.
        store: the job's history, which is kept.
        name: ``namespace/name`` of the job.
        state: what happens to the job's messages.
        reason: reason that clients are told.

    Returns:
        Number of rollouts that were moved to the history.

    Raises:
        redis.RedisError: if Redis fails; the call has to be repeated then.
    """
    moved = drain_outbox(server, keys, store)
    job = LauncherStore(server, keys)
    job.set_failed(reason)
    if state == "deleted":
        job.release_name(name)
        job.delete_keys(keep_notice=True)
    else:
        job.expire_keys()
    return moved


def drain_outbox(server: redis.Redis, keys: MessageKeys, store: HistoryStore) -> int:
    """Move a job's finished rollouts to its history, unless the history was deleted.

    Returns:
        Number of rollouts that were moved.

    Raises:
        redis.RedisError: if Redis fails; the remaining rollouts stay in the outbox.
    """
    history = store.metadata.info()
    if history is None or not history.tokenizer:
        # The next history with this name may belong to another tokenizer, and these token ids mean nothing there.
        logger.warning("History %s does not exist any more; finished rollouts are discarded.", store.keys.full_name)
        return 0
    relay = Relay(server, keys, store)
    relay.drain()
    return relay.num_appended
