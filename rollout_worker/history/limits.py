"""Limits and intervals of the history, grouped by component."""

from __future__ import annotations

# Reading and writing Redis (HistoryStore and its parts)

PROBLEMS_PER_ROUND_TRIP = 256
"""Maximum number of problems in one pipeline of commands."""
FIELDS_PER_ROUND_TRIP = 1000
"""Maximum number of hash fields in one command or server function, which takes a few thousand arguments."""
RECENT_LENGTHS_PER_SHARD = 512
"""Number of latest rollouts of a shard whose lengths are kept for statistics over all problems."""
MAX_KNOWN_VERSIONS = 10_000
"""Number of latest generations whose run and weight version are kept; older ones are no longer referred to."""
MAX_READ_ATTEMPTS = 3
"""Number of attempts to read a problem while it is being compacted."""
MAX_REWARD = 3.4e38
"""Limit of a reward's absolute value: suffix indexes store rewards as float32."""

# Compaction

ENTRIES_PER_COMPACTION = 1000
"""Maximum number of log entries that one compaction packs into a block."""
MAX_BLOCK_RATIO = 2
"""A block larger than the newer data by this factor is not rewritten, which bounds how often a byte is rewritten."""
MAX_BLOCK_BYTES = 2**24
"""Maximum size of a block: servers and clients hold a block in memory as a whole."""
COMPACTION_DELAY_S = 30.0
"""Seconds without a change after which a problem is compacted; before that, more of its rollouts are likely to come."""

# Maintenance of one history

MAINTENANCE_INTERVAL_S = 5.0
"""Minimum seconds between two maintenance runs over one history."""
MAX_MAINTENANCE_S = 10.0
"""Seconds after which a run ends and leaves the rest to the next one, because other histories are waiting."""
PAUSE_RATIO = 9
"""Minimum pause after a run, as a multiple of its duration, so that scanning a large history does not load Redis."""
LEASE_S = 15.0
"""Seconds after which the lease of a maintainer that stopped renewing it expires."""
LEASE_RENEWAL_S = LEASE_S / 3
"""Seconds after which a maintainer renews its lease."""
RETENTION_S = 30 * 86400.0
"""Default seconds after which an unused history is deleted."""
EMPTY_PROBLEM_S = 3600.0
"""Seconds for which an announced problem without rollouts is kept; its first rollouts may still be running."""
EVICTION_TARGET = 0.95
"""Fraction of the byte cap that an eviction aims at, so that the next one is not due immediately."""
LOG_INTERVAL_S = 30.0
"""Minimum seconds between two log messages about the same continuing failure."""
STOP_TIMEOUT_S = 15.0
"""Seconds to wait for a background thread to end."""

# Synchronization of a suffix index (HistorySync)

POLL_INTERVAL_S = 0.25
"""Seconds between two checks for changes."""
MAX_POLL_INTERVAL_S = 5.0
"""Maximum seconds between two checks while Redis cannot be read."""
PROBLEMS_PER_READ = 16
"""Number of problems that are read and indexed together; a whole history may not fit into memory."""
ENTRIES_PER_READ = 512
"""Maximum number of log entries of one problem in one read."""
FEEDBACK_INTERVAL_S = 10.0
"""Seconds between two reports of an engine's drafting results to the history."""
FIRST_STATE_TOKENS = 256
"""Number of verified draft tokens after which an engine first saves its drafter state."""
MAX_STATE_TOKENS = 65_536
"""Maximum number of further verified draft tokens between two saves; in between, the number grows by a quarter."""

# Looking up lengths for the scheduler (LengthLookup)

LENGTH_LOOKUP_TIMEOUT_S = 1.0
"""Seconds to wait for length statistics; all requests of a job wait for them."""
LENGTH_LOOKUP_RETENTION_S = 5.0
"""Seconds for which statistics that were looked up are used again."""
LENGTH_LOOKUP_PAUSE_S = 30.0
"""Seconds without a lookup after one has failed."""

# Archives

ROLLOUTS_PER_IMPORT_BATCH = 64
"""Number of rollouts that an import appends together."""
