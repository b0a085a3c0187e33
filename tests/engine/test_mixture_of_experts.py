"""An engine with a mixture of experts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollout_api import ModelInMemory
from rollout_api.manifest.spec import Sampling
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread, ReferenceDistribution, make_model, small_qwen3_moe

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [4, 4, 2, 17]


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe"), create=small_qwen3_moe)


@pytest.fixture(scope="module")
def moe_engine(
    moe_model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> Iterator[EngineHarness]:
    config = engine_config(moe_model, replace(drafting_config, policy="marginal"))
    engine = loop.run(Engine.start(replace(config, weight_transfer="gloo")))
    yield EngineHarness(engine, loop, history_store)
    engine.close()


def test_reloaded_experts_are_those_of_the_new_weights(
    moe_engine: EngineHarness, moe_model: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", seed=9, create=small_qwen3_moe)
    sampling = Sampling(n=4, max_tokens=40, logprobs=True)
    for version, directory in ((1, other), (2, other), (0, moe_model)):
        moe_engine.loop.run(moe_engine.engine.load_weights(directory, version))
        reference = ReferenceDistribution(directory)
        for result in moe_engine.sample([PROMPT], sampling, "reloaded"):
            assert reference.max_error(PROMPT, result.token_ids, result.logprobs or (), sampling) < 1e-3


class EngineClient:
    """Lets an engine receive all weights of a sender at once."""

    def __init__(self, harness: EngineHarness, version: int) -> None:
        self._harness, self._version = harness, version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._harness.loop.run(self._harness.engine.init_weight_transfer(init_info))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        async def updates() -> AsyncIterator[dict[str, Any]]:
            yield update_info

        self._harness.loop.run(self._harness.engine.load_transferred(updates(), self._version))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass


def test_experts_that_a_trainer_sends_are_those_of_the_new_weights(
    moe_engine: EngineHarness, moe_model: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", seed=11, create=small_qwen3_moe)
    weights = ModelInMemory(AutoModelForCausalLM.from_pretrained(other, dtype="float32"), host="127.0.0.1")
    client = EngineClient(moe_engine, 3)
    weights.connect(client, 2)
    weights.send(client)
    sampling = Sampling(n=4, max_tokens=40, logprobs=True)
    for result in moe_engine.sample([PROMPT], sampling, "sent"):
        assert ReferenceDistribution(other).max_error(PROMPT, result.token_ids, result.logprobs or (), sampling) < 1e-3
    moe_engine.loop.run(moe_engine.engine.load_weights(moe_model, 4))


def test_drafted_tokens_are_those_of_the_model_and_the_cost_of_experts_is_fitted(
    moe_engine: EngineHarness, moe_model: Path
) -> None:
    reference = ReferenceDistribution(moe_model)
    greedy = Sampling(n=8, max_tokens=60, temperature=0)
    [expected, *_] = moe_engine.sample([PROMPT], greedy, "moe")
    moe_engine.add_history("moe", [list(expected.token_ids)])
    results = moe_engine.sample([PROMPT], greedy, "moe")
    text = [*PROMPT, *expected.token_ids]
    assert reference.logits([text])[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == list(expected.token_ids)
    assert [expected.token_ids] * 8 == [result.token_ids for result in results]
    assert sum(result.num_accepted_tokens for result in results) > 0.2 * sum(len(one.token_ids) for one in results)
    sampling = Sampling(n=8, max_tokens=60, logprobs=True)
    for result in moe_engine.sample([PROMPT], sampling, "moe"):
        assert reference.max_error(PROMPT, result.token_ids, result.logprobs or (), sampling) < 1e-3
    stats = moe_engine.loop.run(moe_engine.engine.stats())
    assert min(stats["cost_experts_seconds"], stats["cost_token_seconds"]) > 0
