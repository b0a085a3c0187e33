"""Intervals and limits of the processes that launch a job."""

from __future__ import annotations

# The coordinator and the relay

RELAY_START_DELAY_S = 1.0
"""Seconds after the coordinator at which the relay starts."""
SERVICE_POLL_INTERVAL_S = 0.05
"""Seconds between two checks whether the processes are running."""
FIRST_SERVICE_RESTART_DELAY_S = 0.1
"""Seconds after which a process that has ended is started again; the delay doubles with each consecutive failure."""
MAX_SERVICE_RESTART_DELAY_S = 10.0
"""Maximum of this delay, in seconds."""
STABLE_SERVICE_S = 60.0
"""Seconds after which a process that ends is no longer considered to fail again."""
SERVICE_STOP_TIMEOUT_S = 20.0
"""Seconds that the relay has to complete its batch and the maintenance of the history; each takes 15 s at most."""

# Workers

ENGINE_POLL_INTERVAL_S = 0.25
"""Seconds after which the watcher of the engines' processes also watches new ones."""
RAY_START_ATTEMPTS = 5
"""Number of attempts to start Ray."""
RAY_RETRY_DELAY_S = 2.0
"""Seconds after which Ray is started again."""

# Followers

FOLLOWER_POLL_INTERVAL_S = 0.25
"""Seconds between two looks at the leader's offer and at the own part of the engine."""

# Head and workers

POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the job or of Ray."""
REDIS_RETRY_DELAY_S = 2.0
"""Seconds after which something is repeated that failed because of Redis."""
ENGINES_READY_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the engines serve."""
HANDOVER_MARGIN_S = 10.0
"""Seconds after ``workers.drainSeconds`` that engines have to hand over their rollouts."""
FLEET_FAILURE_TIMEOUT_S = 60.0
"""Seconds for which Ray may fail to answer before the worker ends, to be replaced."""
FLEET_STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the fleet's call of Ray at the end."""
SHUTDOWN_POLL_INTERVAL_S = 0.25
"""Seconds between two checks whether a worker's engines have left the job."""

# Jobs on one machine

STATE_LOCK_TIMEOUT_S = 10.0
"""Seconds to wait for the lock of a state directory."""
STATE_LOCK_POLL_INTERVAL_S = 0.1
"""Seconds between two attempts to take the lock."""
REDIS_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks whether Redis accepts writes."""
CLOSE_TIMEOUT_S = 10.0
"""Seconds for which a run waits, after its dataset is finished, until its coordinator has closed the job."""
END_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the job has ended."""
PROGRESS_INTERVAL_S = 30.0
"""Seconds between two lines about the progress of a job that serves trainers."""
SHARED_GPU_MEMORY_UTILIZATION = 0.45
"""Share of a GPU's memory for each engine if the job's engines and those of a baseline use the same GPUs."""
