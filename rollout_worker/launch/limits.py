"""Intervals and limits of the processes that launch a job."""

from __future__ import annotations

# Ray's processes on a machine

RAY_STOP_TIMEOUT_S = 10.0
"""Seconds that Ray's processes have to end before they are killed."""
CONNECT_TIMEOUT_S = 2.0
"""Seconds to wait for a connection to the head."""

# Head and workers

POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the head, the job or Ray's processes."""
REDIS_RETRY_DELAY_S = 2.0
"""Seconds after which something is repeated that failed because of Redis."""
READINESS_REDIS_TIMEOUT_S = 0.6
"""Redis timeout of ``/readyz``. Several may add up, and kubelets wait 3 s for the answer."""
SHUTDOWN_GRACE_S = 25.0
"""Seconds that rollouts have to finish after SIGTERM; Kubernetes usually sends SIGKILL after 30 s."""
SHUTDOWN_POLL_INTERVAL_S = 0.25
"""Seconds between two checks whether a worker's engines have left the job."""

# Jobs on one machine

STATE_LOCK_TIMEOUT_S = 10.0
"""Seconds to wait for the lock of a state directory."""
STATE_LOCK_POLL_INTERVAL_S = 0.1
"""Seconds between two attempts to take the lock."""
REDIS_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks whether Redis accepts writes."""
END_POLL_INTERVAL_S = 0.2
"""Seconds between two checks whether the job has ended."""
SHARED_GPU_MEMORY_UTILIZATION = 0.45
"""Share of a GPU's memory for each engine if the job's engines and those of a baseline use the same GPUs."""
