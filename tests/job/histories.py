"""What is in a history, as a test counts it."""

from __future__ import annotations

from collections import Counter

import redis

from rollout_api.keys import HistoryKeys
from rollout_worker.history.store import START, HistoryStore


def ids_in(server: redis.Redis, keys: HistoryKeys) -> Counter[str]:
    """How often each rollout is in a history."""
    problems = {key.decode().split("{")[1].split("}")[0] for key in server.scan_iter(keys.log("*"), count=1000)}
    slices = HistoryStore(server, keys, window=16).read(dict.fromkeys(problems, START), count=1_000_000)
    return Counter(record.rollout_id for found in slices.values() for record in found.records)
