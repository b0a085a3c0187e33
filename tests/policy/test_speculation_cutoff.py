from __future__ import annotations

from rollout_worker.policy.speculation_cutoff import LEAST_SECONDS, SpeculationCutoff


def decode(futility: SpeculationCutoff, version: int, seconds: float, *, stopped: bool, since: float = 0.0) -> float:
    for _ in range(100):
        since += seconds / 100
        futility.observe(version=version, seconds=since, stopped=stopped)
    return since


def test_an_engine_is_given_up_when_drafting_was_stopped_over_several_versions() -> None:
    futility = SpeculationCutoff()
    at = decode(futility, 1, 0.6 * LEAST_SECONDS, stopped=True)
    assert not futility.futile
    decode(futility, 2, 0.6 * LEAST_SECONDS, stopped=True, since=at)
    assert futility.futile


def test_with_the_same_weights_it_takes_longer() -> None:
    futility = SpeculationCutoff()
    at = decode(futility, 1, 3.9 * LEAST_SECONDS, stopped=True)
    assert not futility.futile
    decode(futility, 1, 0.2 * LEAST_SECONDS, stopped=True, since=at)
    assert futility.futile


def test_who_drafts_now_and_then_goes_on() -> None:
    futility, at = SpeculationCutoff(), 0.0
    for version in range(10):
        at = decode(futility, version, LEAST_SECONDS, stopped=True, since=at)
        at = decode(futility, version, 0.1 * LEAST_SECONDS, stopped=False, since=at)
        assert not futility.futile


def test_what_was_long_ago_does_not_count() -> None:
    futility = SpeculationCutoff()
    at = decode(futility, 0, LEAST_SECONDS, stopped=False)
    for version in range(1, 5):
        assert not futility.futile
        at = decode(futility, version, LEAST_SECONDS, stopped=True, since=at)
    assert futility.futile
