"""Plans migrations from the engines' reports."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rollout_worker.engine.admission import can_continue
from rollout_worker.job.coordinator.open_request import OpenRequest
from rollout_worker.job.job_store import EngineReport
from rollout_worker.policy.rebalance import Migration, PlacedRollout, plan_rebalancing
from rollout_worker.policy.remaining_length import SimilarRollouts, estimate_remaining_work
from rollout_worker.policy.step_cost import StepCost

_COST_COUNTERS = ("cost_base_seconds", "cost_token_seconds", "cost_context_token_seconds")


def plan_migrations(
    engines: Mapping[str, EngineReport],
    running: Mapping[str, Sequence[tuple[OpenRequest, int]]],
    *,
    tokens_per_second: float,
    tokens_per_step: float,
) -> list[Migration]:
    """Plan migrations among engines that serve the same weight version, with or without speculation alike.

    Args:
        engines: reports of the live engines.
        running: engine → requests and samples that are assigned to it.
        tokens_per_second: speed of one running rollout.
        tokens_per_step: tokens by which a rollout advances in a decoding step.

    Returns:
        The migrations; none as long as no engine has measured the duration of its steps.
    """
    costs = [
        [report.counters[name] for name in _COST_COUNTERS]
        for report in engines.values()
        if all(name in report.counters for name in _COST_COUNTERS)
    ]
    if len(engines) < 2 or not costs:
        return []
    cost = StepCost(*(statistics.median(values) for values in zip(*costs, strict=True)))
    now = time.monotonic()
    estimates: dict[tuple[int, int, int], tuple[SimilarRollouts, float]] = {}
    comparable: defaultdict[tuple[bool, int], dict[str, list[PlacedRollout]]] = defaultdict(dict)
    movable: set[tuple[str, int]] = set()
    for engine, report in engines.items():
        if report.draining or report.upcoming_version != report.version:
            continue
        rollouts = comparable[report.non_speculative, report.version][engine] = []
        for request, sample in running.get(engine, ()):
            remaining = request.remaining_work_of(sample, tokens_per_second, now)
            key = (request.request_id, sample)
            context_tokens = len(request.request.prompt_token_ids) + remaining.generated
            kind = id(remaining.length_stats), remaining.generated, remaining.max_tokens
            if kind not in estimates:
                estimates[kind] = remaining, estimate_remaining_work([remaining]).total_tokens
            rollouts.append(PlacedRollout(key, context_tokens, estimates[kind][1] / tokens_per_step))
            # A pinned rollout would start from the beginning if its version were not served any more.
            pinned = request.request.weight_version is not None
            if can_continue(request.request.sampling) and not request.cancelled and not pinned:
                movable.add(key)
    return [move for group in comparable.values() for move in plan_rebalancing(group, cost, movable=movable)]
