"""The status of a job, as a coordinator publishes it, for tests of what is served and scraped."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_api.manifest.rollout_job import parse_job
from rollout_head.coordinator.remaining_length import RemainingWork
from rollout_head.coordinator.status import StatusBoard, StatusInput
from rollout_store.job import EngineReport
from rollout_store.job.canary import DriftTest
from tests.support.manifests import rollout_job


def status_board(engines: Mapping[str, EngineReport] | None = None) -> StatusBoard:
    """Return the board of a job that serves one client."""
    board = StatusBoard(parse_job(rollout_job()))
    board.update(
        StatusInput(
            uid="uid",
            coordinator=1,
            requests=0,
            waiting=0,
            assigned={},
            totals={},
            engines=dict(engines or {}),
            engine_errors={},
            environment_errors={},
            engines_lost=0,
            dead_letters=0,
            weight_version=0,
            unread_bytes={"client": 0},
            slow_clients=[],
            remaining=RemainingWork(0.0, 0.0),
            drift=DriftTest(1),
            closing=False,
            paused=False,
        )
    )
    return board
