"""The cutoff after which an engine is replaced by one without speculation."""

from __future__ import annotations

from rollout_worker.policy.speculation_cutoff import MIN_DECODING_S, SpeculationCutoff


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
