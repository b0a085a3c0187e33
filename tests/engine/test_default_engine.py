"""An engine with the default draft policy of a job. Step times matter: these tests run alone (see the Makefile)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.serial]

PROMPT = [4, 4, 2, 17]
REPETITIVE = Sampling(n=8, max_tokens=200, allowed_token_ids=[1, 2], temperature=0)


@pytest.fixture(scope="module")
def default_engine(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> Iterator[EngineHarness]:
    """An engine with the default policy of a job."""
    engine = loop.run(Engine.start(engine_config(model, replace(drafting_config, policy="marginal", governed=True))))
    yield EngineHarness(engine, loop, history_store)
    engine.close()


def test_the_cost_model_is_fitted_and_drafts_that_pay_are_verified(default_engine: EngineHarness) -> None:
    results = default_engine.sample([PROMPT], REPETITIVE, "loop")
    stats = default_engine.loop.run(default_engine.engine.stats())
    # Most steps decode only and are measured; the time in which the engine waits is not.
    assert 0.5 * stats["decoding_steps"] < stats["timed_seconds"] / stats["cost_base_seconds"]
    assert 0 < stats["cost_error_ratio"] < 0.5
    duration = max(result.finished - result.started for result in results)
    assert 0 < stats["timed_seconds"] <= duration
    assert stats["timed_seconds_without_drafts"] > 1.5 * stats["timed_seconds"]
    assert sum(result.num_accepted_tokens for result in results) > 0.5 * 8 * 200
    assert 0 == stats["drafting_stops"]
