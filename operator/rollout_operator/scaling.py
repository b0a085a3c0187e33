"""Decides how many workers a job should have, and which to remove. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from rollout_api.manifest.pod_spec import Workers
from rollout_operator.head_status import EngineStatus, HeadStatus
from rollout_operator.observed import PodView

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
