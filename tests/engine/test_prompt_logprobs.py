"""Log-probabilities of prompts, compared with those of the model in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial, RolloutRequest, UpdateMode
from rollout_store.job.admission_rules import AdmissionError
from rollout_worker.engine.response import GenerationResult
from tests.support.engines import EngineHarness
from tests.support.reference_model import EOS, ReferenceDistribution, make_model
from tests.support.responses import MAX_LOGPROB_ERROR, PROMPT, PROMPTS, WITHOUT_EOS, accepted_share, tokens_of

pytestmark = pytest.mark.v2

TOP = 3
"""Number of most likely tokens that some tests ask for."""
FILTERED = Sampling(n=1, max_tokens=20, temperature=0.5, top_p=0.6, prompt_logprobs=True)
"""Settings that must not affect the log-probabilities of the prompt."""


@pytest.fixture(params=["plain_engine", "drafting_engine"])
def engine(request: pytest.FixtureRequest) -> EngineHarness:
    harness: EngineHarness = request.getfixturevalue(request.param)
    return harness


def random_prompts(count: int, length: int) -> list[list[int]]:
    return [
        [int(token) for token in np.random.default_rng(seed).integers(0, EOS, size=length)] for seed in range(count)
    ]


def check_prompt(reference: ReferenceDistribution, prompt: Sequence[int], tokens: Partial, *, top: int = 0) -> None:
    """Compare the log-probabilities, ranks and most likely tokens of a prompt with the exact ones."""
    assert tokens.prompt_logprobs is not None
    assert len(prompt) - 1 == len(tokens.prompt_logprobs)
    exact = reference.prompt_logprobs(prompt)
    chosen = exact[range(len(exact)), list(prompt[1:])]
    assert np.allclose(chosen, tokens.prompt_logprobs, atol=MAX_LOGPROB_ERROR)
    if not top:
        assert tokens.prompt_ranks is tokens.top_prompt_logprobs is None
        return
    assert tokens.prompt_ranks is not None
    assert tokens.top_prompt_logprobs is not None
    assert list(1 + (exact > chosen[:, None]).sum(axis=1)) == tokens.prompt_ranks
    for row, likely in zip(exact, tokens.top_prompt_logprobs, strict=True):
        expected = [int(token) for token in np.argsort(-row)[:top]]
        assert expected == list(likely)
        assert np.allclose(row[expected], list(likely.values()), atol=MAX_LOGPROB_ERROR)


@pytest.mark.parametrize("top", [0, TOP])
def test_log_probabilities_of_prompts_are_the_models_own(
    engine: EngineHarness, reference: ReferenceDistribution, top: int
) -> None:
    """Neither temperature and filters nor cached keys and values change them."""
    prompts = [[7], [7, 3], *PROMPTS[:8], *random_prompts(4, 300)]
    sampling = FILTERED.model_copy(update={"top_prompt_logprobs": top})
    problem = f"prompts-{top}"
    for repetition in range(2):
        results = engine.sample(prompts, sampling, problem)
        for prompt, result in zip(prompts, results, strict=True):
            check_prompt(reference, prompt, result.tokens, top=top)
        if engine.history is not None and not repetition:
            engine.add_history(problem, tokens_of(results))
    if engine.history is not None:
        assert accepted_share(results) > 0.05


def test_log_probabilities_of_prompts_that_are_prefilled_in_chunks(
    engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    """Together, the prompts exceed the number of tokens of a step several times."""
    prompts = random_prompts(40, 400)
    assert sum(map(len, prompts)) > 2 * engine.engine.config.spec.max_num_seqs * 64
    for prompt, result in zip(prompts, engine.sample(prompts, FILTERED), strict=True):
        check_prompt(reference, prompt, result.tokens)


def test_log_probabilities_of_prompts_are_not_returned_unless_requested(engine: EngineHarness) -> None:
    [result] = engine.sample([PROMPT], FILTERED.model_copy(update={"prompt_logprobs": False}))
    assert {} == result.tokens.prompt_logprob_fields()


def test_a_continued_response_keeps_the_log_probabilities_of_its_prompt(
    engine: EngineHarness, reference: ReferenceDistribution
) -> None:
    """They are not computed again: the tokens of the prefix are not part of the prompt, and may be cached."""
    sampling = Sampling(
        n=1, max_tokens=120, allowed_token_ids=WITHOUT_EOS, prompt_logprobs=True, top_prompt_logprobs=TOP
    )
    partials: list[Partial] = []
    request = engine.request(PROMPT, sampling)
    whole = engine.loop.run(engine.engine.generate(request, 0, on_partial=partials.append, partial_interval=40))
    assert partials
    check_prompt(reference, PROMPT, whole.tokens, top=TOP)
    for partial in partials:
        assert whole.tokens.prompt_logprob_fields() == partial.prompt_logprob_fields()
    # Values that no model has computed, so that it is seen where they come from.
    known = partials[0].model_copy(update={"prompt_logprobs": [-1.5] * (len(PROMPT) - 1)})
    [continued] = engine.continue_from(PROMPT, sampling, [known])
    assert 120 == len(continued.token_ids)
    assert known.prompt_logprob_fields() == continued.tokens.prompt_logprob_fields()


def test_a_prefix_without_log_probabilities_of_the_prompt_is_rejected(engine: EngineHarness) -> None:
    [result] = engine.sample([PROMPT], Sampling(n=1, max_tokens=10, allowed_token_ids=WITHOUT_EOS))
    prefix = result.tokens.since(0).model_copy(update={"token_ids": result.token_ids[:5]})
    sampling = Sampling(n=1, max_tokens=20, prompt_logprobs=True)
    with pytest.raises(AdmissionError, match=r"sampling.promptLogprobs requires .* prompt_logprobs or omit the prefix"):
        engine.continue_from(PROMPT, sampling, [prefix])
    prefix = prefix.model_copy(update={"prompt_logprobs": [-1.0] * (len(PROMPT) - 1)})
    with pytest.raises(AdmissionError, match=r"sampling.topPromptLogprobs requires prompt_ranks"):
        engine.continue_from(PROMPT, sampling.model_copy(update={"top_prompt_logprobs": 1}), [prefix])


def test_log_probabilities_of_a_prompt_belong_to_the_version_of_the_first_token(
    engine: EngineHarness, reference: ReferenceDistribution, model: Path, tmp_path: Path
) -> None:
    """Weights are loaded while prompts wait, are prefilled, and have been prefilled."""
    other = ReferenceDistribution(make_model(tmp_path, seed=9))
    prompts = random_prompts(48, 400)
    sampling = Sampling(n=1, max_tokens=40, allowed_token_ids=WITHOUT_EOS, prompt_logprobs=True)

    async def run(requests: Sequence[RolloutRequest]) -> list[GenerationResult]:
        started = asyncio.Event()
        calls = [
            asyncio.ensure_future(engine.engine.generate(request, 0, on_tokens=lambda _: started.set()))
            for request in requests
        ]
        await started.wait()
        await engine.engine.load_weights(tmp_path, 1, UpdateMode.RECOMPUTE)
        return list(await asyncio.gather(*calls))

    try:
        results = engine.loop.run(run([engine.request(prompt, sampling) for prompt in prompts]))
        firsts = [result.weight_spans[0].weight_version for result in results]
        assert {0, 1} == set(firsts)
        for prompt, result, version in zip(prompts, results, firsts, strict=True):
            check_prompt((reference, other)[version], prompt, result.tokens)
    finally:
        engine.loop.run(engine.engine.load_weights(model, 0))
