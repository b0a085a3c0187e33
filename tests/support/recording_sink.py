"""A sink of a history that can be looked into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.history.sync import HistoryRollout, name_of


def name(rollout_id: str) -> str:
    """What the rollout of this id is called in an index."""
    return name_of(rollout_key(rollout_id))


def names(*rollout_ids: str) -> list[str]:
    """What the rollouts of these ids are called in an index."""
    return [name(rollout_id) for rollout_id in rollout_ids]


class Memory:
    """Keeps what it is given, of at most so many problems; the one that was used longest ago goes first."""

    def __init__(self, most: int = 1000) -> None:
        self.problems: dict[str, dict[str, HistoryRollout]] = {}
        self._most = most
        self._evicted: list[str] = []
        self.rewards: list[tuple[str, dict[str, float]]] = []
        """What it was told of rewards."""
        self.ages: dict[int, tuple[float, float]] = {}
        self.verified_tokens = 0
        self.knows = b"nothing"

    def add(self, problem: str, rollouts: Sequence[HistoryRollout]) -> int:
        kept = self.problems.pop(problem, {})
        before = len(kept)
        for rollout in rollouts:
            kept.setdefault(rollout[0], rollout)
        if kept:
            self.problems[problem] = kept
        while len(self.problems) > self._most:
            oldest = next(iter(self.problems))
            del self.problems[oldest]
            self._evicted.append(oldest)
        return len(kept) - before

    def reward(self, problem: str, rewards: Mapping[str, float]) -> int:
        self.rewards.append((problem, dict(rewards)))
        kept = self.problems.get(problem, {})
        known = kept.keys() & rewards.keys()
        for name in known:
            kept[name] = (*kept[name][:4], rewards[name])
        return len(known)

    def drop_before(self, problem: str, generation: int) -> int:
        kept = self.problems.get(problem, {})
        old = [name for name, rollout in kept.items() if rollout[1] < generation]
        for name in old:
            del kept[name]
        return len(old)

    def accepted_by_age(self) -> Mapping[int, tuple[float, float]]:
        return self.ages

    def verified(self) -> int:
        return self.verified_tokens

    def learned(self) -> bytes:
        return self.knows

    def take(self, learned: bytes) -> None:
        if not learned.startswith(b"of drafts"):
            raise ValueError("nothing of drafts")
        self.knows = learned

    def take_evicted(self) -> list[str]:
        evicted, self._evicted = self._evicted, []
        return evicted
