"""Carries plans out: status, then notes, then actions, each idempotent."""

from __future__ import annotations

import hashlib
import logging

from rollout_api.manifest.rollout_job import API_VERSION, KIND
from rollout_operator import names
from rollout_operator.actions import Action, Apply, Create, DeleteJob, DeletePod, Note, Plan, SetFinalizer
from rollout_operator.api import ApiError, KubernetesApi, job_reference, pod_reference
from rollout_operator.conditions import timestamp
from rollout_operator.observed import Manifest, Observed, Obstacle
from rollout_operator.store import Store

logger = logging.getLogger(__name__)

_SAID_AGAIN_AFTER_S = 600.0


class OutdatedError(Exception):
    """The job has changed since it was looked at: look again."""


async def carry_out(api: KubernetesApi, store: Store, seen: Observed, plan: Plan) -> list[Obstacle]:
    """Do what a plan says.

    What the API server answers goes into the store at once: the next look need not wait for the watch to bring it.

    Returns:
        What the API server refused for good; other actions were carried out all the same.

    Raises:
        OutdatedError: another operator, or this one, wrote a newer status; nothing more was done.
        ApiError: one that passes; the rest was not done.
    """
    if plan.status is not None:
        await _write_status(api, store, seen.job, plan)
    for note in plan.notes:
        await post(api, seen.job, note, seen.now)
    obstacles = []
    for action in plan.actions:
        try:
            await _do(api, store, seen.job, action)
        except ApiError as error:
            if error.passes:
                raise
            obstacles.append(Obstacle(_named(action), error.reason, error.message, seen.now))
            logger.warning("%s was refused: %s", _named(action), error, extra=_about(seen.job))
    return obstacles


async def _write_status(api: KubernetesApi, store: Store, job: Manifest, plan: Plan) -> None:
    metadata = job["metadata"]
    reference = job_reference(metadata["namespace"], metadata["name"])
    # with the version that was looked at: of two operators at once, one is told that it is late
    reference["metadata"] |= {"resourceVersion": metadata["resourceVersion"], "uid": metadata["uid"]}
    try:
        store.answered_job(await api.apply({**reference, "status": plan.status}, subresource="status"))
    except ApiError as error:
        if error.absent:
            store.drop_job(job)  # kopf does not say what was deleted while its watch was away
        if error.conflict or error.absent:
            raise OutdatedError from error
        raise


async def _do(api: KubernetesApi, store: Store, job: Manifest, action: Action) -> None:
    metadata = job["metadata"]
    namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
    match action:
        case Create(manifest):
            store.answered(await _create(api, manifest, uid), manifest["kind"])
        case Apply(manifest):
            store.answered(await api.apply(manifest), manifest["kind"])
        case DeletePod(pod, pod_uid, force):
            await api.delete(pod_reference(namespace, pod), uid=pod_uid, grace=0 if force else None)
        case DeleteJob():
            await api.delete(job_reference(namespace, name), uid=uid)
        case SetFinalizer(present):
            await _set_finalizer(api, store, job, present=present)


async def _create(api: KubernetesApi, manifest: Manifest, owner: str) -> Manifest:
    try:
        return await api.create(manifest)
    except ApiError as error:
        if not error.conflict:
            raise
        there = await api.get(manifest)
        if any(one["uid"] == owner for one in there["metadata"].get("ownerReferences", ())):
            return there  # made a moment ago, and not heard of yet
        if there["metadata"].get("deletionTimestamp"):
            raise ApiError(0, "StillThere", "an object of an earlier job is being deleted") from error
        raise ApiError(
            409, "NameTaken", f"{manifest['kind']} {manifest['metadata']['name']} is there and is not this job's"
        ) from error


async def _set_finalizer(api: KubernetesApi, store: Store, job: Manifest, *, present: bool) -> None:
    metadata = job["metadata"]
    job = store.job((metadata["namespace"], metadata["name"])) or job  # with the status that was just written
    metadata = job["metadata"]
    others = [one for one in metadata.get("finalizers", ()) if one != names.FINALIZER]
    reference = job_reference(metadata["namespace"], metadata["name"])
    # the list is written whole: refused if it has changed meanwhile
    reference["metadata"] |= {
        "resourceVersion": metadata["resourceVersion"],
        "finalizers": [*others, names.FINALIZER] if present else others,
    }
    try:
        answer = await api.merge(reference)
    except ApiError as error:
        if error.conflict:
            raise OutdatedError from error
        if not error.absent:
            raise
        return
    if not (answer["metadata"].get("deletionTimestamp") and not answer["metadata"].get("finalizers")):
        store.answered_job(answer)


async def post(api: KubernetesApi, job: Manifest, note: Note, now: float) -> None:
    """An Event on the job; the same one again, within some minutes, is not said twice.

    Its name is made from what it says, so that it needs no memory, and no right to read Events.
    """
    metadata = job["metadata"]
    period = int(now // _SAID_AGAIN_AFTER_S)
    digest = hashlib.sha256(f"{metadata['uid']}/{note.reason}/{note.message}/{period}".encode()).hexdigest()[:16]
    time = timestamp(now)
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{digest}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": note.type,
        "reason": note.reason,
        "message": note.message[:1024],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
    level = logging.WARNING if note.type == "Warning" else logging.INFO
    logger.log(level, "%s: %s", note.reason, note.message, extra=_about(job))
    try:
        await api.create(event)
    except ApiError as error:
        if not error.conflict:
            logger.warning("An Event could not be posted: %s", error, extra=_about(job))


def _named(action: Action) -> str:
    match action:
        case Create(manifest) | Apply(manifest):
            return f"{manifest['kind']} {manifest['metadata']['name']}"
        case DeletePod(pod, _, _):
            return f"deleting Pod {pod}"
        case DeleteJob():
            return "deleting the job"
        case SetFinalizer(present):
            return "setting the finalizer" if present else "removing the finalizer"


def _about(job: Manifest) -> dict[str, str]:
    """What log lines about a job carry."""
    return {"job": f"{job['metadata']['namespace']}/{job['metadata']['name']}"}
