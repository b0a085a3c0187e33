"""Responses that are handed over in parts, gone on with, and ended early."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Drafts, FinishReason, Partial, RolloutRequest, WeightSpan
from rollout_worker.engine.host import Generated
from tests.engine.test_lossless import LEAST_P, PROMPT, PROMPTS, SAMPLES, accepted_share, tokens
from tests.support.engines import MAX_DRAFT_TOKENS, Bed
from tests.support.reference_model import EOS, Law, chi_square

ENDLESS = list(range(12))
"""No end of sequence among the tokens."""


@pytest.fixture(params=["plain", "drafted"])
def bed(request: pytest.FixtureRequest) -> Bed:
    found: Bed = request.getfixturevalue(request.param)
    return found


def so_far(made: Generated, length: int) -> Partial:
    """The first tokens of a response, as they would have been checkpointed."""
    logprobs = None if made.logprobs is None else made.logprobs[:length]
    return Partial(token_ids=made.token_ids[:length], logprobs=logprobs, spans=made.spans)


def idle(bed: Bed) -> bool:
    """Whether neither vLLM nor the drafter holds a response, seen by one more."""
    bed.sample([PROMPT], Sampling(n=1, max_tokens=2))
    stats = bed.loop.run(bed.engine.stats())
    return bed.engine.counters.running == 0 and stats.get("following", 0) == 0


@pytest.mark.parametrize("every", [40, 100])
def test_no_more_than_every_tokens_are_kept_back(bed: Bed, every: int) -> None:
    sampling = Sampling(n=1, max_tokens=300, allowed_token_ids=ENDLESS, logprobs=True, temperature=0.3)
    parts: list[Partial] = []
    usage: list[float] = []

    def take(part: Partial) -> None:
        parts.append(part)
        usage.append(bed.engine.counters.kv_cache_usage)

    request = bed.request(PROMPT, sampling, "partials")
    whole = bed.loop.run(bed.engine.generate(request, 0, on_partial=take, every=every))
    assert 0 < max(usage) < 1
    lengths = [len(part.token_ids) for part in parts]
    step = 1 + (MAX_DRAFT_TOKENS if bed.engine.config.drafting else 0)
    assert int(np.diff([0, *lengths, 300]).max()) <= every
    # nor is every step handed over
    assert len(parts) <= 300 / (every - step)
    assert whole.logprobs is not None
    for part in parts:
        length = len(part.token_ids)
        assert whole.token_ids[:length] == part.token_ids
        assert whole.logprobs[:length] == part.logprobs
        assert whole.spans == part.spans == [WeightSpan(start=0, weight_version=0)]


def test_a_short_response_is_not_handed_over_in_parts(drafted: Bed) -> None:
    parts: list[Partial] = []
    for sampling, every in ((Sampling(n=1, max_tokens=30), 64), (Sampling(n=1, max_tokens=200), 0)):
        request = drafted.request(PROMPT, sampling)
        drafted.loop.run(drafted.engine.generate(request, 0, on_partial=parts.append, every=every))
    assert [] == parts


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.2},
        {"min_tokens": 20},
        {"allowed_token_ids": [1, 3, 5, 7, 11, EOS]},
        {"stop_token_ids": [7]},
    ],
)
def test_a_continued_response_is_the_uninterrupted_one(bed: Bed, settings: dict[str, object]) -> None:
    sampling = Sampling.model_validate({"n": 1, "temperature": 0, "max_tokens": 60, "logprobs": True, **settings})
    problem = f"continued-{settings}"
    whole = bed.sample(PROMPTS, sampling, problem)
    if bed.history is not None:
        bed.remember(problem, tokens(whole)[::2])
    for cut in (1, 13, 59):
        cuts = [(prompt, made) for prompt, made in zip(PROMPTS, whole, strict=True) if len(made.token_ids) > cut]
        requests = [bed.request(prompt, sampling, problem, prefix=so_far(made, cut)) for prompt, made in cuts]
        for (_, expected), found in zip(cuts, bed.loop.run(bed._gather(requests)), strict=True):
            assert expected.token_ids == found.token_ids
            assert expected.finish_reason == found.finish_reason
            assert expected.spans == found.spans
            assert expected.logprobs is not None
            assert found.logprobs is not None
            assert np.allclose(expected.logprobs, found.logprobs, atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"min_tokens": 4},
        {"seed": 11},
    ],
)
def test_a_continued_response_follows_the_law(drafted: Bed, law: Law, settings: dict[str, object]) -> None:
    problem = f"continued-law-{settings}"
    sampling = Sampling.model_validate({"n": SAMPLES, "max_tokens": 6, **settings})
    first = drafted.sample([PROMPT], sampling.model_copy(update={"max_tokens": 6, "n": 64}), problem)
    drafted.remember(problem, tokens(first))
    begun = drafted.sample(
        [PROMPT], sampling.model_copy(update={"max_tokens": 2, "min_tokens": min(2, sampling.min_tokens)}), problem
    )
    made = drafted.go_on(PROMPT, sampling.model_copy(update={"n": 1}), [so_far(one, 2) for one in begun], problem)
    p, tested = chi_square(law, PROMPT, tokens(made), sampling)
    assert p > LEAST_P
    assert tested > SAMPLES
    assert accepted_share(made) > 0.02


def test_drafts_go_on_where_the_response_stopped(drafted: Bed) -> None:
    """The first draft after a prefix comes from what followed it, and counts are vLLM's."""
    sampling = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=ENDLESS)
    whole = drafted.sample(PROMPTS, sampling, "whole")
    for number, made in enumerate(whole):
        drafted.remember(f"whole-{number}", [made.token_ids])
    counters = drafted.engine.counters
    before = (counters.drafted, counters.accepted)
    short = sampling.model_copy(update={"max_tokens": 40 + 1 + MAX_DRAFT_TOKENS + 1})
    requests = [
        drafted.request(prompt, short, f"whole-{number}", prefix=so_far(made, 40))
        for number, (prompt, made) in enumerate(zip(PROMPTS, whole, strict=True))
    ]
    found = drafted.loop.run(drafted._gather(requests))
    # one token without a draft, then all drafted tokens and one more
    assert [(MAX_DRAFT_TOKENS, 2)] * len(PROMPTS) == [(made.accepted, made.steps) for made in found]
    counted = (sum(made.drafted for made in found), sum(made.accepted for made in found))
    assert counted == (counters.drafted - before[0], counters.accepted - before[1])


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [([1, 2, 3, 4], FinishReason.LENGTH), ([1, EOS], FinishReason.STOP), ([1, 2, 3, 7], FinishReason.STOP)],
)
def test_a_prefix_that_has_ended_is_the_response(drafted: Bed, prefix: list[int], reason: FinishReason) -> None:
    before = drafted.engine.counters.prompt_tokens
    sampling = Sampling(n=1, max_tokens=4, stop_token_ids=[7])
    spans = [WeightSpan(start=0, weight_version=0)]
    [made] = drafted.go_on(PROMPT, sampling, [Partial(token_ids=prefix, spans=spans)])
    assert (prefix, reason, spans) == (made.token_ids, made.finish_reason, made.spans)
    assert before == drafted.engine.counters.prompt_tokens


