"""How drafts run in the engine: what is counted, where they end, and that nothing waits for Redis."""

from __future__ import annotations

import os
import signal
import time

import redis

from rollout_api.manifest.spec import Sampling
from tests.support.engines import MAX_DRAFT_TOKENS, Bed
from tests.support.reference_model import POSITIONS

PROMPT = [4, 4, 2, 17]


def test_our_counts_of_drafted_and_accepted_tokens_are_vllms(drafted: Bed) -> None:
    counters = drafted.engine.counters
    before = (counters.drafted, counters.accepted)
    # no end of sequence, after which vLLM cuts what it had accepted
    sampling = Sampling(n=16, max_tokens=80, allowed_token_ids=list(range(12)), temperature=0.5)
    responses = drafted.sample([PROMPT], sampling, problem="counts")
    ours = (sum(r.drafted for r in responses), sum(r.accepted for r in responses))
    assert ours == (counters.drafted - before[0], counters.accepted - before[1])
    assert 0 < ours[1] < ours[0]


def test_drafts_go_on_to_the_last_token_of_the_longest_response(drafted: Bed) -> None:
    """Near vLLM's own limit it would replace the drafts of the whole batch by dummies."""
    counters = drafted.engine.counters
    before = counters.drafted
    sampling = Sampling(n=2, max_tokens=POSITIONS - len(PROMPT), allowed_token_ids=[1, 2], temperature=0)
    responses = drafted.sample([PROMPT], sampling, problem="long")
    assert [POSITIONS - len(PROMPT)] * 2 == [len(r.token_ids) for r in responses]
    assert sum(r.drafted for r in responses) == counters.drafted - before
    # a loop of two tokens is drafted and accepted whole, but for the step that discovers it
    assert min(r.accepted for r in responses) > (POSITIONS - len(PROMPT)) * 0.7


def test_a_requests_own_budget_and_sources_hold(drafted: Bed) -> None:
    sampling = Sampling(n=4, max_tokens=60, temperature=0)
    first = drafted.sample([PROMPT], sampling, problem="budget")
    drafted.remember("budget", [r.token_ids for r in first])
    free = drafted.sample([PROMPT], sampling, problem="budget")
    bound = drafted.sample([PROMPT], sampling, problem="budget", draft_budget=1)
    off = drafted.sample([PROMPT], sampling, problem="budget", draft_budget=0)
    assert [0] * 4 == [r.drafted for r in off]
    for response in bound:
        steps = len(response.token_ids) - response.accepted
        assert 0 < response.drafted <= steps
    assert sum(r.accepted for r in free) > sum(r.accepted for r in bound)
    assert MAX_DRAFT_TOKENS > 1


def test_decoding_goes_on_while_redis_does_not_answer(drafted: Bed, redis_server: str) -> None:
    pid = int(redis.Redis.from_url(redis_server).info()["process_id"])
    sampling = Sampling(n=32, max_tokens=60)
    drafted.sample([PROMPT], sampling, problem="stopped")
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        responses = drafted.sample([PROMPT], sampling, problem="stopped")
        seconds = time.monotonic() - started
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(responses) == 32
    # one wait for a reply of a stopped server takes 2 s; decoding takes far less
    assert seconds < 2
