"""The governor disables drafting while it loses time, and tries it again at small cost; in the end, it gives up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.policy.draft_policy import DraftBudgets
from rollout_worker.policy.governor import MIN_DECODING_S, Gain, Governor, SpeculationCutoff, StepOutcome

Integers = npt.NDArray[np.int64]


def equal_budgets(rollouts: int, tokens: int, min_survival: float = 0.0) -> DraftBudgets:
    return DraftBudgets(np.full(rollouts, tokens), np.full(rollouts, min_survival), np.zeros(rollouts))


def make_governor(rollouts: int, **options: float) -> Governor:
    governor = Governor(**options)
    for row in range(rollouts):
        governor.open(row)
    return governor


def draft_lengths(budgets: DraftBudgets, probability: float) -> Integers:
    """Return the lengths of drafts whose tokens all have the same acceptance probability."""
    lengths = []
    for budget, survival in zip(budgets.tokens.tolist(), budgets.min_survivals.tolist(), strict=True):
        length = 0
        while length < budget and probability ** (length + 1) >= survival:
            length += 1
        lengths.append(length)
    return np.array(lengths)


def expected_accepted(lengths: Integers, probability: float) -> npt.NDArray[np.float64]:
    return np.array([sum(probability**place for place in range(1, length + 1)) for length in lengths.tolist()])


def run_step(governor: Governor, budgets: DraftBudgets, probability: float, ratios: Sequence[float]) -> Integers:
    """Run a step whose drafts have the given ratios of accepted to expected tokens; return the draft lengths."""
    rows = np.arange(len(budgets.tokens))
    lengths = draft_lengths(governor.limit(rows, budgets), probability)
    expected = expected_accepted(lengths, probability)
    accepted = np.round(np.array(ratios) * expected).astype(np.int64)
    context_tokens = np.zeros_like(lengths)
    governor.observe_step(StepOutcome(rows, accepted + 1, lengths, expected, context_tokens, governor.trial), accepted)
    return lengths


@settings(max_examples=15, deadline=None)
@given(
    rollouts=st.integers(1, 8),
    tokens=st.integers(1, 16),
    survival=st.floats(0, 0.5),
    probability=st.floats(0.5, 1.0),
    exploration=st.sampled_from([0.005, 0.0]),
)
def test_only_trials_are_drafted_after_nothing_was_accepted(
    rollouts: int, tokens: int, survival: float, probability: float, exploration: float
) -> None:
    governor = make_governor(rollouts, exploration=exploration)
    budgets, none_accepted = equal_budgets(rollouts, tokens, survival), [0.0] * rollouts
    for _ in range(6000 // rollouts + 200):
        run_step(governor, budgets, probability, none_accepted)
    later = sum(int(run_step(governor, budgets, probability, none_accepted).sum()) for _ in range(2000))
    assert later <= exploration * 2000 * rollouts + 16 * (exploration > 0)
    assert (later > 0) == (exploration > 0)


def test_rejected_drafts_of_one_rollout_do_not_affect_another() -> None:
    governor, budgets = make_governor(2), equal_budgets(2, 8, 0.2)
    for _ in range(600):
        run_step(governor, budgets, 0.9, [1.0, 0.0])
    good, bad = draft_lengths(governor.limit(np.arange(2), budgets), 0.9).tolist()
    assert 8 == good
    assert bad <= 1


def test_a_new_rollout_does_not_inherit_the_history_of_its_row() -> None:
    governor, budgets = make_governor(2), equal_budgets(2, 8, 0.2)
    for _ in range(600):
        run_step(governor, budgets, 0.9, [1.0, 0.0])
    governor.open(1)
    assert [8, 8] == draft_lengths(governor.limit(np.arange(2), budgets), 0.9).tolist()


def test_budgets_are_unchanged_while_acceptance_is_as_expected() -> None:
    governor, budgets = make_governor(2), equal_budgets(2, 8, 0.2)
    for _ in range(1000):
        assert [8, 8] == run_step(governor, budgets, 0.95, [1.0, 1.0]).tolist()
    limited = governor.limit(np.arange(2), budgets)
    assert [8, 8] == limited.tokens.tolist()
    assert [0.2, 0.2] == limited.min_survivals.tolist()


def observe_times(
    governor: Governor, *, slower: float, saving: float, steps: int, noise: Callable[[], float] = lambda: 1.0
) -> int:
    """Observe the times of some steps, or until drafting is disabled.

    Args:
        governor: makes the decisions.
        slower: duration of a step with drafts as a multiple of one without.
        saving: value of the accepted tokens as a share of a step without drafts.
        steps: maximum number of steps.
        noise: returns a factor on the duration of the next step.

    Returns:
        The number of steps that were decoded without drafts, for reference.
    """
    references = 0
    for _ in range(steps):
        if governor.drafting_disabled:
            break
        is_reference = governor.is_reference_step
        governor.count_step_with_drafts()
        governor.observe_time((1.0 if is_reference else slower) * noise(), None if is_reference else saving)
        references += is_reference
    return references


def bursts(rng: np.random.Generator) -> Callable[[], float]:
    """Return the slowness of a machine beside a neighbour that is busy for dozens of steps at a time."""
    factors = (
        factor * np.exp(0.1 * rng.standard_normal())
        for _ in itertools.count()
        for factor in [rng.uniform(2, 20) if rng.random() < 0.5 else 1.0] * int(rng.integers(5, 100))
    )
    return lambda: next(factors)


def test_drafting_is_disabled_while_it_loses_time_and_enabled_when_it_would_gain() -> None:
    governor, budgets, all_accepted = make_governor(8), equal_budgets(8, 4), [1.0] * 8
    observe_times(governor, slower=1.3, saving=0.1, steps=30)
    assert governor.drafting_disabled
    tried = 0
    for _ in range(2000):
        tried += int(run_step(governor, budgets, 0.5, all_accepted).sum())
        # Eight times this gain, minus the fixed cost of drafts, is too little.
        if governor.trial is not None:
            governor.observe_trial(governor.trial, without_drafts_s=0.01, gain_s=0.00002, drafting_s=0.0001)
    assert governor.drafting_disabled
    assert 0 < tried <= 0.006 * 2000 * 8
    for _ in range(4000):
        run_step(governor, budgets, 0.5, all_accepted)
        if governor.trial is not None:
            governor.observe_trial(governor.trial, without_drafts_s=0.01, gain_s=0.00004, drafting_s=0.0001)
    assert not governor.drafting_disabled
    assert 8 * 4 == governor.limit(np.arange(8), budgets).tokens.sum()


def test_drafting_is_tried_again_after_a_time_that_doubles() -> None:
    governor = make_governor(2)
    intervals = []
    for _ in range(4):
        observe_times(governor, slower=1.2, saving=0.1, steps=100)
        steps = 0
        while governor.drafting_disabled:
            governor.count_step()
            steps += 1
        intervals.append(steps)
    assert [256, 512, 1024, 2048] == intervals


@pytest.mark.parametrize("seed", range(20))
def test_a_neighbour_does_not_disable_drafting_that_pays_nor_keep_drafting_that_loses(seed: int) -> None:
    governor = make_governor(4)
    observe_times(governor, slower=1.2, saving=0.3, steps=5000, noise=bursts(np.random.default_rng(seed)))
    assert 0 == governor.num_stops
    governor = make_governor(4)
    observe_times(governor, slower=1.2, saving=0.05, steps=400, noise=bursts(np.random.default_rng(seed)))
    assert governor.drafting_disabled


def test_random_variation_does_not_disable_drafting_but_a_small_persistent_loss_does() -> None:
    rng = np.random.default_rng(0)
    for slower, expected in ((1.0, False), (1.07, True)):
        governor = make_governor(4)
        observe_times(
            governor, slower=slower, saving=0.01, steps=3000, noise=lambda: float(np.exp(0.1 * rng.standard_normal()))
        )
        assert expected == governor.drafting_disabled


@pytest.mark.parametrize(("drafter_share", "verified"), [(0.0, 0.25), (0.15, 0.25), (0.0, 1.0), (0.25, 1.0)])
def test_the_time_of_the_drafter_counts_also_in_steps_whose_drafts_are_not_verified(
    drafter_share: float, verified: float
) -> None:
    # Accepted tokens save 0.2 of a step, and a step is not longer for its drafts, except for what the drafter takes.
    governor, rng = make_governor(8), np.random.default_rng(1)
    for _ in range(4000):
        if governor.drafting_disabled:
            break
        is_reference = governor.is_reference_step
        has_drafts = rng.random() < verified
        if has_drafts:
            governor.count_step_with_drafts()
        saving = 0.2 if has_drafts and not is_reference else None
        governor.observe_time(1.0, saving, drafter_share=drafter_share)
    assert governor.drafting_disabled == (drafter_share > 0)


def test_few_steps_are_decoded_for_reference_if_it_is_certain_that_drafts_pay() -> None:
    assert observe_times(make_governor(4), slower=1.2, saving=1.0, steps=1000) <= 9
    assert observe_times(make_governor(4), slower=1.2, saving=0.21, steps=1000) <= 1000 / 16 + 5


def test_steps_that_do_not_follow_each_other_are_not_compared() -> None:
    governor = make_governor(4)
    for _ in range(200):
        governor.observe_time(2.0, 0.1)
        governor.observe_time(None)
        governor.observe_time(1.0)
        governor.observe_time(None)
    assert not governor.drafting_disabled


@pytest.mark.parametrize(("saving", "pays"), [(0.1, False), (0.5, True)])
def test_alternating_micro_batches_are_judged(saving: float, pays: bool) -> None:
    governor, rng = make_governor(4), np.random.default_rng(0)
    for step in range(200):
        is_reference = governor.is_reference_step
        governor.count_step_with_drafts()
        # The second micro-batch has much longer steps.
        time = (1.0 if is_reference else 1.3) * (1.0, 5.0)[step % 2] * float(np.exp(0.05 * rng.standard_normal()))
        governor.observe_time(time, None if is_reference else saving, micro_batch=step % 2)
    assert pays != governor.drafting_disabled
    if pays:
        assert governor.gain.value > governor.gain.error


def test_steps_of_different_micro_batches_are_not_compared() -> None:
    governor = make_governor(4)
    for _ in range(200):
        governor.observe_time(2.0, 0.1, micro_batch=1)
        governor.observe_time(1.0, micro_batch=2)
    assert not governor.gain.is_known
    assert not governor.drafting_disabled


def test_uncertain_times_of_decoding_do_not_hide_a_loss() -> None:
    """Reading prompts takes most of the time in four of five steps."""
    governor, rng = make_governor(4), np.random.default_rng(0)
    for _ in range(400):
        is_reference, share = governor.is_reference_step, 0.3 if rng.random() < 0.8 else 1.0
        governor.count_step_with_drafts()
        time = (1.0 if is_reference else 1.2) + 0.03 / share * float(rng.standard_normal())
        governor.observe_time(time, None if is_reference else 0.1, weight=share**2)
    assert governor.drafting_disabled


def one_sided(kind: str, mean: float, rng: np.random.Generator) -> float:
    """Return a delay with this mean; most delays are smaller."""
    if mean == 0:
        return 0.0
    if kind == "exponential":
        return float(rng.exponential(mean))
    if kind == "lognormal":
        return float(mean * np.exp(rng.standard_normal() - 0.5))
    return float(rng.random() < mean)  # few steps are delayed by a whole step


@pytest.mark.parametrize("kind", ["exponential", "lognormal", "rare"])
@pytest.mark.parametrize(
    ("with_drafts", "without", "max_stops"),
    [(0.2, 0.2, 3), (0.2, 0.0, 3), (0.0, 0.2, 25)],
    ids=["both", "with drafts", "without"],
)
def test_one_sided_delays_do_not_count_against_drafting(
    kind: str, with_drafts: float, without: float, max_stops: int
) -> None:
    """Steps take equally long on average with and without drafts, which gain and lose nothing.

    Where only steps without drafts are delayed, the few of them that are compared may lack the delays. Medians would
    show a loss in almost every case.
    """
    stops, gains = 0, []
    for seed in range(100):
        governor, rng = make_governor(4), np.random.default_rng(seed)
        for _ in range(400):
            is_reference = governor.is_reference_step
            governor.count_step_with_drafts()
            mean = without if is_reference else with_drafts
            time = 1.2 - mean + one_sided(kind, mean, rng)
            governor.observe_time(time, None if is_reference else 0.0)
            if governor.drafting_disabled:
                break
        stops += governor.num_stops
        gains.append(governor.gain.value)
    assert stops <= max_stops
    assert abs(float(np.mean(gains))) < 0.05


def test_an_expected_gain_delays_the_steps_for_reference_but_does_not_count() -> None:
    def first_reference(expected: Gain | None) -> int:
        governor = make_governor(4)
        if expected is not None:
            governor.expect(expected)
        assert not governor.gain.is_known
        step = 1
        while not governor.is_reference_step:
            governor.count_step_with_drafts()
            step += 1
        return step

    assert [2, 64, 16, 2] == [
        first_reference(expected) for expected in (None, Gain(0.3, 0.1), Gain(0.1, 0.3), Gain(-0.3, 0.1))
    ]
    governor = make_governor(4)
    governor.expect(Gain(0.3, 0.1))
    observe_times(governor, slower=1.5, saving=0.1, steps=120)
    assert governor.drafting_disabled


def test_trials_take_no_more_time_than_their_share() -> None:
    governor, budgets = make_governor(64), equal_budgets(64, 8)
    governor.drafting_disabled, governor.num_stops = True, 1
    governor.trial_cost = 2.0  # steps without drafts
    trials = 0
    for _ in range(4000):
        trials += bool(run_step(governor, budgets, 0.9, [0.0] * 64).any())
    assert 0 < 2.0 * trials <= 0.005 * 4000


@given(lengths=st.lists(st.integers(0, 16), min_size=1, max_size=8).filter(any))
def test_drafts_that_are_together_not_worth_verifying_are_reduced_to_one_trial(lengths: list[int]) -> None:
    governor, rows, drafted = make_governor(len(lengths)), np.arange(len(lengths)), np.array(lengths)
    with_draft = [place for place, length in enumerate(lengths) if length]
    explored = generated = 0
    for _ in range(400):
        governor.limit(rows, equal_budgets(len(lengths), 16))
        selected = governor.select_trial(rows, drafted)
        verified = np.zeros_like(drafted)
        if selected is not None:
            assert selected in with_draft
            verified[selected] = drafted[selected]
        explored, generated = explored + int(verified.sum()), generated + len(lengths)
        none = np.zeros_like(drafted)
        outcome = StepOutcome(rows, none + 1, verified, none.astype(float), none, governor.trial)
        governor.observe_step(outcome, none)
    assert explored <= 0.005 * generated + 16


def test_the_state_does_not_oscillate_where_gains_and_losses_are_about_equal() -> None:
    governor = make_governor(4)
    for number in range(500):
        observe_times(governor, slower=1.1, saving=0.15 if number % 2 else 0.05, steps=10)
        governor.count_step()
    assert governor.num_stops <= 3


def decode(cutoff: SpeculationCutoff, version: int, seconds: float, *, disabled: bool, start_s: float = 0.0) -> float:
    """Observe *seconds* of decoding with a weight version, and return the total seconds of decoding."""
    total_s = start_s
    for _ in range(100):
        total_s += seconds / 100
        cutoff.observe(weight_version=version, decoding_s=total_s, drafting_disabled=disabled)
    return total_s


def test_the_cutoff_is_reached_after_drafting_was_disabled_for_several_versions() -> None:
    cutoff = SpeculationCutoff()
    total_s = decode(cutoff, 1, 0.6 * MIN_DECODING_S, disabled=True)
    assert not cutoff.is_reached
    decode(cutoff, 2, 0.6 * MIN_DECODING_S, disabled=True, start_s=total_s)
    assert cutoff.is_reached


def test_the_cutoff_is_reached_later_with_one_version() -> None:
    cutoff = SpeculationCutoff()
    total_s = decode(cutoff, 1, 3.9 * MIN_DECODING_S, disabled=True)
    assert not cutoff.is_reached
    decode(cutoff, 1, 0.2 * MIN_DECODING_S, disabled=True, start_s=total_s)
    assert cutoff.is_reached


def test_the_cutoff_is_not_reached_while_drafting_is_enabled_at_times() -> None:
    cutoff, total_s = SpeculationCutoff(), 0.0
    for version in range(10):
        total_s = decode(cutoff, version, MIN_DECODING_S, disabled=True, start_s=total_s)
        total_s = decode(cutoff, version, 0.1 * MIN_DECODING_S, disabled=False, start_s=total_s)
        assert not cutoff.is_reached


def test_only_the_newest_four_versions_count() -> None:
    cutoff = SpeculationCutoff()
    total_s = decode(cutoff, 0, MIN_DECODING_S, disabled=False)
    for version in range(1, 5):
        assert not cutoff.is_reached
        total_s = decode(cutoff, version, MIN_DECODING_S, disabled=True, start_s=total_s)
    assert cutoff.is_reached
