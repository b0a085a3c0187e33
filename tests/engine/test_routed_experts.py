"""The routed experts of an engine with a mixture of experts, compared with those of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_api.arrays import routed_experts_array
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import UpdateMode
from rollout_store.history.store import HistoryStore
from rollout_store.job.admission_rules import AdmissionError, check_admission
from rollout_store.job.engines import EngineError
from rollout_worker.engine.draft_settings import DraftingConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.response import GenerationResult, routed_experts_of
from tests.support.engines import USES_V2, EngineHarness, engine_config, needs_v2
from tests.support.reference_model import EOS, LoopThread, make_model, small_qwen3_moe
from tests.support.responses import PROMPTS, WITHOUT_EOS, accepted_share, prefix_of, tokens_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.v2]

ARGUMENT = {"enable_return_routed_experts": True}
SAMPLING = Sampling(n=1, max_tokens=60, allowed_token_ids=WITHOUT_EOS, routed_experts=True)
_TIE = 1e-4
"""Experts whose router logits differ by less than this may be exchanged by rounding."""


class Router:
    """The routers of a model, computed in float32."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def agreement(self, tokens: Sequence[int], result: GenerationResult) -> float:
        """Return the share of a response's tokens and layers whose experts are those of the model, ties included."""
        assert result.routed_experts is not None
        found = routed_experts_array(result.routed_experts)
        text = [*tokens, *result.token_ids][:-1]
        with torch.inference_mode():
            logits = self._model(torch.tensor([text]), output_router_logits=True).router_logits
        assert (len(text), len(logits), 2) == found.shape
        assert (found[..., 0] != found[..., 1]).all()
        agreeing = 0
        for layer, scores in enumerate(logits):
            best = scores.topk(2).values[:, -1:]
            chosen = torch.gather(scores, 1, torch.tensor(found[:, layer].astype(np.int64)))
            agreeing += int(((chosen > best - _TIE).all(dim=1)).sum())
        return agreeing / (len(text) * len(logits))


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe"), create=small_qwen3_moe)


@pytest.fixture(scope="module", params=["plain", "drafting"])
def moe_engine(
    request: pytest.FixtureRequest,
    moe_model: Path,
    loop: LoopThread,
    drafting_config: DraftingConfig,
    history_store: HistoryStore,
) -> Iterator[EngineHarness]:
    config = engine_config(moe_model, drafting_config if request.param == "drafting" else None)
    spec = config.spec.model_copy(update={"extra_args": ARGUMENT})
    engine = loop.run(Engine.start(replace(config, spec=spec)))
    yield EngineHarness(engine, loop, history_store if request.param == "drafting" else None)
    engine.close()


@needs_v2
def test_experts_are_those_of_the_model(moe_engine: EngineHarness, moe_model: Path) -> None:
    """With and without drafts, cached prompts, and prompts that are prefilled in several steps."""
    long = [[int(token) for token in np.random.default_rng(seed).integers(0, EOS, size=300)] for seed in range(16)]
    router = Router(moe_model)
    for prompts in (PROMPTS, PROMPTS, long, long):
        results = moe_engine.sample(prompts, SAMPLING, "experts")
        for prompt, result in zip(prompts, results, strict=True):
            assert router.agreement(prompt, result) == 1.0
        if moe_engine.history is not None:
            moe_engine.add_history("experts", tokens_of(results))
    if moe_engine.history is not None:
        assert accepted_share(results) > 0.05


@needs_v2
def test_experts_are_returned_only_if_requested(moe_engine: EngineHarness) -> None:
    [result] = moe_engine.sample(PROMPTS[:1], SAMPLING.model_copy(update={"routed_experts": False}))
    assert result.routed_experts is None


