"""Drafting is judged against an engine that does not wait for a drafter, with simulated durations."""

from __future__ import annotations

import pytest

from benchmarks.step_timing import WORKLOADS, Simulation

STEPS = 800


def seconds_per_token(*, drafts: bool, governed: bool, exposed_share: float) -> float:
    """Return the simulated time of an engine in which drafts pay if waiting for the drafter takes no time."""
    simulation = Simulation(
        WORKLOADS[0], 128, "NVIDIA H100", pays=True, drafts=drafts, governed=governed, exposed_share=exposed_share
    )
    return simulation.run(STEPS).seconds_per_token


@pytest.mark.parametrize(("exposed_share", "pays"), [(0.2, True), (1.0, False)])
def test_drafting_ends_if_waiting_for_the_drafter_takes_longer_than_it_saves(exposed_share: float, pays: bool) -> None:
    never = seconds_per_token(drafts=False, governed=False, exposed_share=exposed_share)
    always = seconds_per_token(drafts=True, governed=False, exposed_share=exposed_share)
    assert pays == (always < never)
    governed = seconds_per_token(drafts=True, governed=True, exposed_share=exposed_share)
    assert governed < 1.01 * always if pays else governed < (never + always) / 2
