"""Ends a running job, or some of its requests, through the control messages that its coordinator reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Cancel, Close, CodecError, RolloutRequest, decode, encode
from rollout_api.redis_client.server_functions import Call, Function, run

_EVEN_WHEN_FULL = Function("rollout_api.redis_client", "even_when_full")
_IDS_PER_MESSAGE = 1000
_ENTRIES_PER_PAGE = 500
_POLL_INTERVAL_S = 0.1


def open_requests(server: redis.Redis, keys: MessageKeys) -> dict[str, int]:
    """Return the open requests of a job with their numbers of samples, in the order in which they were sent.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    found: dict[str, int] = {}
    start = "-"
    while True:
        page: Any = server.xrange(keys.requests, min=start, count=_ENTRIES_PER_PAGE)
        for _, fields in page:
            try:
                request = decode(fields.get(MESSAGE_FIELD.encode(), b""))
            except CodecError:
                continue  # the coordinator moves it to the dead letters
            if isinstance(request, RolloutRequest):
                found[request.request_id] = request.sampling.n
        if len(page) < _ENTRIES_PER_PAGE:
            return found
        start = f"({page[-1][0].decode()}"


def cancel_requests(server: redis.Redis, keys: MessageKeys, request_ids: Sequence[str]) -> None:
    """Tell the coordinator to cancel requests.

    Raises:
        redis.RedisError: if Redis cannot be used; some of the cancellations may have been sent.
    """
    for start in range(0, len(request_ids), _IDS_PER_MESSAGE):
        _send(server, keys, encode(Cancel(request_ids=list(request_ids[start : start + _IDS_PER_MESSAGE]))))


def wait_until_answered(server: redis.Redis, keys: MessageKeys, request_ids: Sequence[str], timeout: float) -> bool:
    """Wait until requests are answered, and return whether they were within *timeout* seconds.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    return _wait(lambda: not set(request_ids) & set(open_requests(server, keys)), timeout)


def end_job(server: redis.Redis, keys: MessageKeys, timeout: float) -> bool:
    """Close a job as a trainer's ``close_job`` does, and cancel its requests, also those that are sent meanwhile.

    Returns:
        Whether the job has ended within *timeout* seconds.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    _send(server, keys, encode(Close()))
    cancelled: set[str] = set()

    def has_ended() -> bool:
        found = [request_id for request_id in open_requests(server, keys) if request_id not in cancelled]
        cancel_requests(server, keys, found)
        cancelled.update(found)
        return server.hget(keys.job, "state") in (b"closed", b"failed")

    return _wait(has_ended, timeout)


def _wait(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _send(server: redis.Redis, keys: MessageKeys, message: bytes) -> None:
    # Ending work frees memory, so it must be possible while Redis is full.
    run(server, Call(_EVEN_WHEN_FULL, [keys.control], ["XADD", keys.control, "*", MESSAGE_FIELD, message]))
