"""The index keeps its byte limit, and the pool its number of tokens; the reported bytes match the contents."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex

LENGTH = 1000


def text(number: int, length: int = LENGTH) -> np.ndarray:
    """Return a text that shares no token with that of any other number."""
    return np.arange(number * 100_000, number * 100_000 + length, dtype=np.uint32)


def drafted(
    index: SuffixIndex, problem: str, sources: tuple[str, ...] = ("history",), after: int | None = None
) -> list[int]:
    handle = index.open(problem, sources=sources)
    if after is not None:
        index.extend(handle, [after])
    tokens = index.draft(handle, 2).tokens
    index.close(handle)
    return tokens


def one_problem_bytes() -> int:
    """Return the bytes of a problem with one rollout."""
    index = SuffixIndex()
    index.add("p", [("a", 0, text(1))])
    return index.bytes()


def test_the_least_recently_used_problems_are_evicted() -> None:
    index = SuffixIndex(max_bytes=3 * one_problem_bytes() + 3000)
    for number in range(3):
        index.add(str(number), [("a", 0, text(number))])
    assert [] == index.take_evicted()
    assert [0, 1] == drafted(index, "0")  # a use, without which it would be evicted next
    index.add("3", [("a", 0, text(3))])
    assert ["1"] == index.take_evicted()
    assert [] == index.take_evicted()
    assert ["0", "2", "3"] == index.problems()
    assert [] == drafted(index, "1")
    assert 0 == index.bytes("1")
    assert 1 == index.add("1", [("a", 0, text(1))])  # the rollout is new again
    assert ["2"] == index.take_evicted()
    assert [100_000, 100_001] == drafted(index, "1")


def test_problems_with_open_requests_are_evicted_last() -> None:
    index = SuffixIndex(max_bytes=3 * one_problem_bytes() + 6000)
    for number in range(3):
        index.add(str(number), [("a", 0, text(number))])
    running = index.open("0", sources=("history",))
    for number in range(3, 6):
        index.add(str(number), [("a", 0, text(number))])
    assert ["1", "2", "3"] == index.take_evicted()
    assert [0, 1] == index.draft(running, 2).tokens
    index.add("6", [("a", 0, text(6, 4 * LENGTH))])  # exceeds the limit alone
    assert ["4", "5", "6"] == index.take_evicted()
    assert [0, 1] == index.draft(running, 2).tokens
    other = index.open("7", sources=("history",))
    index.add("7", [("a", 0, text(7, 3 * LENGTH))])  # both have open requests, and only one fits
    assert ["0"] == index.take_evicted()
    assert [] == index.draft(running, 2).tokens
    assert [700_000, 700_001] == index.draft(other, 2).tokens
    index.close(running)
    index.close(other)
    index.drop_problem("7")
    assert 0 == index.bytes()


def test_bytes_stay_below_the_limit_under_random_changes() -> None:
    max_bytes = 200_000
    index = SuffixIndex(max_bytes=max_bytes, pool_tokens=5000)
    rng = np.random.default_rng(0)
    evicted: set[str] = set()
    for step in range(400):
        problem = str(rng.integers(12))
        rollouts = [(f"{step}/{i}", step, rng.integers(0, 500, rng.integers(2000))) for i in range(rng.integers(1, 4))]
        index.add(problem, [(name, generation, tokens.astype(np.uint32)) for name, generation, tokens in rollouts])
        index.wait_idle()
        assert index.bytes() <= max_bytes
        newly_evicted = set(index.take_evicted())
        assert not newly_evicted & set(index.problems())
        evicted |= newly_evicted
        if step % 7 == 0:
            index.drop_before(problem, step - 20)
    assert len(evicted) == 12


def test_a_problem_added_again_drafts_as_before() -> None:
    rng = np.random.default_rng(0)
    rollouts = [(str(i), i, rng.integers(0, 6, 500).astype(np.uint32)) for i in range(10)]
    index, other = SuffixIndex(max_bytes=100_000), SuffixIndex()
    index.add("p", rollouts)
    index.add("q", [("a", 0, text(1, 8000))])
    assert ["p"] == index.take_evicted()
    assert 10 == index.add("p", rollouts) == other.add("p", rollouts)
    handles = index.open("p"), other.open("p")
    for _ in range(20):
        tokens = rng.integers(0, 6, 5).tolist()
        index.extend(handles[0], tokens)
        other.extend(handles[1], tokens)
        drafts = index.draft(handles[0], 8), other.draft(handles[1], 8)
        assert drafts[0].tokens == drafts[1].tokens
        assert drafts[0].probabilities == drafts[1].probabilities


def test_the_pool_holds_the_last_rollouts_of_other_problems() -> None:
    index = SuffixIndex(pool_tokens=4 * LENGTH)
    for number in range(3):
        index.add(str(number), [("a", 0, text(number))])
    assert 3 * LENGTH == index.pool_tokens()
    assert [7, 8] == drafted(index, "other", ("cross_problem",), after=6)
    assert [] == drafted(index, "0", ("cross_problem",), after=6)  # its own rollouts are excluded
    assert [] == drafted(index, "other", ("history", "self", "siblings"), after=6)
    handle = index.open("other", sources=("cross_problem",))
    index.extend(handle, [6])
    draft = index.draft(handle, 2)
    assert ["cross_problem", "cross_problem"] == draft.sources
    assert [0, 0] == draft.ages
    index.close(handle)
    for number in range(3, 6):
        index.add(str(number), [("a", 0, text(number))])
    index.wait_idle()
    assert index.pool_tokens() <= 4 * LENGTH
    assert [] == drafted(index, "other", ("cross_problem",), after=6)  # the oldest was removed
    assert [500_007, 500_008] == drafted(index, "other", ("cross_problem",), after=500_006)


def test_one_call_of_add_contributes_a_sixteenth_of_the_pool() -> None:
    index = SuffixIndex(pool_tokens=64 * LENGTH)
    index.add("0", [(str(number), number, text(number)) for number in range(10)])
    assert 4 * LENGTH == index.pool_tokens()
    assert [] == drafted(index, "other", ("cross_problem",), after=5 * 100_000 + 6)
    assert [600_007, 600_008] == drafted(index, "other", ("cross_problem",), after=600_006)
    small = SuffixIndex(pool_tokens=4 * LENGTH)
    small.add("0", [(str(number), number, text(number)) for number in range(3)])
    assert LENGTH == small.pool_tokens()  # at least one rollout


def test_a_problem_added_again_is_in_the_pool_once() -> None:
    index = SuffixIndex(max_bytes=4 * one_problem_bytes(), pool_tokens=10 * LENGTH)
    index.add("0", [("a", 0, text(0))])
    index.add("1", [("a", 0, text(1))])
    index.add("2", [("a", 0, text(2))])
    assert "0" in index.take_evicted()
    before = index.pool_tokens()
    index.add("0", [("a", 0, text(0))])
    assert before == index.pool_tokens()
    assert [7, 8] == drafted(index, "other", ("cross_problem",), after=6)


def test_rollouts_dropped_after_an_eviction_are_removed_from_the_pool() -> None:
    index = SuffixIndex(max_bytes=4 * one_problem_bytes(), pool_tokens=10 * LENGTH)
    for number in range(4):
        index.add(str(number), [("a", number, text(number))])
    assert {"0", "1"} <= set(index.take_evicted())
    assert [7, 8] == drafted(index, "other", ("cross_problem",), after=6)
    assert not index.drop_rollout("0", "a")
    assert not index.drop_before("1", 2)
    assert [] == drafted(index, "other", ("cross_problem",), after=6)
    assert [] == drafted(index, "other", ("cross_problem",), after=100_006)


def test_live_texts_count_and_cause_evictions() -> None:
    index = SuffixIndex(max_bytes=6 * one_problem_bytes())
    for number in range(4):
        index.add(str(number), [("a", 0, text(number))])
    handle = index.open("other")
    index.extend(handle, text(9, 2 * LENGTH))
    index.wait_idle()
    evicted = index.take_evicted()
    assert evicted == ["0", "1", "2", "3"][: len(evicted)] != []
    index.close(handle)
    assert index.bytes() <= 6 * one_problem_bytes()


def test_histories_within_half_of_the_limit_survive_live_texts_beyond_the_limit() -> None:
    index = SuffixIndex(max_bytes=6 * one_problem_bytes())
    for number in range(2):
        index.add(str(number), [("a", 0, text(number))])
    handle = index.open("other")
    index.extend(handle, text(9, 8 * LENGTH))
    assert index.bytes("other") > 6 * one_problem_bytes()
    index.wait_idle()
    assert 1 == index.add("0", [("b", 1, [77])])
    assert [] == index.take_evicted()
    assert [2, 3] == drafted(index, "0", after=1)
    for number in range(2, 5):
        index.add(str(number), [("a", 0, text(number))])
    # Half of the limit has room for two problems, and for what "other" needs besides its live texts.
    assert ["1", "0", "2"] == index.take_evicted()
    assert ["3", "4"] == index.problems()
    assert [300_000, 300_001] == drafted(index, "3")
    index.close(handle)


def test_a_small_rest_of_a_segment_takes_little_memory() -> None:
    index, other = SuffixIndex(), SuffixIndex()
    index.add("p", [(str(number), number, text(number)) for number in range(50)])
    index.drop_before("p", 49)
    index.wait_idle()
    other.add("p", [("49", 49, text(49))])
    assert index.bytes() == pytest.approx(other.bytes(), rel=0.05)


def test_the_newest_of_equally_long_matches_are_used() -> None:
    """Of many rollouts with the same beginning, the last ones are used, regardless of merging."""
    rng = np.random.default_rng(0)
    index = SuffixIndex()
    for generation in range(16):
        index.add(
            "p",
            [
                (f"{generation}/{i}", generation, [1, 2, 3, 600 if generation > 12 else 500, *rng.integers(9, 99, 30)])
                for i in range(16)
            ],
        )
    for _ in range(2):
        handle = index.open("p", sources=("history",))
        index.extend(handle, [1, 2, 3])
        assert [15] * 16 + [14] * 16 == sorted(
            (occurrence.generation for occurrence in index.occurrences(handle)), reverse=True
        )
        assert [600] == index.draft(handle, 1).tokens
        index.wait_idle()


def test_merging_does_not_change_occurrences() -> None:
    """Rollouts that are added one by one are found immediately, and equally after merging."""
    rng = np.random.default_rng(0)
    index, whole = SuffixIndex(), SuffixIndex()
    rollouts = [(str(i), 0, rng.integers(0, 8, 60).astype(np.uint32)) for i in range(60)]
    whole.add("p", rollouts)
    for number, rollout in enumerate(rollouts):
        index.add("p", [rollout])
        assert 60 * (number + 1) == index.tokens("p")
    handle, other = index.open("p", sources=("history",)), whole.open("p", sources=("history",))
    tokens = rollouts[30][2][10:30].tolist()
    index.extend(handle, tokens)
    whole.extend(other, tokens)

    def lengths(of: SuffixIndex, by: int) -> list[int]:
        return sorted(occurrence.match_length for occurrence in of.occurrences(by))

    expected = lengths(whole, other)
    assert expected == lengths(index, handle)
    index.wait_idle()
    assert expected == lengths(index, handle)
    assert index.bytes("p") < 1.3 * whole.bytes("p")


def test_problems_are_evicted_during_concurrent_drafts() -> None:
    index = SuffixIndex(threads=2, max_bytes=80_000, pool_tokens=3000)
    errors: list[BaseException] = []
    done = threading.Event()

    def draft(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not done.is_set():
                numbers = rng.integers(0, 10, 12)
                handles = [index.open(str(number)) for number in numbers]
                for number, handle in zip(numbers, handles, strict=True):
                    index.extend(handle, text(int(number))[:5])
                for number, draft in zip(numbers, index.draft_batch(handles, [4] * 12), strict=True):
                    assert set(draft.tokens) <= set(text(int(number)).tolist())
                for handle in handles:
                    index.close(handle)
        except BaseException as error:
            errors.append(error)

    readers = [threading.Thread(target=draft, args=(seed,)) for seed in range(2)]
    for reader in readers:
        reader.start()
    for step in range(300):
        number = step % 10
        index.add(str(number), [(f"{step}", step, text(number))])
        index.set_rewards(str(number), {f"{step}": float(step % 2)})
        index.drop_before(str(number), step - 25)
    done.set()
    for reader in readers:
        reader.join()
    if errors:
        raise errors[0]
    assert index.take_evicted()


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
