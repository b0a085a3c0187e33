"""Engines with settings of their own, and what is reported if vLLM does not accept them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_api.manifest.spec import Sampling
from rollout_store.history.store import HistoryStore
from rollout_store.job.engines import EngineError
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from tests.support.engines import EngineHarness, engine_config
from tests.support.reference_model import LoopThread
from tests.support.responses import PROMPT, PROMPTS, accepted_share, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MAX_BATCHED_TOKENS = 96


@contextmanager
def started(model: Path, loop: LoopThread, drafting: DraftingConfig | None, **fields: Any) -> Iterator[Engine]:
    """Start an engine with some fields of ``spec.engine``, and stop it."""
    config = engine_config(model, drafting)
    spec = config.spec.model_copy(update=fields)
    engine = loop.run(Engine.start(replace(config, spec=spec)))
    try:
        yield engine
    finally:
        engine.close()


def test_extra_args_reach_vllm_and_engines_sample_different_responses(
    model: Path, loop: LoopThread, drafting_config: DraftingConfig, history_store: HistoryStore
) -> None:
    sampling = Sampling(n=1, max_tokens=60, allowed_token_ids=list(range(20)))
    extra_args = {"max_num_batched_tokens": MAX_BATCHED_TOKENS, "hf_overrides": {"das_test": 7}}
    responses = []
    for _ in range(2):
        with started(model, loop, drafting_config, extra_args=extra_args) as engine:
            vllm_config = engine._client.llm.vllm_config
            assert MAX_BATCHED_TOKENS == vllm_config.scheduler_config.max_num_batched_tokens
            assert 7 == vllm_config.model_config.hf_config.das_test
            harness = EngineHarness(engine, loop, history_store)
            responses.append(harness.sample([PROMPT], sampling)[0].token_ids)
            assert 64 == len(harness.sample([PROMPT], Sampling(n=64, max_tokens=10), "batch"))
    # With vLLM's default seed, the first responses to the same prompt would be equal.
    assert responses[0] != responses[1]


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"max_num_batched_token": 96}, "did you mean max_num_batched_tokens"),
        ({"max_num_batched_tokens": "many"}, "engine.extraArgs max_num_batched_tokens"),
        ({"compilation_config": {"cudagraph_mod": "NONE"}}, "cudagraph_mod"),
        ({"max_num_batched_tokens": 8}, "max_num_seqs"),
    ],
)
def test_arguments_that_vllm_does_not_accept_are_reported(
    model: Path, loop: LoopThread, extra_args: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(EngineError, match=re.escape(message)) as error,
        started(model, loop, None, extra_args=extra_args),
    ):
        pass
    assert "vLLM does not start with" in str(error.value)


def test_drafts_do_not_change_what_an_engine_with_an_fp8_kv_cache_samples(
    model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
    plain_engine: EngineHarness,
) -> None:
    sampling = Sampling(n=1, max_tokens=40, temperature=0)
    with started(model, loop, None, kv_cache_dtype="fp8") as engine:
        expected = EngineHarness(engine, loop).sample(PROMPTS, sampling)
    with started(model, loop, drafting_config, kv_cache_dtype="fp8") as engine:
        harness = EngineHarness(engine, loop, history_store)
        harness.add_history("fp8", tokens_of(expected))
        actual = harness.sample(PROMPTS, sampling, "fp8")
    assert tokens_of(expected) == tokens_of(actual)
    assert accepted_share(actual) > 0.3
    # The data type does change the model.
    assert tokens_of(expected) != tokens_of(plain_engine.sample(PROMPTS, sampling))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_an_engine_samples_in_the_requested_data_type(dtype: str, model: Path, loop: LoopThread) -> None:
    """On CPUs with matrix tiles, vLLM uses other kernels for bfloat16."""
    with started(model, loop, None, dtype=dtype) as engine:
        (result,) = EngineHarness(engine, loop).sample([PROMPT], Sampling(n=1, max_tokens=40, temperature=0))
        assert result.token_ids
