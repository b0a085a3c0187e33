"""Intervals and limits of a job's head, grouped by component."""

from __future__ import annotations

from dataclasses import dataclass

# The coordinator's status and the timeline

MEASUREMENT_INTERVAL_S = 1.0
"""Shortest time between two measurements in the timeline."""
THROUGHPUT_WINDOW_S = 10.0
"""Seconds over which the speed of sampling is averaged."""
MIN_VERIFIED_TOKENS = 4096
"""Number of tokens by which drafts may be unverified: they may be in flight, or belong to preempted rollouts."""
STALE_STATUS_S = 8.0
"""Age of a status, in seconds, from which on Redis is reported as unavailable; a status is made every second."""
RUNNING_LENGTH_STEP = 64
"""Tokens to which estimated lengths of running rollouts are rounded, so that similar ones are counted together."""

# Traces

MAX_WAITING_SPANS = 20_000
"""Number of spans that wait for the collector of traces; further ones are dropped."""
TRACE_FLUSH_TIMEOUT_S = 3.0
"""Seconds for which a process that ends waits for the collector of traces."""

# The relay

FAILURE_LOG_INTERVAL_S = 30.0
"""Seconds between two log messages about a continuing failure."""
RELAY_BATCH_INTERVAL_S = 0.05
"""Seconds for which rollouts are collected before the next batch, unless the last one was full."""
RELAY_WAIT_S = 0.5
"""Maximum seconds for which a read waits for the first entry."""
RELAY_RETRY_DELAY_S = 1.0
"""Seconds after which a failed batch is repeated."""
RELAY_BATCH = 256
"""Maximum number of entries of each stream in one batch."""
RELAY_STOP_TIMEOUT_S = 15.0
"""Seconds to wait for the batch in progress when the relay is stopped."""

# The trainer of a dataset source

OUTBOX_POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether all finished rollouts are in the history, and whether counters are current."""
PROGRESS_INTERVAL_S = 0.5
"""Seconds between two updates of the progress."""
FINAL_COUNTERS_TIMEOUT_S = 10.0
"""Seconds to wait for final counters; longer than they take through Redis, the coordinator and the job's status."""
REWARDS_PER_REPORT = 256
"""Number of rewards in one report."""


@dataclass(frozen=True)
class CoordinatorLimits:
    """Intervals and limits of a coordinator. The defaults suit production; tests shorten some of them."""

    read_timeout_s: float = 0.1
    """Time for which a read waits for new messages; it bounds how long other work is delayed."""
    read_batch: int = 500
    """Maximum number of entries of each stream in one read."""
    engine_check_interval_s: float = 0.25
    """Time between two checks of engines, deadlines and unread results."""
    status_interval_s: float = 1.0
    """Time between two publications of the status."""
    reconcile_interval_s: float = 10.0
    """Time between two comparisons with Redis, which find events that were missed."""
    answer_batch: int = 256
    """Maximum number of rollouts that are answered without an engine in one pass, so that other work is not delayed."""
    isolation_threshold: int = 3
    """Engines lost with a rollout after which an engine gets at most one such rollout at a time."""
    max_losses: int = 6
    """Engines lost with a rollout, without any progress in between, after which the rollout fails."""
    unserved_version_log_delay_s: float = 30.0
    """Time after which rollouts that wait for a weight version are first logged."""
    unserved_version_log_interval_s: float = 300.0
    """Time between further log messages about such rollouts."""
