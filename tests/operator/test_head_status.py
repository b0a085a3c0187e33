"""The fields that the operator reads from a head's status are those that the coordinator writes."""

from __future__ import annotations

from rollout_operator.head_status import EngineStatus, HeadStatus

from rollout_api.protocol.status import EngineEntry, ServedStatus


def test_every_field_is_in_the_coordinators_status() -> None:
    assert set() == HeadStatus.model_fields.keys() - ServedStatus.__required_keys__
    assert set() == EngineStatus.model_fields.keys() - EngineEntry.__required_keys__
