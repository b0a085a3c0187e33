"""Probabilities become the rates at which drafted tokens are really accepted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex


def run(index: SuffixIndex, problem: str, rng: np.random.Generator, rate: float, steps: int) -> list[float]:
    """Requests on a problem whose next token, after any first one, is 1 with the given rate; the drafts' claims."""
    claims = []
    for _ in range(steps):
        handle = index.open(problem, sources=("history",))
        draft = index.draft(handle, 1)
        assert [1] == draft.tokens
        claims += draft.probabilities
        index.extend(handle, [1 if rng.random() < rate else 2])
        index.close(handle)
    return claims


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
def test_converges_to_the_acceptance_rate(rate: float) -> None:
    index = SuffixIndex()
    index.add("p", [(str(i), 0, [1, 9]) for i in range(3)])
    claims = run(index, "p", np.random.default_rng(1), rate, 6000)
    # About 2,048 observations count: one standard deviation is at most 0.011.
    assert rate == pytest.approx(claims[-1], abs=0.04)


def test_forgets_a_rate_that_has_changed() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 9])])
    rng = np.random.default_rng(2)
    run(index, "p", rng, 0.9, 3000)
    claims = run(index, "p", rng, 0.1, 8000)
    assert pytest.approx(0.1, abs=0.04) == claims[-1]


def test_expected_and_real_acceptance_agree_over_whole_drafts() -> None:
    """Drafts of several tokens, from history and own text."""
    index = SuffixIndex(depth=16)
    rng = np.random.default_rng(3)
    # Every response goes the template's way with probability 0.8 at each token, else to a token never seen again.
    template = [int(token) for token in rng.permutation(1000)[:60]]
    index.add("p", [(str(i), 0, template) for i in range(4)])
    fresh = iter(range(10_000, 10_000_000))
    expected = accepted = 0.0
    for round_ in range(300):
        handle = index.open("p", prompt=[5000, *template[:10]])
        at = 0
        while at < len(template):
            draft = index.draft(handle, 6)
            survival = np.cumprod(draft.probabilities)
            sampled: list[int] = []
            for token in [*draft.tokens, -1][: len(template) - at]:
                sampled.append(template[at + len(sampled)] if rng.random() < 0.8 else next(fresh))
                if sampled[-1] != token:
                    break
            hits = sum(a == b for a, b in zip(draft.tokens, sampled, strict=False))
            if round_ >= 100:
                # Positions beyond the template's end cannot be verified.
                expected += float(survival[: len(template) - at].sum())
                accepted += hits
            index.extend(handle, sampled)
            at += len(sampled)
        index.close(handle)
    assert accepted > 1000
    assert pytest.approx(accepted, rel=0.06) == expected


def chosen(few: tuple[int, float | None], many: tuple[int, float | None], problems: int) -> list[bool]:
    """Whether what few say is drafted, in problems where it is right; each has tokens of its own.

    At the beginning of a response three rollouts of the generation and reward *few* say one token, and five of *many*
    another.
    """
    index = SuffixIndex()
    index.add("newest", [("newest", 10, [0])])
    right = []
    for problem in range(problems):
        few_say, many_say = 2 * problem + 1, 2 * problem + 2
        index.add(str(problem), [(f"few {i}", few[0], [few_say]) for i in range(3)])
        index.add(str(problem), [(f"many {i}", many[0], [many_say]) for i in range(5)])
        for one, (_, reward) in (("few", few), ("many", many)):
            if reward is not None:  # later, as trainers report them
                index.reward(str(problem), {f"{one} {i}": reward for i in range(5)})
        handle = index.open(str(problem), sources=("history",))
        right.append([few_say] == index.draft(handle, 1).tokens)
        index.extend(handle, [few_say])
        index.close(handle)
    return right


@pytest.mark.parametrize("age", [2, 4, 8])
@pytest.mark.parametrize("right", ["young", "old"])
def test_votes_of_the_age_that_is_right_come_to_count_more(age: int, right: str) -> None:
    young, old = (10, None), (10 - age, None)
    found = chosen(*((young, old) if right == "young" else (old, young)), problems=150)
    assert (False, True) == (found[0], found[-1])


def test_votes_of_the_rewarded_come_to_count_more_if_they_are_right() -> None:
    found = chosen((10, 1.0), (10, 0.0), problems=150)
    assert (False, True) == (found[0], found[-1])


