"""Paces the reads of a stream, so that many messages arrive in few batches and a few arrive at once. Pure."""

from __future__ import annotations

import math

_WINDOW_S = 1.0
"""Time constant of the mean arrival rate."""
_MIN_RATE = 200.0
"""Messages per second from which reads pause. Below, the CPU time that batches save is not worth the delay."""
_PAUSE_PER_MESSAGE_S, _MAX_PAUSE_S = 0.002, 0.02
"""Pause per message of the last read, and longest pause."""


class BatchPacer:
    """Decides how long to wait between two reads of a stream."""

    def __init__(self) -> None:
        self._rate, self._last_read = 0.0, -math.inf
        """Messages per second, and when the last read ended."""

    def pause(self, num_found: int, now: float) -> float:
        """Return the seconds to wait before the next read.

        Args:
            num_found: number of messages of the read that has just ended.
            now: ``time.monotonic()``.
        """
        self._rate = self._rate * math.exp((self._last_read - now) / _WINDOW_S) + num_found / _WINDOW_S
        self._last_read = now
        return min(_MAX_PAUSE_S, num_found * _PAUSE_PER_MESSAGE_S) if self._rate > _MIN_RATE else 0.0
