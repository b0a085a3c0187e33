"""What an engine has learned is used by the engines that replace it."""

from __future__ import annotations

import pytest

from rollout_worker.drafting.index import SuffixIndex
from rollout_worker.engine.learned_state import LearnedState
from rollout_worker.policy.governor import Gain, Governor

pytestmark = pytest.mark.v2


def first_interval(governor: Governor) -> int:
    """Return the number of steps with drafts until the first one for reference."""
    step = 1
    while not governor.is_reference_step:
        governor.count_step_with_drafts()
        step += 1
    return step


def restart(state: bytes, engine: str) -> tuple[LearnedState, Governor]:
    governor = Governor()
    learned = LearnedState(SuffixIndex(), governor, engine)
    learned.load_state_dict(state)
    return learned, governor


def test_an_engine_expects_the_gain_that_an_equal_one_has_measured() -> None:
    governor = Governor()
    governor.gain = Gain(0.3, 0.1)
    state = LearnedState(SuffixIndex(), governor, "7B, H100").state_dict()
    assert 64 == first_interval(restart(state, "7B, H100")[1])
    assert 2 == first_interval(restart(state, "7B, H20")[1])


def test_a_gain_is_passed_on_until_there_is_a_newer_one() -> None:
    governor = Governor()
    governor.gain = Gain(0.3, 0.1)
    state = LearnedState(SuffixIndex(), governor, "7B, H100").state_dict()
    learned, governor = restart(state, "7B, H100")
    assert 64 == first_interval(restart(learned.state_dict(), "7B, H100")[1])
    governor.gain = Gain(0.1, 0.2)
    assert 16 == first_interval(restart(learned.state_dict(), "7B, H100")[1])


def test_the_state_of_an_engine_without_a_measured_gain_is_usable() -> None:
    state = LearnedState(SuffixIndex(), Governor(), "7B, H100").state_dict()
    assert 2 == first_interval(restart(state, "7B, H100")[1])


@pytest.mark.parametrize("state", [SuffixIndex().state_dict(), b"", b"\x81\xa5index\xc0"])
def test_a_state_of_another_version_is_refused(state: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        restart(state, "7B, H100")
