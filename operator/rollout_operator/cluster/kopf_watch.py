"""kopf's watch of RolloutJobs.

kopf lists and watches RolloutJobs and reports every change; it runs no other handlers, timers or daemons. The page
docs/operator-design.md explains why. kopf 1.45 ends as a whole when the API server answers 404 for RolloutJobs, as it
does for a moment after a restart, and also cancels tasks of its event loop that are not its own. :func:`watch_jobs`
therefore runs kopf in a thread with a separate event loop, and starts it again when it ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import kopf

from rollout_api.manifest.rollout_job import API_VERSION, GROUP, PLURAL, VERSION
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import JobKey, ObjectCache
from rollout_operator.objects.observed import Manifest

logger = logging.getLogger(__name__)

JobCallback = Callable[[Manifest], None]

_POLL_INTERVAL_S = 2.0
_MISSING_JOBS_PERIOD_S = 300.0
"""Seconds between two lists of the names of all jobs."""


async def run_kopf(
    on_change: JobCallback,
    on_delete: JobCallback,
    namespaces: Sequence[str],
    stop: asyncio.Future[None] | None = None,
) -> None:
    """Run kopf until *stop* is done or kopf fails.

    The callbacks are called with each job that is created or changed, and with each one that is deleted. Without
    namespaces, all are watched.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**arguments: Any) -> Any:
        return kopf.login_via_client(**arguments)

    @kopf.on.startup(registry=registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True

    # A coroutine, because kopf runs plain functions in threads.
    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(event: kopf.RawEvent, **_: Any) -> None:
        (on_delete if event["type"] == "DELETED" else on_change)(event["object"])

    await kopf.operator(
        registry=registry, standalone=True, clusterwide=not namespaces, namespaces=namespaces, stop_flag=stop
    )


async def watch_jobs(
    api: KubernetesApi, on_change: JobCallback, on_delete: JobCallback, namespaces: Sequence[str]
) -> None:
    """Report all jobs and their changes until cancelled; the callbacks run in the calling event loop."""
    loop = asyncio.get_running_loop()

    def in_this_loop(callback: JobCallback) -> JobCallback:
        def call(job: Manifest) -> None:
            loop.call_soon_threadsafe(callback, job)

        return call

    async def run(stop: concurrent.futures.Future[None]) -> None:
        await run_kopf(in_this_loop(on_change), in_this_loop(on_delete), namespaces, asyncio.wrap_future(stop))

    while True:
        stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            await asyncio.to_thread(asyncio.run, run(stop))
        except Exception as error:
            logger.warning("The watch of %s ended and is started again: %s: %s", PLURAL, type(error).__name__, error)
        finally:
            # On cancellation, kopf must end before the process can: asyncio.run waits for its threads.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                stop.set_result(None)
        await asyncio.sleep(_POLL_INTERVAL_S)
        await wait_until_served(api)


async def wait_until_served(api: KubernetesApi) -> None:
    """Wait until the API server can be reached and serves RolloutJobs."""
    last_reason = ""
    while True:
        try:
            if await api.serves(API_VERSION, PLURAL):
                return
            reason = f"The API server does not serve {PLURAL} of {API_VERSION}. Install the CRD."
        except ApiError as error:
            reason = f"The API server cannot be reached: {error}"
        if reason != last_reason:
            logger.warning("Waiting for the API server. %s", reason)
            last_reason = reason
        await asyncio.sleep(_POLL_INTERVAL_S)


async def remove_missing_jobs(
    api: KubernetesApi,
    cache: ObjectCache,
    on_removed: Callable[[JobKey], None],
    namespaces: Sequence[str],
    period_s: float = _MISSING_JOBS_PERIOD_S,
) -> None:
    """Remove jobs from the cache that were deleted while their watch was interrupted; run until cancelled.

    After an interruption, kopf lists the jobs again and reports those that exist, but not those that have disappeared.
    The cache is therefore compared with the API server periodically. Without namespaces, the jobs of all are compared,
    every *period_s* seconds; *on_removed* is called with each job that was removed.
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
