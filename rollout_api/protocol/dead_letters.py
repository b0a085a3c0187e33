"""Where messages go that nobody can read or carry out."""

from __future__ import annotations

from typing import Any

from rollout_api.protocol.keys import DATA

_KEPT = 1000


def add_dead_letter(to: Any, dead: str, *, stream: str, data: bytes, reason: str) -> None:
    """Keep a message, and why it was put aside, where an operator finds it; older ones go once there are many.

    Args:
        to: a synchronous client, or a pipeline of any kind.
        dead: key of the job's dead letters.
        stream: where the message was.
        data: the message as it came.
        reason: what is wrong with it.
    """
    to.xadd(dead, {DATA: data, "reason": reason, "stream": stream}, maxlen=_KEPT, approximate=True)
