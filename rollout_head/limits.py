"""Intervals and limits of a job's head, grouped by component."""

from __future__ import annotations

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