def test_votes_count_the_same_while_nothing_tells_them_apart() -> None:
    assert not any(chosen((10, None), (10, None), problems=150))
    assert not any(chosen((10, 1.0), (10, 1.0), problems=150))


def test_a_token_that_is_right_again_and_again_is_preferred() -> None:
    """Though fewer say it each time, as it follows what it follows."""
    index = SuffixIndex()
    found = []
    for problem in range(150):
        rollouts = [(f"few {i}", 0, [7, 1]) for i in range(3)] + [(f"many {i}", 0, [7, 2]) for i in range(5)]
        index.add(str(problem), rollouts)
        handle = index.open(str(problem), sources=("history",))
        index.extend(handle, [7])
        found += index.draft(handle, 1).tokens
        index.extend(handle, [1])
        index.close(handle)
    assert (2, 1) == (found[0], found[-1])


def test_a_bucket_under_the_threshold_recovers() -> None:
    """What is no longer drafted for its low probability goes on being observed."""
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 9])])
    run(index, "p", np.random.default_rng(4), 0.0, 50)
    handles = [index.open("p", sources=("history",)) for _ in range(400)]
    drafts = []
    for handle in handles:
        drafts.append(len(index.draft(handle, 1, min_survival=0.5)))
        index.extend(handle, [1])
    assert (0, 1) == (drafts[0], drafts[-1])


def test_what_is_verified_is_counted_by_the_source_that_said_it() -> None:
    index = SuffixIndex()
    index.add("p", [(str(i), 0, [7, 8, 1, 2]) for i in range(8)])
    handle = index.open("p", prompt=[5, 6, 3, 4])
    index.extend(handle, [7, 8])
    draft = index.draft(handle, 4)
    assert (["history", "history"], [1, 2], 3) == (draft.sources, draft.tokens, draft.match_length)
    index.extend(handle, [1])
    index.extend(handle, [9])  # the second of its tokens is compared with what comes now
    assert (2, 2, 1) == tuple(index.counters()["history"])
    index.extend(handle, [5, 6])
    assert ["self", "self"] == index.draft(handle, 2).sources
    index.extend(handle, [0, 4])
    assert (2, 1, 0) == tuple(index.counters()["self"])
    assert (0, 0, 0) == tuple(index.counters()["siblings"])


def test_a_surprise_behind_a_long_run_leaves_probabilities_numbers() -> None:
    """All levels are nearly sure there, of each source one for each length, and none of them is right."""
    index = SuffixIndex()
    fresh = itertools.count(10)

    def unseen(count: int) -> list[int]:
        return list(itertools.islice(fresh, count))

    def finish(handle: int, context: list[int], right: int) -> None:
        index.extend(handle, unseen(1) + context)
        index.draft(handle, 1)
        index.extend(handle, [right])
        index.close(handle)

    for length, votes in itertools.product([2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48] * 20, [1, 2, 3, 5, 9, 17]):
        context, [right] = unseen(length), unseen(1)
        problem = str(right)
        prompt = [token for _ in range(votes) for token in (*unseen(1), *context, right)]
        finish(index.open(problem, prompt, sources=("self",)), context, right)
        index.add(problem, [(str(one), 0, [*unseen(1), *context, right]) for one in range(votes)])
        finish(index.open(problem, sources=("history",)), context, right)
        index.drop_problem(problem)
        siblings = [index.open(problem, sources=("siblings",)) for _ in range(votes)]
        for sibling in siblings:
            index.extend(sibling, [*unseen(1), *context, right])
        finish(index.open(problem, sources=("siblings",)), context, right)
        for sibling in siblings:
            index.close(sibling)
    for problem in ("first", "second", "third"):
        run_ = unseen(1) * 27
        index.add(problem, [("a", 0, unseen(1) + run_ + unseen(1))])
        sibling, handle = index.open(problem), index.open(problem)
        index.extend(sibling, unseen(1) + run_)
        index.extend(handle, unseen(1) + run_)
        (probability,) = index.draft(handle, 1).probabilities
        assert 0 < probability < 1
        index.extend(handle, unseen(1))


def test_a_budget_of_nothing_changes_nothing() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [7, 1, 2, 3])])
    handle = index.open("p", sources=("history",))
    index.extend(handle, [7])
    assert [1, 2, 3] == index.draft(handle, 3).tokens
    assert [] == index.draft(handle, 0).tokens
    index.extend(handle, [1, 2])
    assert (3, 2, 2) == tuple(index.counters()["history"])
