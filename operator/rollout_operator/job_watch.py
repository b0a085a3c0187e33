"""kopf's watch of RolloutJobs, begun anew when it breaks off.

kopf 1.45 ends as a whole when its watch is answered with an error that it does not know to pass, such as the 404 of an
API server that has just started and does not serve custom resources yet; it then cancels all tasks of its event loop.
So it has a thread and a loop of its own, and whoever works with the jobs goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Sequence

import kopf

from rollout_api.manifest.rollout_job import API_VERSION, PLURAL
from rollout_operator import handlers
from rollout_operator.api import ApiError, KubernetesApi
from rollout_operator.observed import Manifest

logger = logging.getLogger(__name__)

_POLL_S = 2.0


async def wait_until_served(api: KubernetesApi) -> None:
    """Return when there is an API server that has RolloutJobs."""
    said = ""
    while True:
        try:
            if await api.serves(API_VERSION, PLURAL):
                return
            problem = f"the cluster has no {PLURAL} of {API_VERSION}; install the CRD"
        except ApiError as error:
            problem = f"the API server cannot be reached: {error}"
        if problem != said:
            logger.warning("Waiting: %s", problem)
            said = problem
        await asyncio.sleep(_POLL_S)


async def watch_jobs(api: KubernetesApi, put: handlers.Told, drop: handlers.Told, namespaces: Sequence[str]) -> None:
    """Say which jobs there are, until cancelled; *put* and *drop*, as in ``handlers.registry``, run in this loop."""
    loop = asyncio.get_running_loop()

    def here(told: handlers.Told) -> handlers.Told:
        def hand_over(job: Manifest) -> None:
            loop.call_soon_threadsafe(told, job)

        return hand_over

    while True:
        stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        registry = handlers.registry(here(put), here(drop))
        try:
            await asyncio.to_thread(asyncio.run, _kopf(registry, namespaces, stop))
        except Exception as error:
            logger.warning("The watch of %s ended and begins anew: %s: %s", PLURAL, type(error).__name__, error)
        finally:
            # asyncio.run waits for the thread, when all ends
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                stop.set_result(None)
        await asyncio.sleep(_POLL_S)
        await wait_until_served(api)


async def _kopf(
    registry: kopf.OperatorRegistry, namespaces: Sequence[str], stop: concurrent.futures.Future[None]
) -> None:
    flag = asyncio.wrap_future(stop)
    await kopf.operator(
        registry=registry, standalone=True, clusterwide=not namespaces, namespaces=namespaces, stop_flag=flag
    )
