"""Removes jobs from the cache that were deleted while their watch was interrupted.

After an interruption, kopf lists the jobs again and reports those that exist, but not those that have disappeared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rollout_operator.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.object_cache import JobKey, ObjectCache

logger = logging.getLogger(__name__)

PERIOD_S = 300.0
"""Seconds between two lists of the names of all jobs."""


async def remove_missing_jobs(
    api: KubernetesApi,
    cache: ObjectCache,
    on_removed: Callable[[JobKey], None],
    namespaces: Sequence[str],
    period_s: float = PERIOD_S,
) -> None:
    """Compare the cache with the API server periodically, until cancelled.

    Args:
        api: the API server.
        cache: the known jobs, from which those are removed that do not exist.
        on_removed: called with each job that was removed.
        namespaces: namespaces whose jobs are known; empty means all.
        period_s: seconds between two comparisons.
    """
    while True:
        await asyncio.sleep(period_s)
        known = cache.job_keys()  # before the list, which has every job that is created earlier
        try:
            existing = set().union(*[await api.job_keys(namespace) for namespace in namespaces or [""]])
        except ApiError as error:
            logger.warning("Jobs that do not exist any more cannot be found: %s", error)
            continue
        for key in sorted(known - existing):
            cache.remove_job(key)
            on_removed(key)
