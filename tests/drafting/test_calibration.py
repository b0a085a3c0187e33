"""Probabilities become the rates at which drafted tokens are really accepted."""

from __future__ import annotations

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
    """Drafts of several tokens, each accepted with its own rate by position, from both sources."""
    index = SuffixIndex(max_match=16)
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


def test_every_proposal_is_observed_and_only_the_draft_is_counted() -> None:
    index = SuffixIndex()
    index.add("p", [(str(i), 0, [7, 8, 1, 2]) for i in range(8)])
    handle = index.open("p", prompt=[7, 8, 3, 4])
    index.extend(handle, [7, 8])
    draft = index.draft(handle, 4)
    assert ("history", [1, 2], 3) == (draft.source, draft.tokens, draft.match_length)
    index.extend(handle, [3])
    assert {("history", 0.0, 1.0), ("self", 1.0, 0.0)} == {
        (row.source, row.accepted, row.rejected) for row in index.calibration()
    }
    # Self was right: the second of its tokens is still compared with what comes now.
    index.extend(handle, [4])
    assert [(3, 1.0), (2, 1.0)] == sorted(
        ((row.match_length, row.accepted) for row in index.calibration() if row.source == "self"), reverse=True
    )
    assert (1, 2, 1, 0) == tuple(index.counters()["history"])
    assert (0, 0, 0, 0) == tuple(index.counters()["self"])
