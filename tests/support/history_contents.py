"""Creates histories with rollouts for tests, and reads what they contain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Redis
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import HistoryStore

KEYS = HistoryKeys("default", "math")
"""Keys of a history."""
OTHER = HistoryKeys("team", "code")
"""Keys of another history."""
WINDOW = 4
"""Generations per problem that :func:`open_history` keeps."""


def open_history(
    client: Redis, keys: HistoryKeys = KEYS, max_bytes: int | None = None, window: int = WINDOW
) -> HistoryStore:
    """Create a history, or change the settings of an existing one."""
    store = HistoryStore(client, keys, window=window)
    store.metadata.open("tokenizer", "model", max_bytes=max_bytes)
    return store


def fill(store: HistoryStore, problems: Iterable[str], rollouts: int = 4, generation: int = 1) -> None:
    """Append rollouts ``<problem>-<generation>-<number>`` of 400 random tokens to each problem."""
    for problem in problems:
        records = [random_record(f"{problem}-{generation}-{number}", generation) for number in range(rollouts)]
        store.append_all([(problem, record) for record in records], newest=generation)


def random_record(rollout_id: str, generation: int = 1, length: int = 400) -> HistoryRecord:
    """Return a finished rollout of random tokens."""
    rng = np.random.default_rng(int.from_bytes(rollout_id.encode(), "little"))
    tokens = rng.integers(0, 60_000, length).astype(np.uint32)
    return HistoryRecord(rollout_id, "run", generation, generation, tokens, "stop")


def problem_ids(store: HistoryStore) -> list[str]:
    """Return the ids of a history's problems, least recently used first."""
    return [problem.problem_id for problem in store.catalog.problems()]


def age_history(client: Redis, keys: HistoryKeys, seconds: float) -> None:
    """Move the last use and the last change of all problems of a history into the past."""
    for problem in HistoryStore(client, keys, window=WINDOW).catalog.problems():
        shard = keys.shard_of(problem.problem_id)
        client.zincrby(keys.last_used(shard), -seconds, problem.problem_id)
        client.zincrby(keys.last_changed(shard), -seconds * 1e6, problem.problem_id)


def read_rollouts(server: redis.Redis, keys: HistoryKeys, problem: str | None = None) -> list[HistoryRecord]:
    """Return the rollouts of a history, of all problems or of one."""
    store = HistoryStore(server, keys, window=16)
    problems = [problem] if problem else [one.problem_id for one in store.catalog.problems()]
    slices = store.read(dict.fromkeys(problems, START), count=1_000_000)
    return [record for found in slices.values() for record in found.records]


def rollout_ids_in(server: redis.Redis, keys: HistoryKeys, problem: str | None = None) -> Counter[str]:
    """Return how often a history contains each rollout, of all problems or of one."""
    return Counter(record.rollout_id for record in read_rollouts(server, keys, problem))
