"""Drafting ahead: its memory, what it learns, and that a step waits for no other thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import Source
from tests.support.waiting import wait_for

KIB = 2**10
NO_COSTS = np.zeros(1)
HISTORY_CODE = 1


class Engine:
    """An engine whose requests repeat recorded responses; each has the place and the row of its number."""

    def __init__(self, index: SuffixIndex, handles: list[int], responses: list[np.ndarray], width: int = 16) -> None:
        places = len(handles)
        self.index, self.handles, self.responses = index, np.array(handles), responses
        self.token_ids = np.zeros((places, max(map(len, responses)) + width), np.int32)
        self.drafts, self.lengths = np.zeros((places, width), np.int64), np.zeros(places, np.int32)
        self.num_tokens = np.zeros(places, np.int32)
        self.rows = np.arange(places)
        self.batch = index.new_batch(self.token_ids, self.drafts, self.lengths)
        self.verified = np.zeros(places, np.int64)
        self.accepted = np.zeros(places, np.int64)

    def plan(self, gains: np.ndarray | None = None, min_survival: float = 0.0, **limits: Any) -> None:
        count, width = self.drafts.shape
        gains = np.ones(count) if gains is None else gains
        self.batch.plan(self.handles, np.full(count, width), np.full(count, min_survival), gains, NO_COSTS, **limits)

    def sample(self) -> None:
        """Verify the drafts, and append the accepted tokens and one more to each response."""
        self.verified = self.lengths.astype(np.int64)
        for number, response in enumerate(self.responses):
            start = self.num_tokens[number]
            draft = self.drafts[number, : self.lengths[number]]
            expected = response[start : start + len(draft)]
            agree = np.flatnonzero(draft[: len(expected)] != expected)
            self.accepted[number] = agree[0] if len(agree) else len(expected)
            end = min(start + self.accepted[number] + 1, len(response))
            self.token_ids[number, start:end] = response[start:end]
            self.num_tokens[number] = end

    def step(self, **limits: Any) -> list[list[int]]:
        """Sample tokens, and return the next drafts."""
        self.plan(**limits)
        self.sample()
        self.batch.step(self.num_tokens, self.rows, self.rows, self.verified)
        return [row[:length].tolist() for row, length in zip(self.drafts, self.lengths, strict=True)]


def mutated(seed: int, text: np.ndarray, share: float = 0.05) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(len(text)) < share, rng.integers(0, 1000, len(text)), text).astype(np.uint32)


def base_text(length: int, vocabulary: int = 1000) -> np.ndarray:
    return np.random.default_rng(99).integers(0, vocabulary, length).astype(np.uint32)


@contextmanager
def held(index: SuffixIndex, handle: int, *, live_texts: bool = False) -> Iterator[None]:
    """Hold a lock in another thread, as one would that the system has suspended."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        lock = index.request_lock(handle, live_texts=live_texts)
        lock.acquire()
        is_held.set()
        is_over.wait()
        lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("width", [16, 32])
def test_a_request_takes_little_memory_for_prepared_drafts(width: int) -> None:
    index = SuffixIndex(draft_ahead=True)
    text = base_text(600, vocabulary=4)  # every token has many possible successors
    index.add("p", [(str(seed), 0, mutated(seed, text, 0.1) % 8) for seed in range(16)])
    index.wait_idle()
    before, count = index.bytes(), 4
    handles = [index.open("p", sources=("history", "cross_problem")) for _ in range(count)]
    engine = Engine(index, handles, [mutated(100 + seed, text, 0.1) % 8 for seed in range(count)], width)
    for _ in range(40):
        engine.step()
        index.wait_idle()
        assert (index.bytes() - before) / count < 64 * KIB


