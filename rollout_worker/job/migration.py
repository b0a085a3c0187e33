"""Which rollouts of busy engines go on on idle ones, from what engines report."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rollout_worker.engine.sampling import can_continue
from rollout_worker.job.job_store import EngineReport
from rollout_worker.job.open_request import OpenRequest
from rollout_worker.policy.rebalance import Move, Running, rebalance
from rollout_worker.policy.remaining_length import work_ahead
from rollout_worker.policy.step_cost import StepCost

_COSTS = ("cost_base_seconds", "cost_token_seconds", "cost_context_token_seconds")


def plan_migrations(
    engines: Mapping[str, EngineReport],
    held: Mapping[str, Sequence[tuple[OpenRequest, int]]],
    *,
    rate: float,
    tokens_a_step: float,
) -> list[Move]:
    """Moves among engines of one kind and weight version; none where no engine has said what its steps cost.

    Args:
        engines: those that are alive.
        held: engine → what it makes: request and sample.
        rate: tokens a second of a rollout.
        tokens_a_step: of a rollout.
    """
    costs = [
        [report.counters[name] for name in _COSTS]
        for report in engines.values()
        if all(name in report.counters for name in _COSTS)
    ]
    if len(engines) < 2 or not costs:
        return []
    cost = StepCost(*(statistics.median(values) for values in zip(*costs, strict=True)))
    now = time.monotonic()
    kinds: defaultdict[tuple[bool, int], dict[str, list[Running]]] = defaultdict(dict)
    movable: set[tuple[str, int]] = set()
    for engine, report in engines.items():
        if report.draining or report.to_come != report.version:
            continue
        running = kinds[report.plain, report.version][engine] = []
        for one, sample in held.get(engine, ()):
            ahead = one.ahead_of(sample, rate, now)
            rollout = (one.request.request_id, sample)
            context = len(one.request.prompt_token_ids) + ahead.so_far
            running.append(Running(rollout, context, work_ahead([ahead]).tokens / tokens_a_step))
            # what is pinned would begin anew where its version is not served any more
            if can_continue(one.request.sampling) and not one.cancelled and one.request.weight_version is None:
                movable.add(rollout)
    return [move for alike in kinds.values() for move in rebalance(alike, cost, movable=movable)]
