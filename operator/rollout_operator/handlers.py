"""The thin layer between kopf's watch of RolloutJobs and whoever works with them: no logic, no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from rollout_api.manifest.rollout_job import GROUP, PLURAL, VERSION
from rollout_operator.observed import Manifest

Told = Callable[[Manifest], None]


def registry(put: Told, drop: Told) -> kopf.OperatorRegistry:
    """Handlers that say which jobs there are; coroutines, since kopf runs others in threads.

    Args:
        put: is told of a job that is new or has changed.
        drop: is told of a job that is gone.
    """
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def login(**about: Any) -> Any:
        return kopf.login_via_client(**about)

    @kopf.on.startup(registry=made)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=made)
    async def job_event(event: kopf.RawEvent, **_: Any) -> None:
        (drop if event["type"] == "DELETED" else put)(event["object"])

    return made
