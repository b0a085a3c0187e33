"""`SuffixIndex.step`: what it drafts, with and without drafting ahead, its limits, counts and arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.drafting import SuffixIndex

WIDTH = 8


class Stepper:
    """Calls `step` for a fixed set of requests with arrays of the right types."""

    def __init__(self, index: SuffixIndex, handles: list[int]) -> None:
        count = len(handles)
        self.index = index
        self.arguments: dict[str, Any] = {
            "handles": np.array(handles, np.int64),
            "sampled": np.zeros((count, WIDTH + 1), np.int64),
            "num_sampled": np.zeros(count, np.int32),
            "budgets": np.full(count, WIDTH, np.int32),
            "min_survivals": np.zeros(count, np.float32),
            "tokens": np.zeros((count, WIDTH), np.int64),
            "survivals": np.zeros((count, WIDTH), np.float32),
            "lengths": np.zeros(count, np.int32),
            "verified": None,
        }

    def step(self, *sampled: list[int], **changes: Any) -> list[list[int]]:
        """Report the sampled tokens of each request and return the drafts."""
        self.arguments |= changes
        self.arguments["num_sampled"][:] = [len(tokens) for tokens in sampled]
        for row, tokens in enumerate(sampled):
            self.arguments["sampled"][row, : len(tokens)] = tokens
        self.index.step(**self.arguments)
        lengths = self.arguments["lengths"].tolist()
        return [row[:length] for row, length in zip(self.arguments["tokens"].tolist(), lengths, strict=True)]


def text(seed: int, length: int = 300) -> list[int]:
    """Return a text of few distinct tokens, so that there are many matches."""
    return np.random.default_rng(seed).integers(0, 6, length).tolist()


def filled_index(**options: Any) -> SuffixIndex:
    index = SuffixIndex(pool_tokens=2000, **options)
    for problem in ("p", "q"):
        index.add(problem, [(str(seed), seed, text(seed)) for seed in range(8)])
    index.wait_idle()
    return index


def accepted(draft: list[int], recorded: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(draft, recorded, strict=False)) if a != b), len(draft))


def test_a_step_equals_extending_and_drafting() -> None:
    index, other = filled_index(), filled_index()
    recorded = [text(1), text(100), text(3), text(101)]
    problems = ["p", "p", "q", "p"]
    handles = [index.open(problem, [1, 2, 3]) for problem in problems]
    others = [other.open(problem, [1, 2, 3]) for problem in problems]
    stepper = Stepper(index, handles)
    positions = [0] * 4
    lengths = [0] * 4
    for number in range(30):
        sampled = [text[at : at + length + 1] for text, at, length in zip(recorded, positions, lengths, strict=True)]
        positions = [at + len(tokens) for at, tokens in zip(positions, sampled, strict=True)]
        survival = np.float32([0.0, 0.1, 0.4][number % 3])
        drafts = stepper.step(*sampled, min_survivals=np.full(4, survival))
        other.extend_batch(others, sampled)
        # `step` computes one position more than it drafts, and learns from it as well.
        expected = other.draft_batch(others, [WIDTH + 1] * 4, float(survival))
        assert [draft.tokens[:WIDTH] for draft in expected] == drafts
        for row, draft in enumerate(drafts):
            survivals = stepper.arguments["survivals"][row]
            assert (survivals[: len(draft)] >= survival).all()
            assert (np.diff(survivals[: len(draft)]) <= 0).all()
            assert not survivals[len(draft) :].any()
            assert {-1} >= set(stepper.arguments["tokens"][row, len(draft) :].tolist())
        lengths = [accepted(draft, text[at:]) for draft, text, at in zip(drafts, recorded, positions, strict=True)]
    assert (0, 120) == index.look_ups()


@pytest.mark.parametrize("threads", [1, 2])
def test_drafts_that_were_prepared_are_looked_up(threads: int) -> None:
    index = filled_index(draft_ahead=True, threads=threads)
    recorded = [text(1), text(100), text(5)]
    stepper = Stepper(index, [index.open("p"), index.open("p"), index.open("q")])
    positions, lengths = [0] * 3, [0] * 3
    total = 0
    for number in range(30):
        sampled = [text[at : at + length + 1] for text, at, length in zip(recorded, positions, lengths, strict=True)]
        positions = [at + len(tokens) for at, tokens in zip(positions, sampled, strict=True)]
        drafts = stepper.step(*sampled, min_survivals=np.full(3, 0.1, np.float32))
        index.wait_idle()
        lengths = [accepted(draft, text[at:]) for draft, text, at in zip(drafts, recorded, positions, strict=True)]
        total += sum(lengths) if number < 29 else 0  # the last drafts are not verified
    found, computed = index.look_ups()
    assert 90 == found + computed
    # Only the first drafts cannot be prepared, as there are only six distinct tokens.
    assert found >= 85
    assert total > 60
    assert total == sum(index.close(handle).accepted for handle in stepper.arguments["handles"].tolist())


def test_a_request_without_new_tokens_is_drafted_for_again() -> None:
    for draft_ahead in (False, True):
        index = SuffixIndex(draft_ahead=draft_ahead)
        index.add("p", [("a", 0, list(range(50)))])
        stepper = Stepper(index, [index.open("p")])
        assert [[1, 2]] == stepper.step([0], budgets=np.array([2], np.int32))
        index.wait_idle()
        assert [[1, 2, 3]] == stepper.step([], budgets=np.array([3], np.int32))
        index.wait_idle()
        assert [[5, 6, 7]] == stepper.step([1, 2, 3, 4])
        assert (3, 3, 5) == index.close(int(stepper.arguments["handles"][0]))


def test_tokens_that_do_not_follow_the_draft_are_accepted() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p")])
    stepper.step([0])
    index.wait_idle()
    # The engine may have sampled in steps in which it did not draft.
    assert [21] == stepper.step([17, 18, 19, 20])[0][:1]
    index.extend(int(stepper.arguments["handles"][0]), [30])
    assert [32] == stepper.step([31])[0][:1]


@pytest.mark.parametrize("draft_ahead", [False, True])
def test_the_limits_of_a_request_apply(draft_ahead: bool) -> None:
    index = SuffixIndex(draft_ahead=draft_ahead)
    recorded = list(range(60))
    index.add("p", [("a", 0, recorded)])
    limits = {"undrafted_tokens": 4, "min_tokens": 12, "max_tokens": 40}
    stepper = Stepper(index, [index.open("p", **limits, max_draft_tokens=5)])
    position, draft = 0, list[int]()
    while position < 40:
        sampled = recorded[position : position + len(draft) + 1]
        position += len(sampled)
        (draft,) = stepper.step(sampled)
        end = 12 if position < 12 else 40
        assert len(draft) == (0 if position < 4 else max(0, min(5, end - position - 1)))
        index.wait_idle()
    assert 40 == position


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 100), st.integers(0, 200), st.integers(0, 64))
def test_no_draft_crosses_a_limit(
    undrafted_tokens: int, min_tokens: int, max_tokens: int, generated: int, limit: int
) -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1] * 300)])
    limits = {"undrafted_tokens": undrafted_tokens, "min_tokens": min_tokens, "max_tokens": max_tokens}
    handle = index.open("p", **limits, max_draft_tokens=limit)
    index.extend(handle, [1] * generated)
    length = len(index.draft(handle, 100).tokens)
    assert 0 <= length <= (limit if generated >= undrafted_tokens else 0)
    after_step = generated + length + 1  # a step samples one token in addition to the draft
    if length:
        assert after_step <= max_tokens or generated < min_tokens
        if generated < min_tokens:
            assert after_step <= min_tokens


def test_close_returns_the_counts_of_verified_drafts() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, list(range(50)))])
    handles = [index.open("p") for _ in range(2)]
    stepper = Stepper(index, handles)
    assert [[1, 2, 3, 4]] * 2 == stepper.step([0], [0], budgets=np.array([4, 4], np.int32))
    # The engine verified all of the first draft and two tokens of the second one.
    stepper.step([1, 2, 9], [1, 2, 3], verified=np.array([4, 2], np.int32))
    assert (4, 2, 4) == index.close(handles[0])
    assert (2, 2, 4) == index.close(handles[1])


def test_stop_tokens_end_a_draft() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", stop_tokens=[3])])
    assert [[1, 2, 3]] == stepper.step([0])
    index.wait_idle()
    assert [[3]] == stepper.step([1, 2])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"handles": [0]}, TypeError, r"handles must be a C-contiguous array of shape and type \(n,\) int64"),
        ({"sampled": np.zeros((2, 9), np.int32)}, TypeError, "sampled must be"),
        ({"sampled": np.zeros((2, 18), np.int64)[:, ::2]}, TypeError, "sampled must be"),
        ({"num_sampled": np.zeros(3, np.int32)}, ValueError, "num_sampled has 3 rows, but there are 2 handles"),
        ({"num_sampled": np.array([0, 10], np.int32)}, ValueError, "row 1: num_sampled must be 0 to 9, got 10"),
        ({"num_sampled": np.array([-1, 0], np.int32)}, ValueError, "row 0: num_sampled must be 0 to 9, got -1"),
        ({"budgets": np.array([0, -2], np.int32)}, ValueError, "row 1: a budget must be 0 or more tokens, got -2"),
        ({"min_survivals": np.array([0, 1.5], np.float32)}, ValueError, "row 1: min_survival must be a probability"),
        ({"min_survivals": np.array([np.nan, 0], np.float32)}, ValueError, "row 0: min_survival must be a probability"),
        ({"survivals": np.zeros((2, 3), np.float32)}, ValueError, "tokens and survivals must have the same shape"),
        ({"lengths": np.zeros(1, np.int32)}, ValueError, "lengths has 1 rows"),
        ({"verified": np.array([0, -1], np.int32)}, ValueError, "row 1: verified must be 0 or more tokens, got -1"),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    index = filled_index()
    stepper = Stepper(index, [index.open("p"), index.open("p")])
    stepper.arguments |= changes
    with pytest.raises(error, match=message):
        index.step(**stepper.arguments)


@pytest.mark.parametrize("token", [-1, 2**32 - 1, 2**40])
def test_invalid_sampled_tokens_are_rejected(token: int) -> None:
    index = filled_index()
    handle = index.open("p")
    with pytest.raises(ValueError, match=f"row 0: sampled has {token}; token ids are 0 to 4294967294"):
        Stepper(index, [handle]).step([3, token])
    assert (0, 0, 0) == index.close(handle)


def test_invalid_handles_are_rejected() -> None:
    index = filled_index(draft_ahead=True)
    handle = index.open("p")
    with pytest.raises(ValueError, match=f"the handle {handle} occurs twice"):
        Stepper(index, [handle, handle]).step([1], [1])
    with pytest.raises(KeyError, match="no open request has the handle -5"):
        Stepper(index, [handle, -5]).step([1], [1])
    assert (0, 0, 0) == index.close(handle)


def test_an_output_that_cannot_be_written_is_rejected() -> None:
    index = filled_index()
    tokens = np.zeros((1, WIDTH), np.int64)
    tokens.flags.writeable = False
    with pytest.raises(TypeError, match="tokens must be"):
        Stepper(index, [index.open("p")]).step([1], tokens=tokens)


@pytest.mark.parametrize("limit", ["undrafted_tokens", "min_tokens", "max_tokens", "max_draft_tokens"])
def test_negative_limits_are_rejected(limit: str) -> None:
    arguments: dict[str, Any] = {limit: -1}
    with pytest.raises(ValueError, match=f"{limit} must be 0 or more tokens, got -1"):
        SuffixIndex().open("p", **arguments)


def test_closing_requests_frees_their_prepared_drafts() -> None:
    index = filled_index(draft_ahead=True)
    before = index.bytes()
    handles = [index.open("p", [1, 2]) for _ in range(3)]
    stepper = Stepper(index, handles)
    for token in text(7, 20):
        stepper.step([token], [token], [token])
    for handle in handles:
        index.close(handle)
    index.wait_idle()
    assert before == index.bytes()
