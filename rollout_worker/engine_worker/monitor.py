"""Watches the engine's process: its counters, whether it answers, and whether drafting pays."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from rollout_store.job import EngineReport
from rollout_store.job.engines import EngineError
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.running import RunningRollouts
from rollout_worker.policy.governor import SpeculationCutoff

logger = logging.getLogger(__name__)

ENGINE_STATS_INTERVAL_S = 1.0
"""Seconds between two reads of an engine's statistics."""
ENGINE_HANG_TIMEOUT_S = 300.0
"""Seconds after which an engine that does not answer is considered hung."""
LOADING_HANG_TIMEOUT_S = 1800.0
"""The same while the engine loads weights, because it answers only between two files or tensors."""
MAX_CUTOFF_DELAY_S = 600.0
"""Seconds for which an engine on which drafting does not pay waits for a moment without rollouts to be replaced."""

_STATS = (
    "decoding_steps",
    "drafting_seconds",
    "drafting_failures",
    "index_bytes",
    "cost_base_seconds",
    "cost_token_seconds",
    "cost_context_token_seconds",
    "cost_drafting_seconds",
    "cost_experts_seconds",
    "cost_error_ratio",
    "timed_seconds",
    "timed_seconds_without_drafts",
    "drafting_disabled",
    "drafting_stops",
    "trial_tokens",
    "proposed_tokens",
)
_HISTORY_STATS = ("rollouts", "tokens", "corrupt", "evictions", "failures")


class EngineMonitor:
    """Adds the drafter's statistics to the engine's report and decides when to replace the engine."""

    def __init__(
        self, engine: Engine, report: EngineReport, running: RunningRollouts, speculation_cutoff: SpeculationCutoff
    ) -> None:
        self.cutoff_reached = asyncio.Event()
        """Set when the engine should be replaced by one without speculation."""
        self._engine, self._report, self._running = engine, report, running
        self._speculation_cutoff = speculation_cutoff
        self._not_paying_since: float | None = None

    async def run(self) -> None:
        """Read the engine's statistics periodically, until cancelled.

        Raises:
            EngineError: if the engine does not answer.
        """
        while True:
            await asyncio.sleep(ENGINE_STATS_INTERVAL_S)
            stats = await self._read_stats()
            counters = {name: stats[name] for name in _STATS if name in stats}
            history: dict[str, Any] = stats.get("history", {})
            counters |= {f"history_{name}": history[name] for name in _HISTORY_STATS if name in history}
            self._report.counters |= counters
            self._report.labeled_counters = stats.get("labeled_counters", {})
            self._report.counters["measured_timestamp_seconds"] = time.time()
            if "timed_seconds" in stats and not self._report.draining:
                self._check_cutoff(stats["timed_seconds"], bool(stats["drafting_disabled"]))

    async def _read_stats(self) -> dict[str, Any]:
        started = time.monotonic()
        reading = asyncio.ensure_future(self._engine.stats())
        try:
            while not (await asyncio.wait({reading}, timeout=ENGINE_HANG_TIMEOUT_S))[0]:
                limit = ENGINE_HANG_TIMEOUT_S if self._report.loading is None else LOADING_HANG_TIMEOUT_S
                if (waited := time.monotonic() - started) >= limit:
                    raise EngineError(f"the engine hangs: it has not answered for {waited:.0f} s")
            return await reading
        finally:
            reading.cancel()

    def _check_cutoff(self, seconds: float, stopped: bool) -> None:
        """Cut speculation off where it does not pay: while the engine is idle, or at the latest after a while."""
        self._speculation_cutoff.observe(
            weight_version=self._engine.weight_version, decoding_s=seconds, drafting_disabled=stopped
        )
        if not self._speculation_cutoff.is_reached:
            self._not_paying_since = None
            return
        now = time.monotonic()
        self._not_paying_since = self._not_paying_since or now
        if not self._running or now - self._not_paying_since > MAX_CUTOFF_DELAY_S:
            self.cutoff_reached.set()
