"""How many workers a job should have now. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from rollout_api.manifest.pod_spec import Workers
from rollout_operator.head_status import EngineStatus, HeadStatus
from rollout_operator.observed import PodView

_WORTH_A_START_S = 60.0
"""Work that is done sooner is done before another worker has loaded its model."""


def desired(workers: Workers, before: int | None, head: HeadStatus | None) -> int:
    """Workers that there should be.

    Without autoscale: ``replicas``. With it, as many as have room for all rollouts that are open, if those take longer
    than a worker takes to start, but no more than it takes to be done when the longest rollout is, which more workers
    do not make any faster; and without those that have had nothing to do for a while and for whom nothing waits.

    Args:
        workers: the manifest's section.
        before: what was desired until now.
        head: what the head said last.
    """
    if not workers.autoscale:
        return workers.replicas
    now = _within(workers, workers.replicas if before is None else before)
    if head is None or not head.engines:
        return now
    if head.waiting:
        work = head.seconds_left if head.work_seconds is None else head.work_seconds
        if work is not None and work < _WORTH_A_START_S:
            return now
        there = len({engine.worker for engine in head.engines})
        slots = sum(engine.slots for engine in head.engines) / there
        wanted = math.ceil((head.waiting + head.assigned) / max(1.0, slots))
        if work is not None and head.tail_seconds is not None:
            wanted = min(wanted, math.ceil(there * work / max(head.tail_seconds, _WORTH_A_START_S)))
        return _within(workers, max(now, wanted))
    return _within(workers, now - len(idle_workers(workers, head)))


def idle_workers(workers: Workers, head: HeadStatus) -> set[str]:
    """Pods all of whose engines have had nothing to do for ``workers.idleSeconds``."""
    by_worker: defaultdict[str, list[EngineStatus]] = defaultdict(list)
    for engine in head.engines:
        by_worker[engine.worker].append(engine)
    return {
        worker
        for worker, engines in by_worker.items()
        if all(not engine.assigned and engine.idle_seconds >= workers.idle_seconds for engine in engines)
    }


def to_give_back(live: Collection[PodView], surplus: int, workers: Workers, head: HeadStatus | None) -> list[PodView]:
    """Which workers to end when there are too many: those that do not run, then idle ones, then the newest.

    With autoscale none that has work is ended.
    """
    idle = idle_workers(workers, head) if head is not None else set()

    def rank(pod: PodView) -> int:
        if pod.phase == "Pending" or not pod.scheduled:
            return 0
        return 1 if pod.name in idle else 2

    ordered = sorted(live, key=lambda pod: (rank(pod), -pod.slot, -pod.created, pod.uid))
    if workers.autoscale:
        ordered = [pod for pod in ordered if rank(pod) < 2]
    return ordered[:surplus]


def _within(workers: Workers, count: int) -> int:
    return max(workers.least, min(workers.most, count))
