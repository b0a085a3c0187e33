"""Intervals and limits of a job, grouped by component."""

from __future__ import annotations

# The job's state in Redis (job_store)

ENGINE_LEASE_S = 5.0
"""Seconds after which an engine that does not renew its lease is considered lost."""
FAILED_ENGINES_EXPIRY_S = 15.0
"""Seconds for which a worker's report of engines that cannot start is valid; it is repeated every second."""
REFUSAL_RETENTION_S = 600
"""Seconds for which a refusal is kept."""
TRAJECTORY_RETENTION_S = 3600
"""Seconds for which the engine that has a trajectory's prefix cached is remembered."""
JOB_RETENTION_S = 24 * 3600
"""Seconds for which clients can read their results after a job has ended."""
DELETED_JOB_NOTICE_S = 600
"""Seconds for which clients of a deleted job are told so."""
STATUS_EXPIRY_S = 10
"""Seconds after which a status that is not renewed expires."""
SHUTDOWN_REQUEST_EXPIRY_S = 600
"""Seconds after which a worker's request to its engines to leave expires."""
WRITE_CHECK_EXPIRY_S = 60
"""Seconds after which the key expires that is written to check whether Redis accepts writes."""
WEIGHT_CHECKSUM_EXPIRY_S = 3600
"""Seconds for which the checksum of published files is remembered."""
WEIGHT_CHECKSUM_CLAIM_S = 30
"""Seconds for which engines wait for another one to compute a checksum; afterwards, one more engine computes it."""
WEIGHT_CHECKSUM_POLL_INTERVAL_S = 0.05
"""Time between two checks whether another engine has computed a checksum."""
GROUP_EXPIRY_S = 10
"""Seconds after which the offer of an engine on several machines, and an answer to it, expire without renewal."""
MAX_EVENTS = 4096
"""Number of latest entries to which the event stream is trimmed."""
MAX_TIMELINE_ENTRIES = 100_000
"""Number of latest rollouts to which the timeline is trimmed. They take about 20 MB."""
MAX_MEASUREMENTS_BYTES = 16 * 2**20
"""Bytes of all measurements of a job, approximately; the larger they are, the fewer are kept."""
RUNNING_EXPIRY_S = 5
"""Seconds after which the running rollouts expire that observed engines report with each heartbeat."""
MAX_BLOCKING_READ_S = 1.0
"""Maximum seconds for which a read of a stream waits in Redis for new entries."""
ENTRIES_PER_PAGE = 500
"""Number of stream entries in one reply when a whole stream is read."""
KEYS_PER_SCAN = 500
"""Number of keys that are expired or deleted in one round trip."""
LEDGERS_PER_SCAN = 1000
"""Number of keys that Redis examines in one step of a scan for ledgers."""

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

# The engine worker and the relay

FAILURE_LOG_INTERVAL_S = 30.0
"""Seconds between two log messages about a continuing failure."""

# The engine worker

TOKEN_STREAM_INTERVAL_S = 0.02
"""Pause between two writes of the tokens of rollouts that are streamed."""
HEARTBEAT_INTERVAL_S = 1.0
"""Seconds between two heartbeats of an engine."""
HANDOVER_TIMEOUT_S = 4.0
"""Seconds that stopped rollouts have to write their checkpoints; longer than writing all of them takes."""
INBOX_READ_TIMEOUT_S = 1.0
"""Maximum seconds for which an engine waits for new orders."""
ORDERS_PER_READ = 256
"""Maximum number of orders in one read."""
TRANSFER_START_TIMEOUT_S = 600.0
"""Seconds for which an engine that is ready waits for a trainer to send weights; other engines may drain meanwhile."""
TRANSFER_IDLE_TIMEOUT_S = 120.0
"""Seconds for which an engine that has received a part of the weights waits for the trainer's next step."""
MAX_REQUEST_BYTES_IN_ORDER = 32 * 1024
"""Largest size of a request that is part of the order for its first sample on an engine. It is in Redis twice then, but
saves the engine a round trip.
"""
MAX_CACHED_REQUESTS = 512
"""Number of recently used requests that an engine keeps."""
HISTORY_WAIT_S = 2.0
"""Seconds for which a rollout waits for its problem's history. Early drafts justify no longer wait."""
ANNOUNCEMENT_INTERVAL_S = 1.0
"""Seconds for which new rollouts of announced problems are collected before these are announced again."""
ANNOUNCEMENT_DELAY_S = 0.01
"""Seconds for which an announcement waits for other problems that arrive at the same moment."""
ANNOUNCEMENT_RETENTION_S = 30.0
"""Seconds for which a problem's history is kept up to date after its last rollout, as the next one may come soon."""
ENGINE_STATS_INTERVAL_S = 1.0
"""Seconds between two reads of an engine's statistics."""
ENGINE_HANG_TIMEOUT_S = 300.0
"""Seconds after which an engine that does not answer is considered hung."""
LOADING_HANG_TIMEOUT_S = 1800.0
"""The same while the engine loads weights, because it answers only between two files or tensors."""
MAX_CUTOFF_DELAY_S = 600.0
"""Seconds for which an engine on which drafting does not pay waits for a moment without rollouts to be replaced."""

# The fleet of engine actors

FLEET_INTERVAL_S = 1.0
"""Seconds between two passes over the engine actors."""
ENGINE_RETRY_DELAY_S = 30.0
"""Seconds after which an engine that could not start is started again."""
ACTOR_ANSWER_TIMEOUT_S = 0.2
"""Seconds for which a pass waits for the actors' answers."""
ACTOR_RESTART_TIMEOUT_S = 120.0
"""Seconds within which Ray must have restarted an actor that has died; then it is replaced."""
MAX_START_FAILURES = 3
"""Number of consecutive deaths of an engine's process during its start that are reported as an error."""

# Engines on several machines

GROUP_INTERVAL_S = 0.5
"""Seconds between two renewals of the leader's offer and of a follower's answer."""
GROUP_LOSS_S = 5.0
"""Seconds for which the leader or a follower may be missing after its offer or answer has expired, until it is lost.

A lost process is usually noticed at once by the others. A false alarm would cost a start of the engine."""
GROUP_WAIT_LOG_INTERVAL_S = 60.0
"""Seconds after which it is logged again that a leader waits for its followers."""

# Ray

OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store, which carries little: prompts and rollouts go through Redis."""

# The relay

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
