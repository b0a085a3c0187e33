"""Statistics of a history: how long rollouts are, and how well drafts from rollouts of each age are accepted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import NUM_SHARDS, HistoryKeys
from rollout_api.protocol.length_entries import LengthEntry, unpack_entries, unpack_recent
from rollout_api.redis_client.server_functions import Call, Function, Redis, run
from rollout_worker.history.queries import query_problems

_DECAY = Function(__package__, "decay")


class HistoryStatistics:
    """Lengths, rewards and acceptance counts of one history."""

    def __init__(self, client: Redis, keys: HistoryKeys) -> None:
        self._client = client
        self._keys = keys

    # Lengths and rewards

    def length_entries(self, problem_id: str) -> list[LengthEntry]:
        """Return lengths and rewards of a problem's rollouts."""
        stored: Any = self._client.hgetall(self._keys.lengths(problem_id))
        return unpack_entries(stored)

    def length_entries_by_problem(self, problem_ids: Iterable[str]) -> dict[str, list[LengthEntry]]:
        """Return lengths and rewards of several problems; none for a problem with a key of the wrong type."""
        stored = query_problems(
            self._client, problem_ids, lambda pipeline, problem_id: pipeline.hgetall(self._keys.lengths(problem_id))
        )
        return {problem_id: unpack_entries(entries or {}) for problem_id, entries in stored.items()}

    def rewards(self, problem_id: str) -> dict[bytes, float]:
        """Return rewards of a problem's rollouts, by ``rollout_key``."""
        return rewards_of(self.length_entries(problem_id))

    def length_stats(self, problem_id: str | None = None) -> LengthStats:
        """Return length statistics of a problem's rollouts; of the latest rollouts of all problems if it is None."""
        if problem_id is not None:
            return self.length_stats_by_problem([problem_id])[problem_id]
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(NUM_SHARDS):
            pipeline.lrange(self._keys.recent_lengths(shard), 0, -1)
        return LengthStats.from_lengths(unpack_recent(entry for reply in pipeline.execute() for entry in reply))

    def length_stats_by_problem(self, problem_ids: Iterable[str]) -> dict[str, LengthStats]:
        """Return length statistics of several problems; empty ones for a problem with a key of the wrong type."""
        entries_by_problem = self.length_entries_by_problem(problem_ids)
        return {problem_id: length_stats_of(entries) for problem_id, entries in entries_by_problem.items()}

    # Acceptance by age

    def add_acceptance(self, by_age: Mapping[int, tuple[float, float]]) -> None:
        """Add numbers of (drafted, accepted) draft tokens by the age, in generations, of the rollouts behind them."""
        pipeline = self._client.pipeline(transaction=False)
        for age, (drafted, accepted) in by_age.items():
            pipeline.hincrbyfloat(self._keys.acceptance_by_age, f"{age}:drafted", drafted)
            pipeline.hincrbyfloat(self._keys.acceptance_by_age, f"{age}:accepted", accepted)
        pipeline.execute()

    def acceptance_by_age(self) -> dict[int, tuple[float, float]]:
        """Return numbers of (drafted, accepted) draft tokens by age, since they were reset last."""
        stored: Any = self._client.hgetall(self._keys.acceptance_by_age)
        by_age: defaultdict[int, dict[bytes, float]] = defaultdict(dict)
        for name, value in stored.items():
            age, _, count = name.partition(b":")
            by_age[int(age)][count] = float(value)
        return {
            age: (counts.get(b"drafted", 0.0), counts.get(b"accepted", 0.0)) for age, counts in sorted(by_age.items())
        }

    def decay_acceptance(self, generation: int, half_life: int) -> None:
        """Decay the acceptance counts, once for each new generation.

        Args:
            generation: the newest generation.
            half_life: number of generations after which a count is worth half.
        """
        call = Call(_DECAY, [self._keys.acceptance_by_age, self._keys.meta], [generation, half_life])
        run(self._client, call)

    def reset_acceptance(self) -> None:
        """Delete the acceptance counts, because those that follow are measured with another age limit."""
        self._client.delete(self._keys.acceptance_by_age)


def rewards_of(entries: Iterable[LengthEntry]) -> dict[bytes, float]:
    """Return the rewards in a problem's length entries, by ``rollout_key``."""
    return {entry.key: entry.reward for entry in entries if entry.reward is not None and math.isfinite(entry.reward)}


def length_stats_of(entries: Iterable[LengthEntry]) -> LengthStats:
    """Return length statistics of a problem's length entries."""
    return LengthStats.from_lengths((entry.generation, entry.length, entry.cut_off) for entry in entries)
