"""Intervals and limits of a client."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_api.protocol.keys import CLIENT_LEASE_MS

LOG_INTERVAL_S = 60.0
"""Time between two log messages about the same problem."""


@dataclass(frozen=True)
class ClientLimits:
    """Intervals and limits of a client. The defaults suit production; tests shorten some of them."""

    max_unread: int = 1000
    """Maximum number of unconsumed rollouts in memory. Above it, no more results are read (backpressure)."""
    read_batch: int = 64
    """Results per read from Redis."""
    acknowledge_batch: int = 1000
    """Results per acknowledgement."""
    max_ended_steps: int = 10_000
    """Ended steps that the client remembers in order to reject opening them again."""
    max_known_requests: int = 20_000
    """Latest requests that the client remembers in order to recognize their rollouts when rewards are reported."""
    monitor_interval_s: float = 1.0
    """Time between two checks of the job's state."""
    name_timeout_s: float = CLIENT_LEASE_MS / 1000 + 2
    """How long a client waits for its name; longer than the lease of a killed process lasts."""
    coordinator_grace_s: float = 5.0
    """Time without a coordinator after which the client logs that it is waiting for one."""


DEFAULT_LIMITS = ClientLimits()
"""Limits of clients that set none."""
