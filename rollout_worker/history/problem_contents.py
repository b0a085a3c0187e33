"""All rollouts of one problem that are in the history's window, with their rewards."""

from __future__ import annotations

from typing import NamedTuple

from rollout_api.protocol.length_entries import rollout_key
from rollout_worker.history.metadata import HistoryInfo
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import HistoryStore


class ProblemContents(NamedTuple):
    """The rollouts of one problem."""

    records: list[HistoryRecord]
    """Those in the history's window, oldest first."""
    rewards: dict[bytes, float]
    """Rewards by ``rollout_key``."""
    num_corrupt: int
    """Number of entries that cannot be read."""

    def reward(self, record: HistoryRecord) -> float | None:
        """Return the reward of a rollout; None if it has none."""
        return self.rewards.get(rollout_key(record.rollout_id))


def read_problem(store: HistoryStore, problem_id: str, info: HistoryInfo) -> ProblemContents:
    """Read a problem's rollouts.

    Raises:
        redis.RedisError: if Redis fails.
    """
    records: dict[str, HistoryRecord] = {}
    corrupt: set[str] = set()
    rewards: dict[bytes, float] = {}
    for log_slice in store.read_all(problem_id):
        records |= {record.rollout_id: record for record in log_slice.records}
        corrupt.update(entry.entry_id for entry in log_slice.corrupt)
        rewards |= log_slice.rewards or {}
    oldest = info.oldest_kept(record.generation for record in records.values())
    return ProblemContents(
        [record for record in records.values() if record.generation >= oldest], rewards, len(corrupt)
    )