def test_prepared_drafts_of_many_requests_evict_no_history() -> None:
    text, max_bytes = base_text(400), 96 * KIB**2
    index = SuffixIndex(draft_ahead=True, max_bytes=max_bytes)
    for problem in range(64):
        index.add(str(problem), [(str(seed), 0, mutated(seed, text)) for seed in range(64)])
    index.wait_idle()
    handles = [index.open(str(number // 16)) for number in range(1024)]
    engine = Engine(index, handles, [mutated(100 + number, text) for number in range(1024)])
    for _ in range(4):
        engine.step(time_limit_s=60.0)
        index.wait_idle()
        assert index.bytes() <= 1.05 * max_bytes
        assert [] == index.take_evicted()
    assert index.look_ups().found > 512


def test_learning_from_prepared_drafts_equals_learning_without_drafting_ahead() -> None:
    text = base_text(500)
    rollouts = np.stack([mutated(seed, text) for seed in range(12)])
    rng = np.random.default_rng(1)
    # Each token occurs in some rollout at this place, so that it can be expected.
    response = np.where(rng.random(500) < 0.1, rollouts[rng.integers(0, 12, 500), np.arange(500)], text)
    index, other = SuffixIndex(draft_ahead=True), SuffixIndex()
    engines = []
    for each in (index, other):
        each.add("p", [(str(seed), seed, tokens) for seed, tokens in enumerate(rollouts)])
        engines.append(Engine(each, [each.open("p", sources=("history",))], [response], width=8))
    for _ in range(50):
        drafts, expected = (engine.step(time_limit_s=60.0) for engine in engines)
        assert expected == drafts
        index.wait_idle()
        # Without drafting ahead, the sampled tokens were learned from at once.
        assert other.counters() == index.counters()
        assert other.state_dict() == index.state_dict()
    assert (49, 1, 0) == index.look_ups()


@given(data=st.data(), seed=st.integers(0, 20), threads=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_nothing_is_lost_of_steps_that_leave_a_request_out(data: st.DataObject, seed: int, threads: int) -> None:
    text = base_text(300)
    index = SuffixIndex(draft_ahead=True, threads=threads)
    index.add("p", [(str(number), 0, mutated(number, text)) for number in range(8)])
    handles = [index.open("p", sources=("history",)) for _ in range(3)]
    engine = Engine(index, handles, [mutated(100 + seed + number, text) for number in range(3)], width=6)
    codes, verified = [bytearray() for _ in handles], [0] * 3
    for _ in range(10):
        index.wait_idle()
        out = data.draw(st.sampled_from([None, 0, 1]))
        engine.plan()
        engine.sample()
        if out is None:
            engine.batch.step(engine.num_tokens, engine.rows, engine.rows, engine.verified)
        else:
            with held(index, handles[out]):
                engine.batch.step(engine.num_tokens, engine.rows, engine.rows, engine.verified)
            assert 0 == engine.lengths[out] == engine.batch.generated[out]
        for number in range(3):
            codes[number] += bytes([HISTORY_CODE] * engine.accepted[number]) + b"\0"
            verified[number] += int(engine.verified[number])
            assert len(codes[number]) == index.num_tokens(handles[number]) == engine.num_tokens[number]
    for number, handle in enumerate(handles):
        counts = index.close(handle)
        assert codes[number].rstrip(b"\0") == counts.token_sources
        assert (verified[number], codes[number].count(HISTORY_CODE)) == counts[:2]
        assert len(codes[number]) == counts.generated
        assert (verified[number], 0, 0, 0) == counts.drafted_by_source
    by_source, by_position = index.verification_counts()
    accepted = sum(each.count(HISTORY_CODE) for each in codes)
    assert (sum(verified), accepted) == by_source["history"]
    assert sum(verified) == sum(each.verified for each in by_position)


def test_a_request_that_was_left_out_is_drafted_for_in_the_next_step() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    handles = [index.open("p") for _ in range(2)]
    engine = Engine(index, handles, [np.arange(50)] * 2, width=2)
    assert [[1, 2], [1, 2]] == engine.step()
    index.wait_idle()
    with held(index, handles[0]):
        assert [[], [4, 5]] == engine.step()
    assert 1 == index.look_ups().omitted
    assert [0, 3] == engine.batch.generated.tolist()
    index.wait_idle()
    assert [[5, 6], [7, 8]] == engine.step()
    assert [4, 3] == engine.batch.generated.tolist()
    # After a step that left it out, nothing was drafted for it, and so nothing can have been verified.
    with held(index, handles[0]):
        engine.step()
    assert b"" == index.count_step(handles[0], 2, 2)
    assert [(4, 4, 8), (6, 6, 10)] == [index.close(handle)[:3] for handle in handles]


def test_a_step_does_not_wait_for_the_live_texts() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    handles = [index.open("p") for _ in range(3)]
    engine = Engine(index, handles, [np.arange(200)] * 3, width=2)
    engine.step()
    index.wait_idle()
    with held(index, handles[0], live_texts=True):
        for _ in range(4):
            drafts = engine.step()
            # One thread waits for the texts, with the lock of one request.
            assert sum(map(bool, drafts)) >= 2
    engine.step()
    index.wait_idle()
    # All tokens are in the texts now.
    known = index.open("p", sources=("siblings",))
    end = int(engine.num_tokens.min())
    index.extend(known, list(range(end - 4)))
    assert list(range(end - 4, end)) == index.draft(known, 4).tokens


def test_requests_whose_tokens_are_worth_most_are_served_first() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(100)))])
    handles = [index.open("p", max_draft_tokens=2**number) for number in range(5)]
    engine = Engine(index, handles, [np.arange(100)] * 5)
    engine.step(time_limit_s=60.0)
    index.wait_idle()
    gains = np.array([3.0, 1.0, 5.0, 4.0, 2.0])
    lengths = engine.lengths.copy()
    assert [1, 2, 4, 8, 16] == lengths.tolist()
    history: Source = "history"
    engine.plan(gains)
    engine.sample()
    drafted = index.counters()[history].drafted
    with held(index, handles[1], live_texts=True):
        # The thread counts the tokens of a draft before it appends the sampled ones to the texts. It waits for these
        # while it has the request that is worth most.
        engine.batch.step(engine.num_tokens, engine.rows, engine.rows, engine.verified)
        wait_for(lambda: index.counters()[history].drafted > drafted)
        assert drafted + lengths[2] == index.counters()[history].drafted
    index.wait_idle()
    assert drafted + lengths.sum() == index.counters()[history].drafted


