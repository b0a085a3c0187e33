"""Ends a job in Redis that its own head does not end: it has failed, or is deleted."""

from __future__ import annotations

import logging
from typing import Literal

import redis

from rollout_api.protocol.keys import MessageKeys, named
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.job_store import KEPT_S
from rollout_worker.job.relay import Relay

logger = logging.getLogger(__name__)

_SAID_S = 600
"""How long clients of a deleted job are told so."""
_AT_ONCE = 500

End = Literal["failed", "deleted"]


def end_job(server: redis.Redis, keys: MessageKeys, store: HistoryStore, name: str, *, state: End, reason: str) -> int:
    """Bring what was finished into the history, tell clients, and see that the job's messages go.

    No part of the job may run any more. May be repeated.

    Args:
        server: the job's Redis.
        keys: of its messages.
        store: its history, which stays.
        name: of the job, ``namespace/name``.
        state: ``failed``: results may be read for a day. ``deleted``: messages are removed at once.
        reason: what clients are told.

    Returns:
        How many rollouts came into the history.

    Raises:
        redis.RedisError: if Redis fails; to be repeated then.
    """
    carried = carry_the_rest(server, keys, store)
    known = bool(server.exists(keys.job))
    if known:
        server.hset(keys.job, mapping={"state": "failed", "reason": reason})
    if state == "deleted" and server.get(named(name)) == keys.uid.encode():
        server.delete(named(name))
    batch: list[bytes] = []
    for key in server.scan_iter(keys.every(), count=_AT_ONCE):
        batch.append(key)
        if len(batch) >= _AT_ONCE:
            _let_go(server, keys, batch, state)
            batch = []
    _let_go(server, keys, batch, state)
    return carried


def carry_the_rest(server: redis.Redis, keys: MessageKeys, store: HistoryStore) -> int:
    """Bring what a job has finished into its history, if that was not deleted; returns how many rollouts that were.

    Raises:
        redis.RedisError: if Redis fails; what is left stays in the outbox.
    """
    about = store.about()
    if about is None or not about.tokenizer:
        # whoever opens one of this name next would draft from ids that may mean something else there
        logger.warning("History %s is not there any more; nothing comes into it.", store.keys.full_name)
        return 0
    relay = Relay(server, keys, store)
    relay.drain()
    return relay.appended


def _let_go(server: redis.Redis, keys: MessageKeys, batch: list[bytes], state: End) -> None:
    pipeline = server.pipeline(transaction=False)
    for key in batch:
        if state == "failed":
            pipeline.expire(key, KEPT_S, lt=True)  # a lease still ends when it would have
        elif key == keys.job.encode():
            pipeline.expire(key, _SAID_S)
        else:
            pipeline.unlink(key)
    pipeline.execute()