async def ended_early(bed: Bed, request: RolloutRequest, *, every: int, after: int) -> tuple[Generated, list[Partial]]:
    """A response that is told to end once a part of it has come, and that part."""
    until, parts = asyncio.Event(), list[Partial]()

    def take(part: Partial) -> None:
        parts.append(part)
        if len(parts) == after:
            until.set()

    return await bed.engine.generate(request, 0, on_partial=take, every=every, until=until), parts


def test_a_response_can_be_ended_early(bed: Bed, law: Law) -> None:
    sampling = Sampling(n=1, max_tokens=500, allowed_token_ids=ENDLESS, logprobs=True)
    made, parts = bed.loop.run(ended_early(bed, bed.request(PROMPT, sampling), every=16, after=3))
    assert 0 <= made.accepted <= made.drafted
    assert made.finish_reason is None
    assert 3 == len(parts)
    assert parts[-1].token_ids == made.token_ids[: len(parts[-1].token_ids)]
    assert len(parts[-1].token_ids) <= len(made.token_ids) < 300
    assert [WeightSpan(start=0, weight_version=0)] == made.spans
    assert made.logprobs is not None
    assert law.worst_error(PROMPT, made.token_ids, made.logprobs, sampling) < 1e-3
    assert idle(bed)


@pytest.mark.parametrize("wait", [0, 1, 5, 40])
def test_it_ends_early_whenever_it_is_told_to(bed: Bed, wait: int) -> None:
    async def run() -> Generated:
        until = asyncio.Event()
        request = bed.request(PROMPT, Sampling(n=1, max_tokens=500, allowed_token_ids=ENDLESS))
        task = asyncio.create_task(bed.engine.generate(request, 0, until=until))
        for _ in range(wait):
            await asyncio.sleep(0)
        until.set()
        return await task

    made = bed.loop.run(run())
    assert made.finish_reason is None
    assert len(made.token_ids) < 300
    assert bool(made.token_ids) == bool(made.spans)
    assert idle(bed)


