"""The thin layer between kopf's watches and the reconciler: no logic, no state but the store.

kopf indexes all objects before it calls any other handler, so that no job is looked at before all of what it owns is
known; the indexing functions fill the store, and the event handlers say which job to look at. All are coroutines: kopf
runs other functions in threads.
"""

from __future__ import annotations

from typing import Any

import kopf

from rollout_api.job import GROUP, PLURAL, VERSION
from rollout_operator import names
from rollout_operator.store import JobKey, Store
from rollout_operator.watched import Watched
from rollout_operator.work_queue import WorkQueue


def registry(store: Store, queue: WorkQueue[JobKey], kinds: list[Watched]) -> kopf.OperatorRegistry:
    """Handlers that fill *store* and *queue*."""
    made = kopf.OperatorRegistry()
    _watch_jobs(made, store, queue)
    for kind in kinds:
        _watch_owned(made, store, queue, kind)

    @kopf.on.login(registry=made)
    async def login(**about: Any) -> Any:
        return kopf.login_via_client(**about)

    @kopf.on.startup(registry=made)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True
        for kind in kinds:
            where = (kind.group, kind.version, kind.plural)
            settings.watching.label_selectors[where] = f"{names.MANAGED_BY}={names.APP}"

    return made


def _watch_jobs(made: kopf.OperatorRegistry, store: Store, queue: WorkQueue[JobKey]) -> None:
    @kopf.index(GROUP, VERSION, PLURAL, registry=made, id="jobs")
    async def keep(body: kopf.Body, **_: Any) -> None:
        store.put_job(dict(body))

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=made, id="job")
    async def look(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        if event["type"] == "DELETED":
            queue.forget(store.drop_job(body))
        else:
            queue.add((body["metadata"]["namespace"], body["metadata"]["name"]))


def _watch_owned(made: kopf.OperatorRegistry, store: Store, queue: WorkQueue[JobKey], kind: Watched) -> None:
    where = (kind.group, kind.version, kind.plural)

    @kopf.index(*where, registry=made, id=f"{kind.plural}-index")
    async def keep(body: kopf.Body, **_: Any) -> None:
        store.put(dict(body), kind.kind)

    @kopf.on.event(*where, registry=made, id=kind.plural)
    async def look(event: kopf.RawEvent, **_: Any) -> None:
        body = event["object"]
        key = store.drop(body, kind.kind) if event["type"] == "DELETED" else store.put(body, kind.kind)
        if key is not None:
            queue.add(key)
