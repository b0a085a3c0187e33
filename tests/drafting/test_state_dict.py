"""An index can continue from the learned parameters of another."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex

TEMPLATE = [int(token) for token in np.random.default_rng(7).permutation(1000)[:60]]


def index_of(problem: str) -> SuffixIndex:
    index = SuffixIndex(depth=16)
    index.add(problem, [("a", 0, TEMPLATE)])
    return index


def overestimation(index: SuffixIndex, problem: str, count: int, rate: float, seed: int) -> float:
    """Run *count* rollouts whose tokens are those of the template with probability *rate*.

    Returns the predicted number of accepted draft tokens, divided by its true expectation.
    """
    rng = np.random.default_rng(seed)
    predicted = expected = 0.0
    fresh = iter(range(10_000, 10_000_000))
    for _ in range(count):
        handle = index.open(problem, sources=("history",))
        position = 0
        while position < len(TEMPLATE):
            draft = index.draft(handle, min(4, len(TEMPLATE) - position))
            sampled: list[int] = []
            for token in [*draft.tokens, None][: len(TEMPLATE) - position]:
                sampled.append(TEMPLATE[position + len(sampled)] if rng.random() < rate else next(fresh))
                if sampled[-1] != token:
                    break
            predicted += draft.expected
            assert draft.tokens == TEMPLATE[position : position + len(draft)]
            expected += sum(rate**length for length in range(1, len(draft) + 1))
            index.extend(handle, sampled)
            position += len(sampled)
        index.close(handle)
    return predicted / expected


@pytest.mark.parametrize("rate", [0.3, 0.97])
def test_loaded_parameters_are_accurate_from_the_first_rollout(rate: float) -> None:
    trained, untrained, loaded = index_of("p"), index_of("q"), index_of("q")
    overestimation(trained, "p", 1000, rate, 1)
    loaded.load_state_dict(trained.state_dict())
    with_state = overestimation(loaded, "q", 3, rate, 2)
    without_state = overestimation(untrained, "q", 3, rate, 2)
    assert abs(with_state - 1) < 0.25
    assert abs(with_state - 1) < abs(without_state - 1) / 2


def test_loaded_parameters_adapt_quickly_to_a_changed_distribution() -> None:
    trained, loaded = index_of("p"), index_of("p")
    overestimation(trained, "p", 1000, 0.97, 1)
    loaded.load_state_dict(trained.state_dict())
    overestimation(loaded, "p", 20, 0.3, 2)
    overestimation(trained, "p", 20, 0.3, 2)
    assert overestimation(loaded, "p", 20, 0.3, 3) < 1.5
    assert overestimation(trained, "p", 20, 0.3, 3) > 2.5


def test_loaded_parameters_can_be_saved_again() -> None:
    trained, loaded = index_of("p"), index_of("p")
    overestimation(trained, "p", 50, 0.9, 1)
    loaded.load_state_dict(trained.state_dict())
    again = index_of("p")
    again.load_state_dict(loaded.state_dict())
    assert loaded.state_dict() == again.state_dict()


def test_an_invalid_state_is_rejected_and_changes_nothing() -> None:
    index = index_of("p")
    overestimation(index, "p", 5, 0.9, 1)
    before = index.state_dict()
    not_a_number = bytearray(before)
    struct.pack_into("<f", not_a_number, 4 + 800, float("nan"))
    negative = bytearray(before)
    struct.pack_into("<f", negative, 4 + 804, -1.0)
    huge = bytearray(before)
    struct.pack_into("<f", huge, len(before) - 8, 1e30)
    other_layout = b"\xff" + before[1:]
    for wrong in (
        b"",
        b"123",
        before[:4],
        before[:-8],
        before[:-1],
        before + b"12345678",
        other_layout,
        not_a_number,
        negative,
        huge,
    ):
        with pytest.raises(ValueError, match="was not returned by state_dict"):
            index.load_state_dict(bytes(wrong))
    assert before == index.state_dict()
    with pytest.raises(TypeError):
        index.load_state_dict("text")