def test_what_has_been_buffered_is_in_a_response_that_is_ended_early(bed: Bed) -> None:
    async def run(every: int) -> Generated:
        until = asyncio.Event()
        # drafts are off, so that what vLLM sampled after it was told to end cannot pass for accepted
        sampling = Sampling(n=1, max_tokens=500, allowed_token_ids=ENDLESS, logprobs=True)
        request = bed.request(PROMPT, sampling, drafts=Drafts.OFF)
        tokens = bed.engine.counters.tokens
        task = asyncio.create_task(bed.engine.generate(request, 0, every=every, until=until))
        while bed.engine.counters.tokens < tokens + 40:
            await asyncio.sleep(0.001)
        until.set()
        return await task

    for every in (0, 400):
        made = bed.loop.run(run(every))
        assert 40 <= len(made.token_ids) < 400
        assert 0 == made.accepted
        assert made.logprobs is not None
        assert len(made.token_ids) == len(made.logprobs)


def test_a_cancelled_response_is_aborted(bed: Bed) -> None:
    async def run() -> int:
        part = asyncio.Event()
        request = bed.request(PROMPT, Sampling(n=1, max_tokens=500, allowed_token_ids=ENDLESS))
        task = asyncio.create_task(bed.engine.generate(request, 0, on_partial=lambda _: part.set(), every=16))
        await part.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return bed.engine.counters.tokens

    before = bed.loop.run(run())
    assert idle(bed)
    assert bed.engine.counters.tokens - before < 200


def test_a_request_may_ask_for_fewer_sources_of_drafts(drafted: Bed) -> None:
    sampling = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=ENDLESS)
    first = drafted.sample([PROMPT], sampling, "sources")
    drafted.remember("sources", tokens(first))
    made = {
        drafts: drafted.loop.run(
            drafted.engine.generate(drafted.request(PROMPT, sampling, "sources", drafts=drafts), 0)
        )
        for drafts in Drafts
    }
    assert 0 == made[Drafts.OFF].drafted
    assert 0 < made[Drafts.OWN_TEXT].accepted < made[Drafts.HISTORY].accepted


def test_a_request_without_a_problem_id_has_its_prompts(drafted: Bed) -> None:
    sampling = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=ENDLESS)
    request = drafted.request(PROMPT, sampling, "")
    drafted.remember(request.problem, tokens(drafted.sample([PROMPT], sampling)))
    made = drafted.loop.run(drafted.engine.generate(request, 0))
    assert made.accepted > len(made.token_ids) * 0.6


def test_cached_tokens_and_counters_tell_what_was_read(bed: Bed) -> None:
    prompt = [int(token) for token in np.random.default_rng(77).integers(0, EOS, size=300)]
    counters = bed.engine.counters
    read, cached = counters.prompt_tokens, counters.cached_tokens
    first, second = (bed.sample([prompt], Sampling(n=1, max_tokens=4))[0] for _ in range(2))
    assert 0 == first.cached_tokens
    assert 128 <= second.cached_tokens < 300
    assert 600 == counters.prompt_tokens - read
    assert second.cached_tokens == counters.cached_tokens - cached
