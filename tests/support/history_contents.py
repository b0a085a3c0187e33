"""What is in a history, as a test counts it."""

from __future__ import annotations

from collections import Counter

import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.history.store import START, HistoryStore


def ids_in(server: redis.Redis, keys: HistoryKeys) -> Counter[str]:
    """How often each rollout is in a history."""
    store = HistoryStore(server, keys, window=16)
    slices = store.read(dict.fromkeys((one.problem for one in store.problems()), START), count=1_000_000)
    return Counter(record.rollout_id for found in slices.values() for record in found.records)
