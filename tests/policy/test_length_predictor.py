"""Predictions of remaining lengths: what sources are worth is learned, and quantiles are calibrated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_worker.policy.length_predictor import Evidence, LengthPredictor, Source
from tests.support.draft_policies import length_stats_of

NO_LENGTHS = LengthStats.from_lengths([])
MAX_TOKENS = 16_384


def evidence_of(
    generator: np.random.Generator, length: int, overall: LengthStats, *, noise: float | None
) -> list[Evidence]:
    """What is known about a rollout at several times, of which the text knows the rest with so much noise."""
    found = []
    for generated in (50, 200, 500, 1000):
        if generated < length:
            error = generator.normal(0.0, noise) if noise is not None else generator.normal(0.0, 2.0)
            rest = length - generated if noise is not None else 500
            found.append(Evidence(generated, MAX_TOKENS, NO_LENGTHS, overall, (), rest * math.exp(error), 64))
    return found


def replay(predictor: LengthPredictor, *, noise: float | None, rollouts: int = 2000) -> list[float]:
    """Let a predictor learn, and return which predicted quantile each remaining length of the last half was."""
    generator = np.random.default_rng(1)
    lengths = [int(length) for length in np.exp(generator.normal(6.5, 1.0, rollouts)).clip(60, MAX_TOKENS)]
    overall = length_stats_of(*lengths)
    positions = []
    for number, length in enumerate(lengths):
        examples = [predictor.examine(one) for one in evidence_of(generator, length, overall, noise=noise)]
        if number >= rollouts // 2:
            positions += [
                float((predictor.predict(one, 100) < math.log(length - one.generated)).mean()) for one in examples
            ]
        predictor.learn(examples, length)
    return positions


@pytest.mark.parametrize("noise", [0.1, 0.5, None])
def test_quantiles_are_calibrated_however_good_the_sources_are(noise: float | None) -> None:
    positions = np.array(replay(LengthPredictor(), noise=noise))
    for quantile in (0.1, 0.5, 0.9):
        assert float((positions <= quantile).mean()) == pytest.approx(quantile, abs=0.06)


def test_a_source_is_believed_as_far_as_it_was_right() -> None:
    explained = {}
    for noise in (0.1, 0.5, None):
        predictor = LengthPredictor()
        replay(predictor, noise=noise)
        explained[noise] = predictor.explained
    assert explained[0.1] > 0.9
    assert explained[0.1] > explained[0.5] > 0.5
    assert explained[None] < 0.05


def test_a_source_that_is_not_used_changes_nothing() -> None:
    with_text = Evidence(100, 4096, length_stats_of(300, 400), length_stats_of(50, 500, 900), (), 2000.0, 64)
    without = replace(with_text, text_rest=None, match=0)
    predictor = LengthPredictor([Source.LENGTHS, Source.LOOPS])
    predictor.learn([predictor.examine(with_text)], 4000)
    predicted = [predictor.predict(predictor.examine(one), 8).tolist() for one in (with_text, without)]
    assert predicted[0] == predicted[1]


def test_rollouts_of_problems_with_long_rollouts_are_expected_to_be_longer() -> None:
    overall = length_stats_of(100, 300, 1000, 3000)
    predictor = LengthPredictor()
    means = [
        float(predictor.predict(predictor.examine(Evidence(50, MAX_TOKENS, of_problem, overall)), 8).mean())
        for of_problem in (length_stats_of(100, 120), NO_LENGTHS, length_stats_of(3000, 3500))
    ]
    assert means == sorted(means)
    assert means[2] - means[0] > 1.0


def test_siblings_that_are_still_running_count_as_longer_than_they_are() -> None:
    """Otherwise, the siblings that end first would let all others appear short."""
    overall = length_stats_of(100, 300, 1000, 3000)
    predictor = LengthPredictor()
    ended = length_stats_of(100, 110)
    alone, in_company = (
        float(predictor.predict(predictor.examine(Evidence(400, MAX_TOKENS, ended, overall, running)), 8).mean())
        for running in ([400], [400, 2000, 2000, 2000])
    )
    assert in_company > alone + 0.3


@given(
    st.integers(0, 5000),
    st.integers(1, 5000),
    st.lists(st.integers(1, 9000), max_size=5),
    st.lists(st.integers(1, 9000), max_size=20),
    st.lists(st.integers(0, 9000), max_size=8),
    st.none() | st.floats(0, 1e5),
    st.integers(0, 255),
    st.integers(0, 255),
)
def test_any_evidence_leads_to_finite_quantiles_in_order(
    generated: int,
    left: int,
    lengths: list[int],
    others: list[int],
    running: list[int],
    text_rest: float | None,
    match: int,
    own_match: int,
) -> None:
    stats = [length_stats_of(*one) for one in (lengths, [*lengths, *others])]
    evidence = Evidence(generated, generated + left, *stats, running, text_rest, match, own_match)
    predictor = LengthPredictor()
    example = predictor.examine(evidence)
    predictor.learn([example], generated + left)
    quantiles = predictor.predict(example, 16)
    assert np.isfinite(quantiles).all()
    assert (np.diff(quantiles) >= 0).all()
