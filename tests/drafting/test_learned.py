"""What one index has learned of drafts serves another."""

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


def promises(index: SuffixIndex, problem: str, count: int, rate: float, seed: int) -> float:
    """Rollouts that go the template's way with *rate* at each token; what drafts promised by what they could expect."""
    rng = np.random.default_rng(seed)
    promised = expected = 0.0
    fresh = iter(range(10_000, 10_000_000))
    for _ in range(count):
        handle = index.open(problem, sources=("history",))
        at = 0
        while at < len(TEMPLATE):
            draft = index.draft(handle, min(4, len(TEMPLATE) - at))
            sampled: list[int] = []
            for token in [*draft.tokens, None][: len(TEMPLATE) - at]:
                sampled.append(TEMPLATE[at + len(sampled)] if rng.random() < rate else next(fresh))
                if sampled[-1] != token:
                    break
            promised += draft.expected
            assert draft.tokens == TEMPLATE[at : at + len(draft)]
            expected += sum(rate**place for place in range(1, len(draft) + 1))
            index.extend(handle, sampled)
            at += len(sampled)
        index.close(handle)
    return promised / expected


@pytest.mark.parametrize("rate", [0.3, 0.97])
def test_another_index_promises_rightly_from_its_first_rollout(rate: float) -> None:
    learned, anew, taught = index_of("p"), index_of("q"), index_of("q")
    promises(learned, "p", 1000, rate, 1)
    taught.take(learned.learned())
    told, untold = promises(taught, "q", 3, rate, 2), promises(anew, "q", 3, rate, 2)
    assert abs(told - 1) < 0.25
    assert abs(told - 1) < abs(untold - 1) / 2


def test_what_was_taken_is_soon_unlearned_where_it_is_not_so_any_more() -> None:
    learned, taught = index_of("p"), index_of("p")
    promises(learned, "p", 1000, 0.97, 1)
    taught.take(learned.learned())
    promises(taught, "p", 20, 0.3, 2)
    promises(learned, "p", 20, 0.3, 2)
    assert promises(taught, "p", 20, 0.3, 3) < 1.5
    assert promises(learned, "p", 20, 0.3, 3) > 2.5


def test_what_was_taken_can_be_given_on() -> None:
    learned, taught = index_of("p"), index_of("p")
    promises(learned, "p", 50, 0.9, 1)
    taught.take(learned.learned())
    again = index_of("p")
    again.take(taught.learned())
    assert taught.learned() == again.learned()


def test_bytes_that_no_index_has_learned_are_refused_and_change_nothing() -> None:
    index = index_of("p")
    promises(index, "p", 5, 0.9, 1)
    before = index.learned()
    numbers = bytearray(before)
    struct.pack_into("<f", numbers, 4 + 800, float("nan"))
    negative = bytearray(before)
    struct.pack_into("<f", negative, 4 + 804, -1.0)
    huge = bytearray(before)
    struct.pack_into("<f", huge, len(before) - 8, 1e30)
    other = b"\xff" + before[1:]
    for wrong in (
        b"",
        b"123",
        before[:4],
        before[:-8],
        before[:-1],
        before + b"12345678",
        other,
        numbers,
        negative,
        huge,
    ):
        with pytest.raises(ValueError, match="nothing that an index of this version has learned"):
            index.take(bytes(wrong))
    assert before == index.learned()
    with pytest.raises(TypeError):
        index.take("text")  # type: ignore[arg-type]