def test_the_likeliest_outcome_of_dropped_drafts_is_prepared() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    handles = [index.open("p", sources=("history",)) for _ in range(3)]
    engine = Engine(index, handles, [np.arange(50)] * 3, width=2)
    for number in range(5):
        assert [[1 + number, 2 + number]] * 2 == engine.step(min_gain_s=np.inf)[:2]
        engine.batch.keep_only(engine.rows, engine.rows, 2)
        assert [0, 0, 2] == engine.lengths.tolist()
        index.wait_idle()
    assert (12, 3, 0) == index.look_ups()
    engine.step(min_gain_s=np.inf)
    engine.batch.keep_only(engine.rows, engine.rows, None)
    assert not engine.lengths.any()
    index.wait_idle()
    engine.step(min_gain_s=np.inf)
    assert (18, 3, 0) == index.look_ups()
    # Only the drafts of the third request were verified.
    assert [(0, 0, 7), (0, 0, 7), (10, 10, 17)] == [index.close(handle)[:3] for handle in handles]


@pytest.mark.parametrize(
    ("kept", "rows", "message"),
    [(2, [0, 1], "no request 2, only 2"), (-1, [0, 1], "no request -1"), (None, [0, 5], "the plan has no row 5")],
)
def test_invalid_arguments_of_keep_only_are_rejected(kept: int | None, rows: list[int], message: str) -> None:
    index = SuffixIndex(draft_ahead=True)
    engine = Engine(index, [index.open("p") for _ in range(2)], [np.arange(50)] * 2)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.batch.keep_only(np.array(rows), engine.rows, kept)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_that_are_late_change_no_draft_of_the_engine(threads: int) -> None:
    text = base_text(2000, vocabulary=6)
    index = SuffixIndex(draft_ahead=True, threads=threads)
    index.add("p", [(str(seed), 0, mutated(seed, text) % 6) for seed in range(8)])
    handles = [index.open("p") for _ in range(40)]
    engine = Engine(index, handles, [mutated(100 + number, text) % 6 for number in range(40)], width=4)
    for number in range(60):
        # Many steps end while other threads still compute drafts for them.
        drafts = engine.step(time_limit_s=1e-5 * (number % 8))
        written, generated = engine.drafts.copy(), engine.batch.generated.copy()
        if number % 2:
            index.wait_idle()
        assert drafts == [row[:length].tolist() for row, length in zip(engine.drafts, engine.lengths, strict=True)]
        assert (written == engine.drafts).all()
        assert (generated == engine.batch.generated).all()
    found, computed, omitted = index.look_ups()
    assert found + computed + omitted <= 60 * 40
    for number, handle in enumerate(handles):
        assert engine.num_tokens[number] == index.num_tokens(handle) == index.close(handle).generated
