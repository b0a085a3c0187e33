"""Arguments that the index rejects, and its error messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout_worker.drafting import Rollout, SuffixIndex


@pytest.mark.parametrize("depth", [0, 256, 10_000])
def test_a_depth_out_of_range_is_rejected(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth must be 1 to 255 tokens, got {depth}"):
        SuffixIndex(depth)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2, 2**32 - 1], ValueError, "has 4294967295 at position 2; token ids are 0 to 4294967294"),
        (np.array([5, 2**32 - 1], np.uint32), ValueError, "has 4294967295 at position 1"),
        ([-1], ValueError, "has -1 at position 0"),
        (np.array([3, -7]), ValueError, "has -7 at position 1"),
        ([2**70], ValueError, "has 1180591620717411303424 at position 0"),
        (np.zeros((2, 3), np.uint32), ValueError, "must be one-dimensional, got an array of 2 dimensions"),
        (np.array(3, np.uint32), ValueError, "must be one-dimensional, got an array of 0 dimensions"),
        ([4, 1.0], TypeError, "has 1.0 at position 1, which is not an integer"),
        (np.array([1.5]), TypeError, "has 1.5 at position 0, which is not an integer"),
        ("12", TypeError, "must be a one-dimensional uint32 array or a sequence of integers, got str"),
        (None, TypeError, "got NoneType"),
        (7, TypeError, "got int"),
    ],
)
def test_invalid_token_ids_are_rejected(tokens: Any, error: type[Exception], message: str) -> None:
    index = SuffixIndex()
    handle = index.open("p")
    before = index.bytes()
    with pytest.raises(error, match=re.escape(message)):
        index.add("p", [("good", 0, [1]), ("bad", 0, tokens)])
    with pytest.raises(error, match=re.escape(message)):
        index.add("p", [("good", 0, [1], [2]), ("bad", 0, [1], tokens)])
    with pytest.raises(error, match=re.escape(message)):
        index.open("p", tokens)
    with pytest.raises(error, match=re.escape(message)):
        index.extend(handle, tokens)
    assert [] == index.rollouts("p")
    assert before == index.bytes()


def test_the_error_message_names_the_rollout() -> None:
    with pytest.raises(ValueError, match=r"^rollout 'r7' of problem 'p' has -1 at position 0"):
        SuffixIndex().add("p", [("r7", 0, [-1])])


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (5, "rollout 0 of problem 'p' must be (rollout_id, generation, tokens[, context[, reward]])"),
        (("a", 0), "must be (rollout_id, generation, tokens[, context[, reward]])"),
        ((1, 0, [1]), "the rollout id must be a str"),
        (("a", "0", [1]), "the generation must be a 64-bit int"),
        (("a", 0.5, [1]), "the generation must be a 64-bit int"),
        (("a", 2**63, [1]), "the generation must be a 64-bit int"),
        (("a", 0, [1], [], "good"), "rollout 'a' of problem 'p': the reward must be a number or None"),
    ],
)
def test_invalid_rollouts_are_rejected(rollout: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        SuffixIndex().add("p", [rollout])


@pytest.mark.parametrize("readable", range(5))
def test_an_error_while_a_rollout_is_read_is_raised(readable: int) -> None:
    class Unreadable:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, position: int) -> object:
            if position >= readable:
                raise LookupError(f"position {position} is unreadable")
            return ("a", 0, [1], [], 0.5)[position]

    rollout: Any = Unreadable()
    with pytest.raises(LookupError, match=f"position {readable} is unreadable"):
        SuffixIndex().add("p", [rollout])


def test_invalid_rewards_are_rejected() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1])])
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="rollout 'a' of problem 'p': the reward must be finite"):
            index.set_rewards("p", {"a": value})
        with pytest.raises(ValueError, match="rollout 'b' of problem 'p': the reward must be finite"):
            index.add("p", [("b", 0, [1], [], value)])
    bad: dict[Any, Any] = {"a": "good"}
    with pytest.raises(TypeError, match="rollout 'a' of problem 'p': the reward must be a number"):
        index.set_rewards("p", bad)
    assert ["a"] == index.rollouts("p")
    assert [None] == [occurrence.reward for occurrence in index.occurrences(index.open("p"))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"max_bytes": 0}, "max_bytes must be 1 or more"), ({"pool_tokens": -1}, "pool_tokens must be 0 or more")],
)
def test_limits_out_of_range_are_rejected(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixIndex(**arguments)


@pytest.mark.parametrize("sources", [(), ("pool",), ("history", "pool"), "history"])
def test_invalid_sources_are_rejected(sources: Any) -> None:
    with pytest.raises(ValueError, match="sources must be some of 'history', 'self', 'siblings', 'cross_problem'"):
        SuffixIndex().open("p", sources=sources)


def test_a_negative_context_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="context_length must be 0 or more tokens, got -1"):
        SuffixIndex().open("p", [1], context_length=-1)


def test_invalid_budgets_and_survivals_are_rejected() -> None:
    index = SuffixIndex()
    handle = index.open("p")
    with pytest.raises(ValueError, match="a budget must be 0 or more tokens, got -1"):
        index.draft(handle, -1)
    with pytest.raises(ValueError, match="each handle needs one budget, got 1 handles and 2 budgets"):
        index.draft_batch([handle], [1, 2])
    with pytest.raises(ValueError, match="each handle needs one min_survival, got 1 handles and 2 min_survivals"):
        index.draft_batch([handle], [1], [0.5, 0.5])
    with pytest.raises(ValueError, match="min_survival must be a probability from 0 to 1, got 2"):
        index.draft_batch([handle, handle], [1, 1], [0.5, 2.0])
    for survival in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="min_survival must be a probability from 0 to 1"):
            index.draft(handle, 1, survival)


def test_unknown_handles_are_rejected() -> None:
    index = SuffixIndex()
    handle, other = index.open("p"), SuffixIndex().open("p")
    index.close(handle)
    calls: list[Callable[[int], object]] = [
        index.close,
        lambda unknown: index.extend(unknown, [1]),
        lambda unknown: index.draft(unknown, 1),
        lambda unknown: index.draft_batch([index.open("p"), unknown], [1, 1]),
    ]
    for call in calls:
        for unknown in (handle, other + 1000, -1):
            with pytest.raises(KeyError, match=f"no open request has the handle {unknown}"):
                call(unknown)


def test_arrays_of_any_layout_and_integer_type_are_accepted() -> None:
    index = SuffixIndex()
    values = [4, 2**32 - 2, 6]
    strided = np.array([4, 0, 2**32 - 2, 0, 6, 0], np.uint32)[::2]
    forms = [values, tuple(values), np.array(values, np.uint32), np.array(values, np.int64), strided]
    read_only = np.array(values, np.uint32)
    read_only.flags.writeable = False
    for i, tokens in enumerate([*forms, read_only]):
        index.add(str(i), [Rollout("a", 0, tokens)])
        handle = index.open(str(i))
        assert values == index.draft(handle, 5).tokens


def test_numpy_generations_are_accepted() -> None:
    index = SuffixIndex()
    index.add("p", [("old", np.int64(-(2**63)), [1]), ("new", np.int32(7), [2])])
    assert 1 == index.drop_before("p", 7)
    assert ["new"] == index.rollouts("p")


def test_unknown_problems_are_empty() -> None:
    index = SuffixIndex()
    assert not index.drop_problem("p")
    assert not index.drop_rollout("p", "a")
    assert 0 == index.drop_before("p", 5)
    assert ([], 0, 0) == (index.rollouts("p"), index.tokens("p"), index.bytes("p"))


def test_the_repr_of_a_draft_lists_its_properties() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [3])])
    handle = index.open("p")
    draft = index.draft(handle, 2)
    (probability,) = draft.probabilities
    assert f"Draft(tokens=[3], probabilities=[{probability}], sources=['history'], ages=[0], match_length=1)" == repr(
        draft
    )
    assert "Draft(tokens=[], probabilities=[], sources=[], ages=[], match_length=0)" == repr(index.draft(handle, 0))
