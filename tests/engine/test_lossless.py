"""Drafting changes how fast responses come, never what they are drawn from."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.engine.drafting import Drafting
from rollout_worker.engine.host import Engine, Generated
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore
from tests.support.engines import Bed, config
from tests.support.reference_model import EOS, VOCABULARY, Law, LoopThread, chi_square

PROMPT = [5, 1, 9, 2]
SAMPLES = 4000
# p-values of true nulls are uniform: a run of all these tests fails by chance about once in a thousand times
LEAST_P = 1e-4

PROMPTS = [[int(token) for token in np.random.default_rng(seed).integers(0, EOS, size=8)] for seed in range(40)]


def tokens(responses: list[Generated]) -> list[list[int]]:
    return [response.token_ids for response in responses]


def accepted_share(responses: list[Generated]) -> float:
    """Accepted draft tokens among all tokens."""
    return sum(r.accepted for r in responses) / sum(len(r.token_ids) for r in responses)


def sampled_with_drafts(bed: Bed, name: str, sampling: Sampling, samples: int = SAMPLES) -> list[Generated]:
    """Responses to PROMPT, drafted from a first few of the same law."""
    first = bed.sample([PROMPT], sampling.model_copy(update={"n": 64}), problem=name)
    bed.remember(name, tokens(first))
    return bed.sample([PROMPT], sampling.model_copy(update={"n": samples}), problem=name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("greedy", {}),
        ("penalties", {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2}),
        ("min-tokens-3", {"min_tokens": 3}),
        ("min-tokens-40", {"min_tokens": 40}),
        ("allowed", {"allowed_token_ids": [1, 3, 5, 7, 11, EOS]}),
        ("stop-token", {"stop_token_ids": [7]}),
        ("stop-string", {"stop": ["w7 w", "w3"]}),
    ],
)
def test_greedy_tokens_are_the_same_with_and_without_drafts(
    plain: Bed, drafted: Bed, name: str, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"n": 1, "temperature": 0, "max_tokens": 60, **settings})
    expected = plain.sample(PROMPTS, sampling)
    problem = f"greedy-{name}"
    drafted.remember(problem, tokens(expected)[::2])
    found = drafted.sample(PROMPTS, sampling, problem=problem)
    assert tokens(expected) == tokens(found)
    assert [r.finish_reason for r in expected] == [r.finish_reason for r in found]
    assert accepted_share(found) > 0.2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("t1", {}),
        ("t0.7", {"temperature": 0.7}),
        ("top-p", {"top_p": 0.9}),
        ("top-k", {"top_k": 20}),
        ("top-k-4", {"top_k": 4, "temperature": 1.3}),
        ("all-three", {"temperature": 0.8, "top_p": 0.8, "top_k": 6}),
        ("penalties", {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}),
        ("allowed", {"allowed_token_ids": [0, 1, 2, 5, 8, 13, 21]}),
        ("min-tokens", {"min_tokens": 4}),
        ("seeded", {"seed": 11}),
    ],
)
def test_sampled_tokens_follow_the_models_exact_law(
    drafted: Bed, law: Law, name: str, settings: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({"temperature": 1.0, "max_tokens": 5, **settings})
    responses = sampled_with_drafts(drafted, f"law-{name}", sampling)
    p, tested = chi_square(law, PROMPT, tokens(responses), sampling)
    assert p > LEAST_P
    assert tested > SAMPLES
    assert accepted_share(responses) > 0.05


def test_the_test_of_the_law_fails_for_another_law(drafted: Bed, law: Law) -> None:
    """A temperature that is off by 15% does not pass.

    So small a difference takes more samples than the law needs for its own: with 4,000, p was 2e-4 at times.
    """
    sampling = Sampling(temperature=1.0, max_tokens=5)
    responses = sampled_with_drafts(drafted, "off", sampling, samples=3 * SAMPLES)
    p, _ = chi_square(law, PROMPT, tokens(responses), sampling.model_copy(update={"temperature": 1.15}))
    assert p < LEAST_P


def test_without_the_cpu_fix_the_law_is_lost(
    model: Path, loop: LoopThread, law: Law, drafting: Drafting, redis_server: str, drafted: Bed
) -> None:
    if not loop.run(drafted.engine.stats())["sampling_mended"]:
        pytest.skip("vLLM's expand_batch_to_tokens is right on this machine: there is nothing to mend")
    broken = config(model, drafting)
    speculative = {
        "method": "custom_class",
        "model": "tests.support.unpatched_proposer.UnpatchedProposer",
        "num_speculative_tokens": drafting.max_draft_tokens,
    }
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{Path(__file__).parents[2]}{os.pathsep}{path}"
    try:
        engine = loop.run(Engine.start(replace(broken, overrides={"speculative_config": speculative})))
    finally:
        os.environ["PYTHONPATH"] = path
    try:
        history = HistoryStore(connect(redis_server), HistoryKeys("default", "engine-tests"), window=16)
        sampling = Sampling(temperature=0.7, top_p=0.9, max_tokens=5)
        responses = sampled_with_drafts(Bed(engine, loop, history), "unmended", sampling)
        p, _ = chi_square(law, PROMPT, tokens(responses), sampling)
        assert p < LEAST_P
    finally:
        engine.close()


def test_logprobs_are_those_of_the_law_with_drafts_accepted(drafted: Bed, law: Law) -> None:
    sampling = Sampling(temperature=0.7, max_tokens=20, logprobs=True)
    responses = sampled_with_drafts(drafted, "logprobs", sampling, samples=64)
    assert accepted_share(responses) > 0.05
    for response in responses:
        assert response.logprobs is not None
        assert law.worst_error(PROMPT, response.token_ids, response.logprobs, sampling) < 1e-3


def test_a_seeded_job_repeats_itself_and_its_samples_differ(drafted: Bed) -> None:
    """One stream for each rollout, whatever the job's uid; drafts would decide how a stream is used."""

    def group(uid: str, seed: int) -> list[list[int]]:
        request = RolloutRequest(
            job_uid=uid,
            request_id="r",
            problem_id="never-seen",
            prompt_token_ids=PROMPT,
            sampling=Sampling(n=6, seed=seed, max_tokens=30),
            draft_budget=0,
        )

        async def gather() -> list[Generated]:
            return list(await asyncio.gather(*(drafted.engine.generate(request, sample) for sample in range(6))))

        return tokens(drafted.loop.run(gather()))

    assert group("a", 5) == group("b", 5)
    assert group("a", 5) != group("a", 6)
    assert len({tuple(response) for response in group("a", 5)}) == 6


def test_every_token_of_the_vocabulary_occurs(drafted: Bed) -> None:
    """The model of these tests is neither flat nor certain, or they would show little."""
    responses = tokens(drafted.sample([PROMPT], Sampling(n=400, max_tokens=10)))
    seen = {token for response in responses for token in response}
    assert len(seen) >= VOCABULARY - 4
