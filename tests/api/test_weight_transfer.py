"""Which engines take the places of a trainer's group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import InvalidRequestError
from rollout_api.client.weight_transfer import _choose_members


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 20))
def test_engines_take_all_places_without_gaps_or_the_size_is_refused(num: int, ranks: int, places: int) -> None:
    engines = {f"engine-{number}": {"ranks": ranks} for number in range(num)}
    if places % ranks or places > num * ranks:
        with pytest.raises(InvalidRequestError, match=f"use world_size {num * ranks + 1}"):
            _choose_members(engines, {"rank_offset": 1, "world_size": places + 1})
        return
    members = _choose_members(engines, {"rank_offset": 1, "world_size": places + 1})
    taken = [first + offset for first in members.values() for offset in range(ranks)]
    assert list(range(1, places + 1)) == sorted(taken)
