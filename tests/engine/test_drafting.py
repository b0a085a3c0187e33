"""Drafting in a running engine: counts, limits, and independence from Redis."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
import redis

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import SAMPLED, decode_draft_sources
from rollout_api.protocol.messages import DraftMode
from tests.support.engines import MAX_DRAFT_TOKENS, EngineHarness
from tests.support.reference_model import MAX_POSITIONS
from tests.support.responses import WITHOUT_EOS, tokens_of

pytestmark = pytest.mark.v2

PROMPT = [4, 4, 2, 17]


def test_counts_of_drafted_and_accepted_tokens_agree_with_vllms(drafting_engine: EngineHarness) -> None:
    before = drafting_engine.vllm_counts()
    # Without an end of sequence, after which vLLM cuts off accepted tokens.
    sampling = Sampling(n=16, max_tokens=80, allowed_token_ids=WITHOUT_EOS, temperature=0.5)
    results = drafting_engine.sample([PROMPT], sampling, "counts")
    drafting_engine.check_counts(results, before)
    accepted = sum(response.num_accepted_tokens for response in results)
    assert 0 < accepted < sum(response.num_draft_tokens for response in results)


def test_drafting_continues_up_to_the_last_token_of_the_longest_response(drafting_engine: EngineHarness) -> None:
    """Near its maximum length, vLLM would replace the drafts of the whole batch by placeholders."""
    before = drafting_engine.vllm_counts()
    length = MAX_POSITIONS - len(PROMPT)
    sampling = Sampling(n=2, max_tokens=length, allowed_token_ids=[1, 2], temperature=0)
    results = drafting_engine.sample([PROMPT], sampling, "long")
    assert [length] * 2 == [len(response.token_ids) for response in results]
    drafting_engine.check_counts(results, before)
    # A repetition of two tokens is drafted and accepted completely, except in the step that discovers it.
    assert min(response.num_accepted_tokens for response in results) > 0.7 * length


def test_the_draft_budget_of_a_request_is_respected(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=4, max_tokens=60, temperature=0)
    drafting_engine.add_history("budget", tokens_of(drafting_engine.sample([PROMPT], sampling, "budget")))
    unlimited = drafting_engine.sample([PROMPT], sampling, "budget")
    limited = drafting_engine.sample([PROMPT], sampling, "budget", draft_budget=1)
    without = drafting_engine.sample([PROMPT], sampling, "budget", draft_budget=0)
    assert [0] * 4 == [response.num_draft_tokens for response in without]
    for result in limited:
        assert 0 < result.num_draft_tokens <= result.num_decoding_steps
    assert sum(response.num_accepted_tokens for response in unlimited) > sum(
        response.num_accepted_tokens for response in limited
    )
    assert MAX_DRAFT_TOKENS > 1


def test_the_draft_mode_of_a_request_selects_its_sources(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=WITHOUT_EOS)
    drafting_engine.add_history("sources", tokens_of(drafting_engine.sample([PROMPT], sampling, "sources")))
    results = {}
    for mode in DraftMode:
        request = drafting_engine.request(PROMPT, sampling, "sources", draft_mode=mode)
        [results[mode]] = drafting_engine.generate([request])
    assert 0 == results[DraftMode.OFF].num_draft_tokens
    assert 0 < results[DraftMode.OWN_TEXT].num_accepted_tokens < results[DraftMode.HISTORY].num_accepted_tokens


def test_the_problem_id_of_a_request_is_by_default_that_of_its_prompt(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=1, max_tokens=60, temperature=0, allowed_token_ids=WITHOUT_EOS)
    request = drafting_engine.request(PROMPT, sampling, "")
    drafting_engine.add_history(request.problem, tokens_of(drafting_engine.sample([PROMPT], sampling)))
    [result] = drafting_engine.generate([request])
    assert result.num_accepted_tokens > 0.6 * len(result.token_ids)


def test_decoding_continues_while_redis_does_not_reply(drafting_engine: EngineHarness, redis_server: str) -> None:
    pid = int(redis.Redis.from_url(redis_server).info()["process_id"])
    sampling = Sampling(n=4, max_tokens=20)
    drafting_engine.sample([PROMPT], sampling, "stopped")
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        results = drafting_engine.sample([PROMPT], sampling, "stopped")
        seconds = time.monotonic() - started
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(results) == 4
    # A single call to a stopped server takes 2 s until its timeout; decoding takes a tenth of a second.
    assert seconds < 2


def test_accepted_tokens_are_attributed_to_their_sources(drafting_engine: EngineHarness) -> None:
    sampling = Sampling(n=1, max_tokens=100, allowed_token_ids=[1, 2], temperature=0)  # a single sample is no canary
    own_text = drafting_engine.request(PROMPT, sampling, "own-text", draft_mode=DraftMode.OWN_TEXT)
    without = drafting_engine.request(PROMPT, sampling, "own-text", draft_mode=DraftMode.OFF)
    before = drafting_engine.vllm_counts()
    result, undrafted = drafting_engine.generate([own_text, without])
    drafting_engine.check_counts([result, undrafted], before)
    assert ["self"] == list(result.draft_tokens_by_source) == list(result.accepted_tokens_by_source)
    assert result.draft_sources is not None
    codes = decode_draft_sources(result.draft_sources)
    # Each step samples one token that was not drafted.
    assert SAMPLED == codes[0]
    steps = codes.split(bytes([SAMPLED]))
    assert max(map(len, steps)) <= MAX_DRAFT_TOKENS
    assert result.num_decoding_steps in (len(steps) - 1, len(steps))
    assert undrafted.draft_sources is None


def test_accepted_tokens_of_the_history_are_counted_by_source_and_position(drafting_engine: EngineHarness) -> None:
    def counters() -> dict[str, Counter[str]]:
        stats = drafting_engine.loop.run(drafting_engine.engine.stats())
        return {name: Counter(rows) for name, rows in stats["labeled_counters"].items()}

    sampling = Sampling(max_tokens=60, temperature=0, allowed_token_ids=WITHOUT_EOS)
    drafting_engine.add_history("by-source", tokens_of(drafting_engine.sample([PROMPT], sampling, "by-source")))
    earlier = counters()
    results = drafting_engine.sample([PROMPT] * 4, sampling, "by-source")
    later = counters()
    drafted = {name: rows - earlier[name] for name, rows in later.items()}
    accepted = sum((Counter(result.accepted_tokens_by_source) for result in results), Counter[str]())
    assert 0 < accepted["history"]
    assert accepted == drafted["source_accepted_tokens"]
    assert accepted.total() == drafted["position_accepted_tokens"].total()
    total = sum(result.num_draft_tokens for result in results)
    assert total == drafted["source_draft_tokens"].total() == drafted["position_draft_tokens"].total()
    assert {str(number) for number in range(1, MAX_DRAFT_TOKENS + 1)} >= set(drafted["position_draft_tokens"])
