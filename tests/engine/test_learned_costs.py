"""Budgets in a real engine: what steps cost is learned, and what pays is drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_worker.engine.drafting import Drafting
from rollout_worker.engine.host import Engine
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore
from tests.support.engines import KEYS, Bed, config
from tests.support.reference_model import LoopThread

PROMPT = [4, 4, 2, 17]
LOOPS = Sampling(n=8, max_tokens=200, allowed_token_ids=[1, 2], temperature=0)


@pytest.fixture(scope="module")
def budgeted(model: Path, loop: LoopThread, drafting: Drafting, redis_server: str) -> Iterator[Bed]:
    """An engine as a job has it by default."""
    settings = replace(drafting, policy="marginal", governed=True)
    engine = loop.run(Engine.start(config(model, settings)))
    yield Bed(engine, loop, HistoryStore(connect(redis_server), KEYS, window=16))
    engine.close()


def test_what_steps_cost_is_learned_and_what_pays_is_drafted(budgeted: Bed) -> None:
    responses = budgeted.sample([PROMPT], LOOPS, problem="loop")
    stats = budgeted.loop.run(budgeted.engine.stats())
    # most steps only decode; what is timed is not what the engine waited for
    assert 0.5 * stats["steps"] < stats["timed_seconds"] / stats["cost_base_seconds"]
    assert 0 < stats["cost_error_ratio"] < 0.5
    lasted = max(response.finished - response.started for response in responses)
    assert 0 < stats["timed_seconds"] <= lasted
    assert stats["timed_seconds_without_drafts"] > 1.5 * stats["timed_seconds"]
    assert sum(response.accepted for response in responses) > 0.5 * 8 * 200
    assert 0 == stats["drafting_stops"]


def test_what_waits_is_told_the_policy(budgeted: Bed) -> None:
    budgeted.loop.run(budgeted.engine.tell_waiting(100, 1e5))
    assert 8 == len(budgeted.sample([PROMPT], LOOPS, problem="waiting"))
    budgeted.loop.run(budgeted.engine.tell_waiting(0, 0.0))
