"""Dead letters: messages that could not be decoded or processed."""

from __future__ import annotations

from typing import Any

from rollout_api.protocol.keys import MESSAGE_FIELD

_MAX_DEAD_LETTERS = 1000
"""Approximate number of dead letters that are kept; the oldest are deleted."""


def add_dead_letter(client: Any, dead_letters: str, *, stream: str, data: bytes, reason: str) -> None:
    """Keep a message and the reason why it could not be processed.

    Args:
        client: a synchronous Redis client, or a pipeline.
        dead_letters: key of the job's dead letters.
        stream: key of the stream that contained the message.
        data: the message.
        reason: why it could not be processed.
    """
    fields = {MESSAGE_FIELD: data, "reason": reason, "stream": stream}
    client.xadd(dead_letters, fields, maxlen=_MAX_DEAD_LETTERS, approximate=True)