@needs_v2
def test_experts_of_continued_and_interrupted_responses(moe_engine: EngineHarness, moe_model: Path) -> None:
    """The engine that continues a response routes the tokens of its prefix, too."""
    router = Router(moe_model)
    [prompt] = PROMPTS[:1]
    [whole] = moe_engine.sample([prompt], SAMPLING)
    [continued] = moe_engine.continue_from(prompt, SAMPLING, [prefix_of(whole, 20)])
    assert whole.token_ids[:20] == continued.token_ids[:20]
    assert router.agreement(prompt, continued) == 1.0
    # vLLM does not look for the stop string of a continued response. The prefix contains none.
    first = f"w{whole.token_ids[0]}"
    stopping = SAMPLING.model_copy(
        update={"stop": [word for word in map("w{}".format, range(12)) if word not in first]}
    )
    [stopped] = moe_engine.continue_from(prompt, stopping, [prefix_of(whole, 1)])
    assert 1 < len(stopped.token_ids) < SAMPLING.max_tokens
    assert router.agreement(prompt, stopped) == 1.0

    async def interrupt() -> GenerationResult:
        stop = asyncio.Event()
        request = moe_engine.request(prompt, SAMPLING.model_copy(update={"max_tokens": 400}))
        running = moe_engine.engine.generate(request, 0, stop_event=stop, on_tokens=lambda _: stop.set())
        return await running

    interrupted = moe_engine.loop.run(interrupt())
    assert 0 < len(interrupted.token_ids) < 400
    assert router.agreement(prompt, interrupted) == 1.0


@needs_v2
def test_tokens_keep_the_experts_of_the_weights_that_sampled_them(
    moe_engine: EngineHarness, moe_model: Path, tmp_path: Path
) -> None:
    """Weights are loaded while responses run, which the new weights process again from the start."""
    other = make_model(tmp_path, seed=9, create=small_qwen3_moe)
    routers = Router(moe_model), Router(other)
    sampling = SAMPLING.model_copy(update={"max_tokens": 300})

    async def run() -> list[GenerationResult]:
        started = asyncio.Event()
        tasks = [
            asyncio.ensure_future(
                moe_engine.engine.generate(moe_engine.request(prompt, sampling), 0, on_tokens=lambda _: started.set())
            )
            for prompt in PROMPTS
        ]
        async with asyncio.timeout(60):
            await started.wait()
        await asyncio.sleep(0.3)
        await moe_engine.engine.load_weights(other, 1, UpdateMode.RECOMPUTE)
        return list(await asyncio.gather(*tasks))

    try:
        results = moe_engine.loop.run(run())
        switched = 0
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert result.routed_experts is not None
            assert len(prompt) + len(result.token_ids) - 1 == result.routed_experts.shape[0]
            if [0, 1] != [span.weight_version for span in result.weight_spans]:
                continue
            switched += 1
            # The first tokens were routed by the first weights.
            start = result.weight_spans[1].start
            rows = routed_experts_array(result.routed_experts)[: len(prompt) + start - 1]
            first = replace(
                result, token_ids=result.token_ids[:start], routed_experts=routed_experts_of(rows, len(prompt) + start)
            )
            assert routers[0].agreement(prompt, first) == 1.0
            assert routers[1].agreement(prompt, first) < 0.9
        assert switched
    finally:
        moe_engine.loop.run(moe_engine.engine.load_weights(moe_model, 0))


def test_engines_without_the_argument_refuse_the_request() -> None:
    with pytest.raises(AdmissionError, match=r"sampling.routedExperts needs engine.extraArgs: .*V2 model runner"):
        check_admission(SAMPLING, 10, max_model_len=2048)
    check_admission(SAMPLING, 10, max_model_len=2048, routed_experts=True)


@pytest.mark.skipif(USES_V2, reason="run without VLLM_USE_V2_MODEL_RUNNER=1: V2 accepts the argument")
def test_an_engine_with_the_v1_model_runner_does_not_start(moe_model: Path, loop: LoopThread) -> None:
    config = engine_config(moe_model)
    spec = config.spec.model_copy(update={"extra_args": ARGUMENT})
    with pytest.raises(EngineError, match="requires Model Runner V2"):
        loop.run(Engine.start(replace(config, spec=spec)))


def test_rows_that_are_missing_or_surplus() -> None:
    rows = np.arange(3 * 2 * 2, dtype=np.uint16).reshape(3, 2, 2)
    experts = routed_experts_of(rows, 3)
    assert experts is not None
    assert ([2, 2, 2], "uint16") == (experts.shape, experts.dtype)
    assert np.array_equal(rows[:2], routed_experts_array(experts))
    assert routed_experts_of(rows, 5) is None
    assert routed_experts_of(None, 5) is None
