"""The thin layer between kopf's watch of RolloutJobs and the reconciler: no logic, no state."""

from __future__ import annotations

from typing import Any

import kopf

from rollout_api.job import GROUP, PLURAL, VERSION
from rollout_operator.store import JobKey, Store
from rollout_operator.work_queue import WorkQueue


def registry(store: Store, queue: WorkQueue[JobKey]) -> kopf.OperatorRegistry:
    """Handlers that keep the store's jobs and say which to look at; coroutines, since kopf runs others in threads."""
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
        body = event["object"]
        if event["type"] == "DELETED":
            queue.forget(store.drop_job(body))
        else:
            queue.add(store.put_job(body))

    return made
