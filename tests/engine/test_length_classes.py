"""An engine of a job whose draft policy depends on the lengths of the history's rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_api.manifest.spec import PolicyName, Sampling
from rollout_api.protocol.history_encoding import decode_draft_sources
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread
from tests.support.responses import PROMPT, WITHOUT_EOS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

LENGTHS = {"short": 20, "medium": 50, "long": 100}
"""Tokens of the earlier responses of each problem."""


@pytest.fixture
def start(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> Iterator[Callable[[PolicyName], EngineHarness]]:
    """Starts an engine with a draft policy."""
    with ExitStack() as engines:

        def start(policy: PolicyName) -> EngineHarness:
            engine = loop.run(Engine.start(engine_config(model, replace(drafting_config, policy=policy))))
            engines.callback(engine.close)
            return EngineHarness(engine, loop, history_store)

        yield start


def test_an_engine_learns_what_the_lengths_of_a_problem_say_about_new_ones(
    start: Callable[[PolicyName], EngineHarness],
) -> None:
    engine = start("marginal-with-lengths")
    lengths = {"short": 30, "long": 200}
    for problem, length in lengths.items():
        engine.add_history(problem, [[7] * length] * 4)
    drafted = 0
    for _ in range(4):
        for problem, length in lengths.items():
            sampling = Sampling(n=1, max_tokens=length, temperature=0, allowed_token_ids=WITHOUT_EOS)
            (result,) = engine.sample([PROMPT], sampling, problem)
            assert len(result.token_ids) == length
            drafted += result.num_draft_tokens
    stats = engine.loop.run(engine.engine.stats())
    assert drafted > 0
    assert stats["length_explained_ratio"] > 0
    assert stats["labeled_counters"]["class_steps"]["long"] > 0
    assert stats["drafting_failures"] == 0


def test_a_rollout_is_drafted_for_according_to_its_class(start: Callable[[PolicyName], EngineHarness]) -> None:
    engine = start("das-classes")

    def sample(problem: str, tokens: int) -> tuple[list[int], bytes, int, str]:
        sampling = Sampling(n=1, max_tokens=tokens, temperature=0, allowed_token_ids=WITHOUT_EOS)
        (result,) = engine.sample([PROMPT], sampling, problem)
        codes = decode_draft_sources(result.draft_sources or b"").ljust(len(result.token_ids), b"\0")
        return result.token_ids, codes, result.num_draft_tokens, result.length_class

    expected, _, _, length_class = sample("new", 100)
    assert length_class == "long"  # nothing is known of its problem
    for problem, length in LENGTHS.items():
        engine.add_history(problem, [expected[:length]] * 4)
    for problem in ("medium", "long"):
        tokens, codes, _, length_class = sample(problem, 40)
        assert (tokens, length_class) == (expected[:40], problem)
        assert sum(map(bool, codes)) > 10
    tokens, _, drafted, length_class = sample("short", 20)
    assert (tokens, drafted, length_class) == (expected[:20], 0, "short")
    # After 64 tokens, it is longer than all earlier rollouts of its problem.
    tokens, codes, drafted, length_class = sample("short", 100)
    assert (tokens, length_class) == (expected, "long")
    assert not any(codes[:64])
    assert any(codes[64:])
    counters = engine.loop.run(engine.engine.stats())["labeled_counters"]
    assert counters["class_rollouts"] == {"long": 0, "medium": 0, "short": 0}
    assert counters["class_budget_tokens"]["short"] == 0 < counters["class_steps"]["short"]
