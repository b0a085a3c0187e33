"""Lets engines pass broadcast weights on to those that have missed them.

Weights that were broadcast are in no directory. An engine that joins after the broadcast can receive them only from an
engine that has them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout_worker.job.coordinator.fenced_orders import FencedOrders
from rollout_worker.job.job_store import EngineReport, Order
from rollout_worker.job.limits import CoordinatorLimits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passing:
    """The passing of weights from one engine to another that was ordered."""

    source: str
    """Id of the engine that has the weights."""
    target: str
    """Id of the engine that has missed them."""
    version: int
    loads: int
    """Number of attempts of the target to load weights, before this one."""
    deadline: float
    """``time.monotonic()`` until which the target must have begun to receive them."""


def find_waiting_engines(engines: Mapping[str, EngineReport]) -> set[str]:
    """Return the engines that get no rollouts because another engine can pass them the weights that they have missed.

    If no engine can, they serve the weights that they have.
    """
    return {
        engine
        for engine, report in engines.items()
        if report.missed is not None and any(other.has_full_weights(report.missed) for other in engines.values())
    }


def find_engines_without_source(version: int, engines: Mapping[str, EngineReport]) -> list[str]:
    """Return the engines that do not know yet that no engine can pass them the full weights of *version*."""
    if any(report.has_full_weights(version) for report in engines.values()):
        return []
    return [
        engine
        for engine, report in engines.items()
        if report.missed == version and report.loading is None and version not in report.failed
    ]


@dataclass
class PassingPlanner:
    """Decides which engine passes its weights on to which other one. Pure.

    Each engine serves one other at a time. Since those that have received the weights pass them on as well, the number
    of engines that have them doubles with each round.
    """

    timeout_s: float
    """Seconds that a target has to begin receiving."""
    _ordered: dict[str, Passing] = field(default_factory=dict)
    """Target → the passing to it that is in progress."""
    _uses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Target and source → how often the source was ordered to pass its weights on to the target."""

    def plan(self, version: int | None, engines: Mapping[str, EngineReport], now: float) -> list[Passing]:
        """Return what should be ordered now.

        Args:
            version: version of the broadcast weights that all engines should have; None if there are none.
            engines: reports of the live engines by id.
            now: ``time.monotonic()``.
        """
        self._ordered = {
            target: passing
            for target, passing in self._ordered.items()
            if passing.version == version and _in_progress(passing, engines, now)
        }
        self._uses = Counter({key: count for key, count in self._uses.items() if engines.keys() >= set(key)})
        if version is None:
            return []
        busy = {passing.source for passing in self._ordered.values()}
        sources = {
            engine: report
            for engine, report in engines.items()
            if report.has_full_weights(version) and report.loading is None and engine not in busy
        }
        planned = []
        for target, report in engines.items():
            if target in self._ordered or not _can_receive(report, version) or not sources:
                continue
            source = min(sources, key=lambda source: (self._uses[target, source], sources[source].pinned))
            del sources[source]
            self._uses[target, source] += 1
            planned.append(Passing(source, target, version, report.loads, now + self.timeout_s))
        self._ordered |= {passing.target: passing for passing in planned}
        return planned


def _can_receive(report: EngineReport, version: int) -> bool:
    """Return whether an engine can receive weights now: it must first finish rollouts that are pinned to its own."""
    return report.missed == version and report.loading is None and not report.pinned and not report.draining


def _in_progress(passing: Passing, engines: Mapping[str, EngineReport], now: float) -> bool:
    target = engines.get(passing.target)
    if target is None or target.missed != passing.version or passing.source not in engines:
        return False
    if target.loading is not None:
        return True
    return target.loads == passing.loads and now < passing.deadline


class WeightPassing:
    """Orders engines to pass their weights on to others."""

    def __init__(self, orders: FencedOrders, limits: CoordinatorLimits) -> None:
        self._orders, self._planner = orders, PassingPlanner(limits.passing_timeout_s)
        self._told: dict[str, tuple[int, int]] = {}
        """Engine → the version for which it was told last that it has no source, and its attempts until then."""

    async def update(self, version: int | None, engines: Mapping[str, EngineReport]) -> None:
        """Order what is possible now; what was interrupted is ordered again, from another engine if there is one.

        Args:
            version: version of the broadcast weights that all engines should have; None if there are none.
            engines: reports of the live engines by id.
        """
        for passing in self._planner.plan(version, engines, time.monotonic()):
            logger.info(
                "Engine %s passes weight version %d on to engine %s.", passing.source, passing.version, passing.target
            )
            await self._orders.send(passing.source, [Order.send_weights(passing.target, passing.version)])
        await self._tell_missing_sources(version, engines)

    async def _tell_missing_sources(self, version: int | None, engines: Mapping[str, EngineReport]) -> None:
        """Tell engines, once after each attempt to load weights, that no engine has those that they have missed."""
        self._told = {engine: told for engine, told in self._told.items() if engine in engines}
        if version is None:
            return
        for engine in find_engines_without_source(version, engines):
            if self._told.get(engine) != (attempt := (version, engines[engine].loads)):
                self._told[engine] = attempt
                await self._orders.send(engine, [Order.keep_weights(version)])
