"""The operator's process: ``python -m rollout_operator``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence

from rollout_api.asyncio_tasks import end
from rollout_operator import logs
from rollout_operator.api import KubernetesApi
from rollout_operator.cluster import Cluster
from rollout_operator.informer import Informer
from rollout_operator.job_watch import wait_until_served, watch_jobs
from rollout_operator.leader import Leadership, LostLeaseError
from rollout_operator.reconciler import Reconciler
from rollout_operator.service import OperatorCollector, OperatorService
from rollout_operator.store import Store
from rollout_operator.watched import watched

logger = logging.getLogger("rollout_operator")

_BUDGETS = ("policy/v1", "policy/v1beta1")
_FIRST = asyncio.FIRST_COMPLETED


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rollout-operator", description="Runs RolloutJobs on the Kubernetes cluster of KUBECONFIG, or its own."
    )
    parser.add_argument("--worker-image", required=True, help="image of heads and workers, if a job names none")
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch this namespace, and those given besides; default: all"
    )
    parser.add_argument("--watcher-namespace", action="append", default=[], help="whose pods may read heads' /status")
    parser.add_argument("--lease", help="NAMESPACE/NAME of a Lease: of several operators one works")
    parser.add_argument("--port", type=int, default=8081, help="of /healthz, /readyz and /metrics")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="json", choices=["json", "text"])
    return parser.parse_args(given)


async def _discover(api: KubernetesApi, watchers: Sequence[str]) -> Cluster:
    """Wait for an API server that has RolloutJobs, and see what else it has."""
    await wait_until_served(api)
    budgets = None
    for version in _BUDGETS:
        if await api.serves(version, "poddisruptionbudgets"):
            budgets = version
            break
    if budgets is None:
        logger.warning("The cluster has no PodDisruptionBudgets; jobs go without.")
    return Cluster(disruption_budgets=budgets, watcher_namespaces=tuple(watchers))


async def _run(options: argparse.Namespace) -> int:
    api = await KubernetesApi.connect()
    store = Store()
    leadership = None
    if options.lease:
        namespace, _, name = options.lease.rpartition("/")
        leadership = Leadership(api, namespace, name, f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    reconciler = Reconciler(api, store, options.worker_image)
    service = OperatorService(OperatorCollector(api, store, reconciler, leadership))
    await service.start(options.port)
    try:
        reconciler.cluster = await _discover(api, options.watcher_namespace)
        service.ready = True
        if leadership is not None:
            await leadership.acquire()
        return await _work(api, store, reconciler, leadership, options.namespace)
    finally:
        if leadership is not None:
            await leadership.release()
        await service.stop()
        await api.close()


async def _work(
    api: KubernetesApi,
    store: Store,
    reconciler: Reconciler,
    leadership: Leadership | None,
    namespaces: list[str],
) -> int:
    informers = [
        Informer(api, store, reconciler.queue, kind, namespace)
        for kind in watched(reconciler.cluster.disruption_budgets)
        for namespace in namespaces or [""]
    ]
    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(informer.run()) for informer in informers]
    if leadership is not None:
        tasks.append(asyncio.ensure_future(leadership.keep()))
    # before any job is looked at: what it owns would be taken to be missing
    await asyncio.wait([*tasks, all_listed := asyncio.ensure_future(_listed(informers))], return_when=_FIRST)
    await end(all_listed)
    jobs = watch_jobs(
        api,
        lambda job: reconciler.queue.add(store.put_job(job)),
        lambda job: reconciler.queue.forget(store.drop_job(job)),
        namespaces,
    )
    tasks += [asyncio.ensure_future(jobs), asyncio.ensure_future(reconciler.run())]
    tasks.append(asyncio.ensure_future(_told_to_end()))
    done, _ = await asyncio.wait(tasks, return_when=_FIRST)
    error = next((task.exception() for task in done if not task.cancelled() and task.exception() is not None), None)
    if isinstance(error, LostLeaseError):
        logger.error("%s; ending at once.", error)
        # whatever is under way may contradict what the new leader does
        logging.shutdown()
        os._exit(1)
    await end(*tasks)
    if error is not None:
        logger.error("The operator ends: %s: %s", type(error).__name__, error, exc_info=error)
        return 1
    logger.info("The operator was told to end.")
    return 0


async def _told_to_end() -> None:
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()


async def _listed(informers: Sequence[Informer]) -> None:
    for informer in informers:
        await informer.listed.wait()


def main(given: Sequence[str] | None = None) -> None:
    """Run until told to end."""
    options = _arguments(given)
    logs.configure(as_json=options.log_format == "json", level=options.log_level)
    sys.exit(asyncio.run(_run(options)))


if __name__ == "__main__":
    main()
