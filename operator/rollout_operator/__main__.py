"""The operator's process: ``python -m rollout_operator``."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.status_token import StatusToken
from rollout_operator.cluster.http_server import MetricsCollector, OperatorServer
from rollout_operator.cluster.informer import Informer
from rollout_operator.cluster.kopf_watch import remove_missing_jobs, wait_until_served, watch_jobs
from rollout_operator.cluster.kubernetes_api import CLUSTER_RUNTIMES, RUNTIMES, KubernetesApi, owned_kinds
from rollout_operator.cluster.leader_election import LeaderElection, LostLeaseError
from rollout_operator.cluster.object_cache import NAMESPACES, JobKey, ObjectCache, SelectedNamespaces, job_key
from rollout_operator.cluster.reconciler import Reconciler
from rollout_operator.command_line import configure_logs, namespaced_name, refuse_both
from rollout_operator.objects.names import GANG_APIS, GANG_PLURAL
from rollout_operator.objects.observed import ClusterInfo

logger = logging.getLogger("rollout_operator")

_DISRUPTION_BUDGET_APIS = ("policy/v1", "policy/v1beta1")
_UNHEALTHY_POD_EVICTION_POLICY_VERSION = (1, 27)


def _egress_rules(text: str) -> tuple[dict[str, Any], ...]:
    """Parse the rules of ``--egress-rules``.

    Raises:
        argparse.ArgumentTypeError: if the text is not a JSON list of objects.
    """
    try:
        rules = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"this is not JSON: {error}") from error
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise argparse.ArgumentTypeError("this must be a JSON list of objects with the fields to and ports")
    return tuple(rules)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="rollout-operator",
        description="Run the operator for RolloutJobs. It connects to the cluster of KUBECONFIG, else to the cluster "
        "that it runs in, else to that of ~/.kube/config.",
    )
    parser.add_argument("--worker-image", required=True, help="image of the heads and workers of jobs that set none")
    parser.add_argument(
        "--namespace", action="append", default=[], help="namespace to watch; may be repeated; default: all namespaces"
    )
    parser.add_argument(
        "--namespace-selector",
        default="",
        metavar="LABEL=VALUE,…",
        help="labels of the namespaces whose jobs the operator runs, instead of --namespace",
    )
    parser.add_argument(
        "--status-reader-namespace",
        action="append",
        default=[],
        help="namespace whose pods may read /status and /metrics of heads; may be repeated; default: all namespaces",
    )
    parser.add_argument(
        "--egress-rules",
        type=_egress_rules,
        help="limit the connections that pods of jobs may open to their own namespace and to these rules of a "
        "NetworkPolicy, a JSON list; default: connections are not limited",
    )
    parser.add_argument(
        "--redis-users",
        action="store_true",
        help="rollout-redis-users is running: a job whose manifest names no Redis server has its own Redis user; "
        "default: it uses the Secret rollout-redis of its namespace",
    )
    parser.add_argument(
        "--lease",
        type=namespaced_name,
        metavar="NAMESPACE/NAME",
        help="Lease for leader election; default: no leader election",
    )
    parser.add_argument("--port", type=int, default=8081, help="port of /healthz, /readyz and /metrics")
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"], help="lowest level of messages"
    )
    parser.add_argument("--log-format", default="json", choices=["json", "text"], help="format of messages")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; None stands for that of the process."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    refuse_both(parser, options)
    return options


async def _first_served(api: KubernetesApi, versions: Sequence[str], plural: str) -> str | None:
    """Return the first of these API versions that the API server serves a resource in, or None."""
    for version in versions:
        if await api.serves(version, plural):
            return version
    return None


async def _discover_cluster(api: KubernetesApi, options: argparse.Namespace, token: StatusToken) -> ClusterInfo:
    """Wait until the API server serves RolloutJobs, and discover which optional APIs it has."""
    await wait_until_served(api)
    budget_api = await _first_served(api, _DISRUPTION_BUDGET_APIS, "poddisruptionbudgets")
    if budget_api is None:
        logger.warning("The cluster serves no PodDisruptionBudgets; jobs are created without one.")
    return ClusterInfo(
        disruption_budget_api=budget_api,
        gang_api=await _first_served(api, GANG_APIS, GANG_PLURAL),
        assigns_user_ids=await api.serves("security.openshift.io/v1", "securitycontextconstraints"),
        has_unhealthy_pod_eviction_policy=await api.version() >= _UNHEALTHY_POD_EVICTION_POLICY_VERSION,
        status_reader_namespaces=tuple(options.status_reader_namespace),
        egress_rules=options.egress_rules,
        status_token_hash=token.sha256,
        creates_redis_users=options.redis_users,
    )


async def _run(options: argparse.Namespace, token: StatusToken) -> int:
    """Run the operator until it is terminated, and return the exit code."""
    api = await KubernetesApi.connect()
    cache = ObjectCache()
    election = None
    if options.lease:
        namespace, name = options.lease
        election = LeaderElection(api, namespace, name, f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}")
    reconciler = Reconciler(api, cache, options.worker_image, token)
    server = OperatorServer(MetricsCollector(api, cache, reconciler, election), token)
    await server.start(None, options.port)
    try:
        reconciler.cluster = await _discover_cluster(api, options, token)
        server.ready = True
        if election is not None:
            await election.acquire()
        return await _lead(api, cache, reconciler, election, options.namespace, options.namespace_selector)
    finally:
        if election is not None:
            await election.release()
        await server.stop()
        await api.close()


async def _lead(
    api: KubernetesApi,
    cache: ObjectCache,
    reconciler: Reconciler,
    election: LeaderElection | None,
    namespaces: list[str],
    namespace_selector: str,
) -> int:
    """Watch and reconcile until the process is terminated or a task fails, and return the exit code."""
    informers = [
        Informer(api, cache, reconciler.queue, kind, namespace)
        for kind in owned_kinds(reconciler.cluster.disruption_budget_api, reconciler.cluster.gang_api)
        for namespace in namespaces or [""]
    ]
    runtimes = [(CLUSTER_RUNTIMES, ""), *((RUNTIMES, namespace) for namespace in namespaces or [""])]
    informers += [
        Informer(api, reconciler.runtimes, reconciler.queue, kind, namespace, selector="", optional=True)
        for kind, namespace in runtimes
    ]
    if namespace_selector:
        selected = SelectedNamespaces(reconciler.reconcile_namespace)
        reconciler.namespaces = selected
        informers.append(Informer(api, selected, reconciler.queue, NAMESPACES, "", selector=namespace_selector))
    tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(informer.run()) for informer in informers]
    tasks.append(asyncio.ensure_future(_wait_for_signal()))
    if election is not None:
        tasks.append(asyncio.ensure_future(election.keep()))

    def forget(job: JobKey) -> None:
        cache.remove_job(job)
        reconciler.queue.discard(job)

    # Jobs are reconciled only once the cache is complete; otherwise existing objects would appear to be missing.
    synced = asyncio.ensure_future(_wait_until_synced(informers))
    done, _ = await asyncio.wait([*tasks, synced], return_when=asyncio.FIRST_COMPLETED)
    if done == {synced}:
        watch = watch_jobs(
            api,
            lambda job: reconciler.queue.add(cache.update_job(job)),
            lambda job: forget(job_key(job)),
            namespaces,
        )
        missing = remove_missing_jobs(api, cache, reconciler.queue.discard, namespaces)
        tasks += [asyncio.ensure_future(work) for work in (watch, missing, reconciler.run())]
    else:
        synced.cancel()
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    error = next((task.exception() for task in done if not task.cancelled() and task.exception() is not None), None)
    if isinstance(error, LostLeaseError):
        logger.error("%s The process ends at once.", error)
        # Requests in flight could contradict those of the new leader, so nothing is awaited.
        logging.shutdown()
        os._exit(1)
    await cancel_and_wait(*tasks)
    if error is not None:
        logger.error("The operator ends: %s: %s", type(error).__name__, error, exc_info=error)
        return 1
    logger.info("The operator was terminated.")
    return 0


async def _wait_for_signal() -> None:
    received = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, received.set)
    await received.wait()


async def _wait_until_synced(informers: Sequence[Informer]) -> None:
    for informer in informers:
        await informer.synced.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator until SIGINT or SIGTERM."""
    options = parse_arguments(arguments)
    configure_logs(as_json=options.log_format == "json", level=options.log_level)
    try:
        token = StatusToken.from_environment()
    except ValueError as error:
        logger.error("The operator ends: %s", error)
        sys.exit(1)
    sys.exit(asyncio.run(_run(options, token)))


if __name__ == "__main__":
    main()
