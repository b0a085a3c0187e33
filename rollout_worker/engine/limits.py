"""Timeouts and limits of weight transfers."""

from __future__ import annotations

TRANSFER_CONNECT_TIMEOUT_S = 15.0
"""Seconds for which an engine tries to reach a trainer whose group it is to join."""
TRANSFER_RETRY_INTERVAL_S = 0.1
"""Seconds between two attempts to reach it."""
