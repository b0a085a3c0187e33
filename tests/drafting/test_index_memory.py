"""The reported bytes match the contents of the index."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex


def rollouts(count: int, length: int, generation: int = 0) -> list[tuple[str, int, np.ndarray]]:
    rng = np.random.default_rng(generation)
    return [(f"{generation}/{i}", generation, rng.integers(0, 9, length).astype(np.uint32)) for i in range(count)]


def test_an_empty_index_has_no_bytes() -> None:
    index = SuffixIndex()
    assert 0 == index.bytes()
    assert 0 == index.bytes("p")
    index.add("p", [])
    assert 0 == index.bytes()


def test_history_counts_until_it_is_dropped() -> None:
    index = SuffixIndex()
    index.add("p", rollouts(4, 1000))
    problem_bytes = index.bytes("p")
    # Each token takes two bytes of text, two of a sorted position, and one for the length shared with its neighbor.
    assert 5 * 4000 < problem_bytes < 6 * 4000
    index.add("q", rollouts(4, 1000))
    assert problem_bytes == index.bytes("q")
    assert 2 * problem_bytes < index.bytes() < 2 * problem_bytes + 1000
    index.add("p", rollouts(4, 1000, generation=1))
    index.wait_idle()
    assert 2 * 5 * 4000 < index.bytes("p") < 2.1 * problem_bytes
    assert 4 == index.drop_before("p", 1)
    assert problem_bytes == pytest.approx(index.bytes("p"), rel=0.01)
    assert index.drop_problem("p")
    assert 0 == index.bytes("p")
    for i in range(4):
        assert index.drop_rollout("q", f"0/{i}")
    assert 0 == index.bytes()


def test_equal_contents_take_equal_bytes() -> None:
    index, other = SuffixIndex(), SuffixIndex()
    index.add("p", rollouts(3, 500))
    baseline = index.bytes()
    assert 0 == index.add("p", rollouts(3, 500))
    assert baseline == index.bytes()
    for _ in range(3):
        index.add("p", [("extra", 5, [1, 2, 3] * 200), ("empty", 5, [])])
        index.wait_idle()
        assert index.bytes() > baseline
        index.drop_before("p", 0)
        index.drop_rollout("p", "extra")
        index.drop_rollout("p", "empty")
        index.wait_idle()
        assert baseline == index.bytes()
    other.add("p", rollouts(3, 500))
    assert other.bytes() == index.bytes()


def test_open_requests_count_until_they_are_closed() -> None:
    index = SuffixIndex()
    index.add("p", rollouts(2, 200))
    baseline = index.bytes()
    history_only = index.open("p", [1] * 1000, sources=("history",))
    without_text = index.bytes() - baseline
    own = index.open("p", [1] * 1000)
    with_text = index.bytes() - baseline
    assert with_text > 2 * without_text + 5 * 1000
    other = index.open("p", [1] * 1000)  # requests of a group share their prompt
    assert index.bytes() - baseline < with_text + 2 * without_text + 5 * 1000
    before = index.bytes()
    index.extend(own, [1] * 5000)
    assert 2 * 4 * 5000 < index.bytes() - before < 2 * 120 * 5000
    for handle in (own, history_only, other):
        index.close(handle)
    assert baseline == index.bytes()


def test_a_problem_without_history_is_removed_with_its_last_request() -> None:
    index = SuffixIndex()
    handle = index.open("p")
    assert [] == index.problems()
    assert index.bytes() > 0
    index.close(handle)
    assert 0 == index.bytes()


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: `hblkhd` and `uordblks` are the bytes in use in large and in other blocks."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="requires glibc's mallinfo2")
def test_reported_bytes_match_the_allocator() -> None:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallocInfo

    def in_use() -> int:
        info = mallinfo()
        return int(info.hblkhd + info.uordblks)

    index = SuffixIndex()
    for generation in range(3):  # allocates the tables of the background thread
        index.add("q", rollouts(1, 100, generation))
    index.wait_idle()
    index.drop_problem("q")
    assert 0 == index.bytes()
    before = in_use()
    for generation in range(3):
        index.add("p", rollouts(4, 30_000, generation))
    index.wait_idle()
    handle = index.open("p", [1, 2] * 40_000)
    assert index.bytes() == pytest.approx(in_use() - before, rel=0.03)
    index.close(handle)
    index.drop_before("p", 1)
    assert index.bytes() == pytest.approx(in_use() - before, rel=0.03)
    index.drop_problem("p")
    assert in_use() - before < 100_000
