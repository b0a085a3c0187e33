"""Reconciles jobs: observe, plan, apply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.status import ConditionType
from rollout_api.status_token import StatusToken
from rollout_operator.cluster.apply import OutdatedError, execute, post_event
from rollout_operator.cluster.fair_semaphore import FairSemaphore
from rollout_operator.cluster.head_status import HeadStatusReader
from rollout_operator.cluster.informer import WorkQueue
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi, reference
from rollout_operator.cluster.object_cache import JobKey, ObjectCache, RuntimeCache
from rollout_operator.objects import names
from rollout_operator.objects.observed import (
    ClusterInfo,
    KeptBundle,
    Manifest,
    Observed,
    Rejection,
)
from rollout_operator.objects.runtimes import RuntimeKey
from rollout_operator.planning.actions import Event
from rollout_operator.planning.conditions import is_true
from rollout_operator.planning.plan import plan

logger = logging.getLogger(__name__)

_CONCURRENCY = 32
"""Number of jobs that are reconciled at the same time."""
_CONCURRENCY_PER_NAMESPACE = 8
"""Number of jobs of a namespace that are, so that one whose requests take long does not delay the others."""


@dataclass
class ReconcileCounts:
    """Counters of the reconciler, for the metrics."""

    reconciles: int = 0
    errors: int = 0
    """Reconciles that failed and are retried."""
    conflicts: int = 0
    """Reconciles that ended because the job had changed since it was observed."""
    seconds: float = 0.0
    """Total duration of all reconciles."""


class Reconciler:
    """Processes the queue of jobs to reconcile."""

    def __init__(
        self, api: KubernetesApi, cache: ObjectCache, default_image: str, status_token: StatusToken | None = None
    ) -> None:
        self.counts = ReconcileCounts()
        self.cluster = ClusterInfo()
        self.namespaces: Container[str] | None = None
        """The namespaces whose jobs are reconciled; None means all namespaces that are watched."""
        self.queue: WorkQueue[JobKey] = WorkQueue()
        self.runtimes = RuntimeCache(cache, self.queue.add)
        self._api, self._cache, self._default_image = api, cache, default_image
        self._head_statuses = HeadStatusReader(status_token)
        self._semaphore = FairSemaphore(_CONCURRENCY, _CONCURRENCY_PER_NAMESPACE)
        self._rejections: dict[JobKey, tuple[Rejection, ...]] = {}
        """Actions that the API server rejected recently, by job."""

    async def run(self) -> None:
        """Reconcile the jobs in the queue, several at the same time, until cancelled."""
        reconciles: set[asyncio.Task[None]] = set()
        try:
            while True:
                task = asyncio.create_task(self._process(await self.queue.get()))
                reconciles.add(task)
                task.add_done_callback(reconciles.discard)
        finally:
            await cancel_and_wait(*reconciles)
            await self._head_statuses.close()

    async def _process(self, key: JobKey) -> None:
        async with self._semaphore.hold(key[0]):
            started = time.monotonic()
            self.counts.reconciles += 1
            log_fields = {"job": "/".join(key)}
            try:
                await self._reconcile(key)
            except OutdatedError:
                # Usually the watch delivers the newer job and adds the key; the retry is for the case that the watch
                # had delivered it before.
                self.counts.conflicts += 1
                self.queue.retry(key)
            except ApiError as error:
                self.counts.errors += 1
                logger.warning("The reconcile is retried: %s", error, extra=log_fields)
                self.queue.retry(key)
            except Exception:
                self.counts.errors += 1
                logger.exception("The reconcile failed unexpectedly and is retried.", extra=log_fields)
                self.queue.retry(key)
            else:
                self.queue.done(key)
            self.counts.seconds += time.monotonic() - started

    @property
    def num_queued(self) -> int:
        """Number of jobs whose next reconcile has not begun."""
        return len(self.queue) + self._semaphore.num_waiting

    def reconcile_namespace(self, namespace: str) -> None:
        """Reconcile all jobs of a namespace that was selected."""
        for key in self._cache.job_keys():
            if key[0] == namespace:
                self.queue.add(key)

    async def _reconcile(self, key: JobKey) -> None:
        job = self._cache.job(key)
        if job is None:
            self._rejections.pop(key, None)
            return
        if self.namespaces is not None and key[0] not in self.namespaces:
            return
        observed = await self._observe(key, job)
        planned = plan(observed)
        rejections = await execute(self._api, self._cache, observed, planned)
        if rejections:
            self._rejections[key] = rejections
        else:
            self._rejections.pop(key, None)
        known_reasons = {known.reason for known in observed.rejections}
        for reason, rejection in {one.reason: one for one in rejections if one.reason not in known_reasons}.items():
            await post_event(self._api, job, Event("Warning", reason, str(rejection)), observed.now)
        delays = [one.retry_time - observed.now for one in rejections if one.retry_time > observed.now]
        if {one.scope for one in rejections} - {known.scope for known in observed.rejections}:
            delays.append(0.0)  # a new rejection must appear in the status at once
        if planned.requeue_after is not None:
            delays.append(planned.requeue_after)
        if delays:
            self.queue.add(key, min(delays))

    async def _observe(self, key: JobKey, job: Manifest) -> Observed:
        uid = job["metadata"]["uid"]
        pods = self._cache.pods(key, uid)
        head = next((pod for pod in pods if pod.component == names.HEAD and not pod.deleting), None)
        status = None
        if not _is_finished(job):
            status = await self._head_statuses.read(head, on_late_answer=lambda: self.queue.add(key))
        now = time.time()
        return Observed(
            job=job,
            pods=pods,
            objects=self._cache.objects(key, uid),
            now=now,
            cluster=self.cluster,
            default_image=self._default_image,
            last_head_status=status,
            head_problem=self._head_statuses.problem(head),
            lost_nodes=await self._lost_nodes(
                {pod.node for pod in pods if pod.node and not pod.retained and pod.is_overdue(now)}
            ),
            rejections=self._rejections.get(key, ()),
            kept_bundle=await self._kept_bundle(job),
            runtime=None if (runtime := RuntimeKey.of_job(job)) is None else self.runtimes.settings(runtime),
        )

    async def _kept_bundle(self, job: Manifest) -> KeptBundle | None:
        """Return the bundle of a job that has failed and is being torn down; nobody asks for that of other jobs."""
        metadata = job["metadata"]
        is_ending = names.FINALIZER in metadata.get("finalizers", ()) and not metadata.get("deletionTimestamp")
        if not is_ending or not _has_condition(job, ConditionType.FAILED):
            return None
        try:
            found = await self._api.metadata(
                reference("ConfigMap", metadata["namespace"], names.bundle_config_map(metadata["name"]))
            )
        except ApiError as error:
            if error.transient:
                raise
            return None  # the bundle cannot be stored either, which does not delay the teardown
        return None if found is None else KeptBundle.from_config_map(found)

    async def _lost_nodes(self, nodes: set[str]) -> frozenset[str]:
        ordered = sorted(nodes)
        lost = await asyncio.gather(*(self._api.is_node_lost(node) for node in ordered))
        return frozenset(node for node, is_lost in zip(ordered, lost, strict=True) if is_lost)


def _is_finished(job: Manifest) -> bool:
    return any(_has_condition(job, kind) for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED))


def _has_condition(job: Manifest, kind: ConditionType) -> bool:
    conditions: list[Mapping[str, str]] = (job.get("status") or {}).get("conditions") or []
    return is_true(conditions, kind)
