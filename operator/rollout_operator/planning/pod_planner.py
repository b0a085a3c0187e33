"""Decides how many workers a running job should have, and which pods to create and delete. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout_api.manifest.pod_spec import Workers
from rollout_api.manifest.status import Backoff
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import STATUS_PERIOD_S, EngineStatus, HeadStatus, Observed, PodView
from rollout_operator.objects.pods import avoid_nodes, head_pod, prefetch_pod, worker_pod
from rollout_operator.planning.actions import Create, DeletePod, PlanBuilder
from rollout_operator.planning.failures import avoided_nodes, place_of, remaining_backoff
from rollout_operator.planning.teardown import delete_pods

_WORKER_START_S = 60.0
"""Assumed time until a new worker has loaded its model. Work that ends sooner does not justify another worker."""


def desired_workers(workers: Workers, previous: int | None, head: HeadStatus | None, live: Collection[str] = ()) -> int:
    """Return the desired number of workers.

    Without autoscaling it is ``replicas``. With autoscaling it grows while rollouts wait, up to the number of workers
    that can run all open rollouts at once. It does not grow if the open work will end before a new worker has started,
    nor beyond the number of workers that shorten the work, which takes at least as long as its longest rollout. While
    no rollout waits, it shrinks by the workers that have been idle for ``idleSeconds``.

    Args:
        workers: the manifest's section.
        previous: the desired number until now.
        head: the head's last status; None if it does not answer.
        live: names of the worker pods that are not being deleted. The head's status may still contain others.
    """
    if not workers.autoscale:
        return workers.replicas
    current = _clamp(workers, workers.replicas if previous is None else previous)
    if head is None or not head.engines:
        return current
    if head.waiting:
        work_seconds = head.remaining_seconds if head.work_seconds is None else head.work_seconds
        if work_seconds is not None and work_seconds < _WORKER_START_S:
            return current
        running = len({engine.worker for engine in head.engines})
        rollouts_per_worker = sum(engine.max_running for engine in head.engines) / running
        needed = math.ceil((head.waiting + head.assigned) / max(1.0, rollouts_per_worker))
        if work_seconds is not None and head.tail_seconds is not None:
            needed = min(needed, math.ceil(running * work_seconds / max(head.tail_seconds, _WORKER_START_S)))
        return _clamp(workers, max(current, needed))
    return _clamp(workers, current - len(idle_workers(workers, head) & set(live)))


def idle_workers(workers: Workers, head: HeadStatus) -> set[str]:
    """Return the names of the pods all of whose engines have been idle for ``workers.idleSeconds``."""
    by_worker: defaultdict[str, list[EngineStatus]] = defaultdict(list)
    for engine in head.engines:
        by_worker[engine.worker].append(engine)
    return {
        worker
        for worker, engines in by_worker.items()
        if all(not engine.assigned and engine.idle_seconds >= workers.idle_seconds for engine in engines)
    }


def workers_to_remove(
    live: Collection[PodView], surplus: int, workers: Workers, head: HeadStatus | None, *, spare_busy: bool = True
) -> list[PodView]:
    """Return which workers to delete when there are too many: pending ones first, then idle ones, then the newest.

    Workers that Kueue has admitted as a group are deleted last, because it would wait for their replacements. With
    autoscaling, these and workers that have rollouts are never deleted, unless *spare_busy* is false.
    """
    idle = idle_workers(workers, head) if head is not None else set()

    def rank(pod: PodView) -> int:
        if pod.phase == "Pending" or not pod.scheduled:
            return 0
        return 1 if pod.name in idle else 2

    ordered = sorted(live, key=lambda pod: (pod.in_pod_group, rank(pod), -pod.slot, -pod.created, pod.uid))
    if workers.autoscale and spare_busy:
        ordered = [pod for pod in ordered if rank(pod) < 2 and not pod.in_pod_group]
    return ordered[:surplus]


def _clamp(workers: Workers, count: int) -> int:
    return max(workers.effective_min, min(workers.effective_max, count))


@dataclass(frozen=True)
class PodPlanner:
    """Adds the actions that bring a job's pods to their desired number."""

    observed: Observed
    context: JobContext
    builder: PlanBuilder
    listed_failures: set[str]
    """Uids of failed pods that the status already lists. Other failed pods must be recorded before they are deleted."""
    backoffs: Mapping[str, Backoff]
    """The backoffs of pods that have failed, by place."""

    def plan_prefetch(self) -> None:
        """Create the pod that downloads the model if there is none, and replace one that has other settings."""
        live, terminating = self._remove_terminated(self.observed.component(names.PREFETCH))
        revision = self.context.revision
        delete_pods(
            self.builder,
            [pod for pod in live if revision is not None and pod.revision != revision.hash],
            self.observed,
        )
        place = names.pod_name(self.context.name, names.PREFETCH)
        if not live and all(pod.is_overdue(self.observed.now) for pod in terminating) and not self._is_delayed(place):
            self._create(place, prefetch_pod(self.context, taken=self._taken_names))

    def remove_prefetch(self) -> None:
        """Delete the pods that have downloaded the model, and those that another operator has created since."""
        live, _ = self._remove_terminated(self.observed.component(names.PREFETCH))
        delete_pods(self.builder, live, self.observed)

    def plan_head(self) -> None:
        """Create the head pod if there is none."""
        live, terminating = self._remove_terminated(self.observed.component(names.HEAD))
        # A head that does not terminate in time is not waited for: it has no GPUs, and Redis admits one coordinator.
        # Kueue, however, would delete a second head as a pod in excess of the group's.
        waits = any(pod.in_pod_group or not pod.is_overdue(self.observed.now) for pod in terminating)
        place = names.pod_name(self.context.name, names.HEAD)
        if not live and not waits and not self._is_delayed(place):
            pod = head_pod(self.context, taken=self._taken_names)
            self._create(place, pod, in_pod_group=self.context.pod_group is not None)

    def plan_workers(self, desired: int, slots_used: int) -> list[PodView]:
        """Create or delete workers, and the pods of each, until there are *desired* ones, at most one per slot.

        *slots_used* is the number of slots that ever had a worker; a new pod in one of these is a replacement.

        Returns:
            The leaders that exist now and are neither terminated nor being deleted.
        """
        workers = self.context.job.spec.workers
        live, terminating = self._remove_terminated(self.observed.leaders)
        created: set[int] = set()
        # Kueue admits the head only with all workers of its group, which must not be missing because others exist.
        grouped = set(range(min(desired, self.context.num_grouped_workers)))
        missing = grouped - {pod.slot for pod in (*live, *terminating)}
        if (surplus := len(live) + len(missing) - desired) > 0:
            for pod in workers_to_remove(live, surplus, workers, self.observed.head, spare_busy=not missing):
                self.builder.actions.append(DeletePod(pod.name, pod.uid))
        else:
            created = self._create_leaders(live, terminating, desired, slots_used)
        self._plan_followers(live, terminating, created, slots_used)
        return live

    def _create_leaders(
        self, live: list[PodView], terminating: list[PodView], desired: int, slots_used: int
    ) -> set[int]:
        """Create leaders until there are *desired* ones, and return their slots."""
        created = set()
        # A pod that is terminating still holds its GPUs. A terminated one does not, but its slot is not free yet.
        missing = desired - len(live) - sum(pod.has_running_containers for pod in terminating)
        # A slot whose follower is still terminating is not free, either: its new leader would be deleted together with
        # the follower.
        leaving = [pod for pod in self.observed.followers if pod.deleting and pod.has_running_containers]
        occupied = {pod.slot for pod in (*live, *terminating, *leaving)}
        free_slots = [
            slot for slot in range(desired) if slot not in occupied and not self._is_delayed(self._worker(slot))
        ]
        pending = sum(pod.replacement and pod.phase == "Pending" and not pod.in_pod_group for pod in live)
        for slot in free_slots[: max(0, missing)]:
            replacement = slot < slots_used
            if replacement:
                # Kueue admits a group only when all its pods exist.
                is_limited = not self.context.is_in_pod_group(slot)
                limit = self.context.job.spec.workers.max_pending_replacements
                if is_limited and pending >= limit:
                    continue
                pending += is_limited
            self._create_worker(slot, 0, replacement=replacement)
            created.add(slot)
        return created

    def _plan_followers(
        self, leaders: list[PodView], terminating_leaders: list[PodView], created: set[int], slots_used: int
    ) -> None:
        """Give each leader its followers, and remove those without a leader.

        A leader that is terminating needs its followers to hand over its rollouts. A follower that is being deleted is
        about to end its engine, so its leader is deleted, too, and hands over its rollouts in time.
        """
        size = self.context.pods_per_worker
        live, terminating = self._remove_terminated(self.observed.followers)
        served = {pod.slot for pod in leaders} | created
        kept = served | {pod.slot for pod in terminating_leaders}
        unwanted = [pod for pod in live if pod.slot not in kept or pod.rank >= size]
        leaving = {
            pod.slot for pod in terminating if pod.deleting and pod.has_running_containers and not pod.terminated
        }
        unwanted += [pod for pod in leaders if pod.slot in leaving]
        self.builder.actions += [DeletePod(pod.name, pod.uid) for pod in unwanted]
        existing = {(pod.slot, pod.rank) for pod in (*live, *terminating)}
        for slot in sorted(served):
            ranks = [rank for rank in range(1, size) if (slot, rank) not in existing]
            if ranks and not self._is_delayed(self._worker(slot)):
                for rank in ranks:
                    self._create_worker(slot, rank, replacement=slot < slots_used)

    def _create_worker(self, slot: int, rank: int, *, replacement: bool) -> None:
        pod = worker_pod(self.context, slot, rank=rank, replacement=replacement, taken=self._taken_names)
        self._create(self._worker(slot), pod, in_pod_group=self.context.is_in_pod_group(slot))

    def _create(self, place: str, pod: dict[str, Any], *, in_pod_group: bool = False) -> None:
        """Create a pod, away from the nodes that rejected others in its place.

        Kueue requires that the pods of a group have the same constraints.
        """
        nodes = frozenset[str]() if in_pod_group else avoided_nodes(self.backoffs.get(place))
        self.builder.actions.append(Create(avoid_nodes(pod, nodes)))

    def _worker(self, slot: int) -> str:
        return names.worker(self.context.name, slot)

    def _is_delayed(self, place: str) -> bool:
        """Return whether a pod must not be created yet because others in its place have failed."""
        delay = remaining_backoff(self.backoffs.get(place), self.observed.now)
        if delay:
            self.builder.requeue(delay)
        return delay > 0

    @cached_property
    def _taken_names(self) -> set[str]:
        """Names of pods that exist but are not waited for."""
        return {pod.name for pod in self.observed.pods if pod.retained or pod.is_overdue(self.observed.now)}

    def outdated(self) -> list[PodView]:
        """Return the pods that have the settings of an earlier revision: the workers', leaders first, then the head."""
        revision = self.context.revision
        pods = (*self.observed.leaders, *self.observed.followers, *self.observed.component(names.HEAD))
        return [pod for pod in pods if revision is not None and pod.revision != revision.hash and not pod.deleting]

    def replace_outdated(self, desired: int) -> None:
        """Delete one outdated pod, with its followers if it has any, unless a pod is being deleted.

        It is one that is not ready, if there is any: an update may be what makes the pods start. Otherwise *desired*
        workers and the head must exist and be ready.
        """
        existing = (*self.observed.component(names.WORKER), *self.observed.component(names.HEAD))
        pods = [pod for pod in existing if not pod.retained]
        if any(pod.deleting for pod in pods):
            return
        outdated = self.outdated()
        candidates = [pod for pod in outdated if not pod.ready]
        num_desired = desired * self.context.pods_per_worker + 1
        if not candidates and len(pods) == num_desired and all(pod.ready for pod in pods):
            candidates = outdated
        for pod in candidates[:1]:
            followers = [one for one in outdated if one.rank and not pod.rank and one.slot == pod.slot]
            self.builder.actions += [DeletePod(one.name, one.uid) for one in (pod, *followers)]

    def _remove_terminated(self, pods: list[PodView]) -> tuple[list[PodView], list[PodView]]:
        """Delete the pods that have terminated or are stuck, except those whose failure has yet to be recorded.

        A pod that no node is found for is deleted, too, once it need not avoid any longer the nodes that it avoids.

        Returns:
            The live pods, and the pods that are terminating or terminated and occupy their slot. A pod that a finalizer
            retains occupies none, except if Kueue would delete another pod in its place.
        """
        live = []
        terminating = []
        for pod in pods:
            if pod.retained and not pod.irreplaceable:
                continue
            if pod.deleting:
                delete_pods(self.builder, [pod], self.observed)
                terminating.append(pod)
                self.builder.requeue(STATUS_PERIOD_S)
            elif not pod.terminated and pod.uid not in self.listed_failures:
                if pod.scheduled or pod.avoided_nodes <= avoided_nodes(
                    self.backoffs.get(place_of(self.context.name, pod))
                ):
                    live.append(pod)
                else:
                    self.builder.actions.append(DeletePod(pod.name, pod.uid))
                    terminating.append(pod)
            else:
                if pod.phase == "Succeeded" or pod.uid in self.listed_failures:
                    self.builder.actions.append(DeletePod(pod.name, pod.uid))
                terminating.append(pod)
        return live, terminating
