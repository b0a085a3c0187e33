"""Intervals and limits of a client."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_api.protocol.keys import CLIENT_LEASE_MS


@dataclass(frozen=True)
class ClientLimits:
    """Intervals and limits of a client. The defaults suit production; tests shorten some of them."""

    max_unread: int = 1000
    """Maximum number of unconsumed rollouts in memory. Above it, no more results are read (backpressure)."""
    read_batch: int = 64
    """Results per read from Redis."""
    acknowledge_batch: int = 1000
    """Results per acknowledgement."""
    request_batch: int = 64
    """Requests per write to Redis."""
    request_batch_bytes: int = 4_000_000
    """Encoded size, in bytes, above which no further request is added to a batch."""
    ids_per_message: int = 1000
    """Request ids in one cancellation, and rollout ids in one report of rewards."""
    max_ended_steps: int = 10_000
    """Ended steps that the client remembers in order to refuse opening them again."""
    progress_interval_s: float = 1.0
    """Time between two calls of a progress callback."""
    monitor_interval_s: float = 1.0
    """Time between two checks of the job's state."""
    weights_poll_interval_s: float = 0.2
    """Time between two checks whether the engines have loaded published weights."""
    weights_log_interval_s: float = 30.0
    """Time between two log messages about engines that are still loading weights."""
    status_poll_interval_s: float = 0.05
    """Time between two checks whether the job has published a status."""
    read_retry_pause_s: float = 0.2
    """Pause after a failed read of results."""
    capacity_retry_pause_s: float = 0.2
    """Pause while the job has no capacity for another request."""
    name_timeout_s: float = CLIENT_LEASE_MS / 1000 + 2
    """How long a client waits for its name; longer than the lease of a killed process lasts."""
    name_retry_pause_s: float = 0.25
    """Pause while another process holds the client's name."""
    coordinator_grace_s: float = 5.0
    """Time without a coordinator after which the client logs that it is waiting for one."""
    log_interval_s: float = 60.0
    """Time between two log messages about the same problem."""
    last_batch_timeout_s: float = 2.0
    """How long a cancellation waits for the batch of requests that is being sent."""
    cancel_retry_pause_s: float = 2.0
    """Pause before a cancellation is first repeated; it doubles with each repetition."""
    max_cancel_retry_pause_s: float = 60.0
    """Longest pause between two repetitions of a cancellation."""
