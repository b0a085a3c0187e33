"""A sink of a history that records what it receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_api.protocol.history_encoding import rollout_key
from rollout_store.history.sync import HistoryRollout, rollout_name


def name(rollout_id: str) -> str:
    """Return the name of a rollout in an index."""
    return rollout_name(rollout_key(rollout_id))


def names(*rollout_ids: str) -> list[str]:
    """Return the names of rollouts in an index."""
    return [name(rollout_id) for rollout_id in rollout_ids]


class RecordingSink:
    """Records rollouts of a limited number of problems and evicts the least recently used one.

    Args:
        max_problems: largest number of problems.
    """

    def __init__(self, max_problems: int = 1000) -> None:
        self.problems: dict[str, dict[str, HistoryRollout]] = {}
        self._max_problems = max_problems
        self._evicted: list[str] = []
        self.rewards: list[tuple[str, dict[str, float]]] = []
        """Problem and rewards of each call of :meth:`set_rewards`."""
        self.verified_tokens = 0
        """Number of draft tokens that were verified."""
        self.num_reports = 0
        """Number of reports that have begun: each reads the number of verified tokens once."""
        self.state = b"initial"
        """The learned state."""

    def add(self, problem: str, rollouts: Sequence[HistoryRollout]) -> int:
        kept = self.problems.pop(problem, {})
        before = len(kept)
        for rollout in rollouts:
            kept.setdefault(rollout[0], rollout)
        if kept:
            self.problems[problem] = kept
        while len(self.problems) > self._max_problems:
            oldest = next(iter(self.problems))
            del self.problems[oldest]
            self._evicted.append(oldest)
        return len(kept) - before

    def set_rewards(self, problem: str, rewards: Mapping[str, float]) -> int:
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

    def verified(self) -> int:
        self.num_reports += 1
        return self.verified_tokens

    def state_dict(self) -> bytes:
        return self.state

    def load_state_dict(self, state: bytes) -> None:
        if not state.startswith(b"state"):
            raise ValueError("not a state")
        self.state = state

    def take_evicted(self) -> list[str]:
        evicted, self._evicted = self._evicted, []
        return evicted
