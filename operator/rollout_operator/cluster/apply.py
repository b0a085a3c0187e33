"""Executes plans: writes the status, posts the Events, then executes the actions. Every step is idempotent.

One of the actions keeps what a failed job leaves behind in a ConfigMap, in bounded time and size.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_api.bundle import ARCHIVE_KEY, BundleArchive, ContainerLog, Evidence
from rollout_api.manifest.rollout_job import API_VERSION, KIND
from rollout_api.redaction import Redactor
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi, job_reference, reference
from rollout_operator.cluster.object_cache import ObjectCache, job_key
from rollout_operator.objects import names
from rollout_operator.objects.observed import Manifest, Observed, Rejection, Target, format_timestamp
from rollout_operator.planning.actions import (
    Action,
    Apply,
    Create,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteWorkload,
    Event,
    KeepBundle,
    Plan,
    SetFinalizer,
)

logger = logging.getLogger(__name__)

_EVENT_PERIOD_S = 600.0
"""Identical Events within such a period are posted once."""
_FORGET_REJECTION_S = 15.0
"""Seconds after which a rejected action is no longer reported if it was not tried again when it should have been."""
_READ_BY_PODS = frozenset({"ServiceAccount", "ConfigMap"})
"""Kinds of objects without which a pod must not be created, because it would use those of an earlier job."""
_MAX_EVENT_MESSAGE = 1024
"""Limit of the Kubernetes API."""


class OutdatedError(Exception):
    """The job has changed since it was observed, so that the plan is outdated and a new reconcile is required."""


async def execute(api: KubernetesApi, cache: ObjectCache, observed: Observed, plan: Plan) -> tuple[Rejection, ...]:
    """Execute a plan.

    The API server's responses are written to the cache at once, so that the next reconcile does not have to wait for
    the watch to deliver them.

    After a permanent rejection, actions of the same scope are left out until it is time to try one of them again, so
    that a job beyond its quota causes one request now and then instead of one for each missing pod. Other actions are
    executed. No pod is created while another object that it may read is missing or outdated.

    Returns:
        The actions that the API server has rejected, in this reconcile or recently.

    Raises:
        OutdatedError: if this or another operator has written a newer status. The remaining steps were not executed.
        ApiError: if a request failed temporarily; the remaining steps were not executed. Also if the API server
            rejected the status, for example because the CRD is that of another version. Then nothing was created,
            because new pods depend on what the status says, but a job can still be suspended and deleted.
    """
    status_error: ApiError | None = None
    if plan.status is not None:
        try:
            await _write_status(api, cache, observed.job, plan)
        except ApiError as error:
            if error.transient:
                raise
            status_error = error
            event = Event("Warning", "StatusRejected", f"The API server rejected the job's status: {error.message}")
            actions = tuple(action for action in plan.actions if not isinstance(action, Create | Apply))
            plan = replace(plan, events=(event,), actions=actions)
    for event in plan.events:
        await post_event(api, observed.job, event, observed.now)
    known = {rejection.scope: rejection for rejection in observed.rejections}
    generation = observed.metadata.get("generation", 0)
    waiting = {
        one.scope for one in observed.rejections if one.generation == generation and observed.now < one.retry_time
    }
    succeeded: set[tuple[str, ...]] = set()
    rejected: dict[tuple[str, ...], Rejection] = {}
    is_complete = True
    for action in plan.actions:
        target = _target(action, observed.job)
        alike, itself = _scope(action, target), (target.kind, target.name, target.operation)
        is_read_by_pods = isinstance(action, Create | Apply) and target.kind in _READ_BY_PODS
        if isinstance(action, Create) and target.kind == "Pod" and not is_complete:
            continue
        if {alike, itself} & (waiting | rejected.keys()):
            is_complete &= not is_read_by_pods
            continue
        try:
            await _execute_action(api, cache, observed, action)
            succeeded |= {alike, itself}
        except ApiError as error:
            # The pods of a failed job are not kept any longer because their logs cannot be stored.
            if error.transient and not isinstance(action, KeepBundle):
                raise
            is_complete &= not is_read_by_pods
            # An object of the same name is in the way of this action only.
            scope = itself if error.conflict else alike
            count = known[scope].count + 1 if scope in known and scope not in succeeded else 1
            rejected[scope] = Rejection(target, error.reason, error.message, observed.now, scope, generation, count)
            logger.warning("The API server rejected %s: %s", target, error, extra=_log_fields(observed.job))
    if status_error is not None:
        raise status_error
    remembered = (
        rejection
        for scope, rejection in known.items()
        if scope not in succeeded | rejected.keys() and observed.now < rejection.retry_time + _FORGET_REJECTION_S
    )
    return (*remembered, *rejected.values())


async def _write_status(api: KubernetesApi, cache: ObjectCache, job: Manifest, plan: Plan) -> None:
    metadata = job["metadata"]
    written = job_reference(metadata["namespace"], metadata["name"])
    # With the observed resource version, the slower of two concurrent operators gets a conflict.
    written["metadata"] |= {"resourceVersion": metadata["resourceVersion"], "uid": metadata["uid"]}
    try:
        cache.update_job_from_response(await api.apply({**written, "status": plan.status}, subresource="status"))
    except ApiError as error:
        if error.not_found:
            # kopf does not report what was deleted while its watch was interrupted.
            cache.remove_job(job_key(job))
        if error.conflict or error.not_found:
            raise OutdatedError from error
        raise


async def _execute_action(api: KubernetesApi, cache: ObjectCache, observed: Observed, action: Action) -> None:
    job = observed.job
    metadata = job["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    match action:
        case Create(manifest):
            cache.update_from_response(await _create(api, manifest, job), manifest["kind"])
        case Apply(manifest):
            cache.update_from_response(await api.apply(manifest), manifest["kind"])
        case DeletePod(pod, pod_uid, force):
            if force:
                await _mark_lost(api, reference("Pod", namespace, pod), pod_uid)
            await api.delete(reference("Pod", namespace, pod), uid=pod_uid, grace_period=0 if force else None)
        case DeleteObject(api_version, kind, object_name, object_uid):
            await api.delete(reference(kind, namespace, object_name, api_version=api_version), uid=object_uid)
        case DeleteWorkload(workload):
            await _delete_workload(api, namespace, workload)
        case DeleteJob():
            await api.delete(job_reference(namespace, name), uid=metadata["uid"])
        case SetFinalizer(present):
            await _set_finalizer(api, cache, job, present=present)
        case KeepBundle(config_map, pods):
            await keep_bundle(api, job, config_map, pods, observed.now)


async def _mark_lost(api: KubernetesApi, pod: dict[str, Any], uid: str) -> None:
    """Set the phase of a pod on a lost node to Failed, as Kubernetes' garbage collector of pods does.

    Otherwise a pod that a finalizer retains would count as running for ever, for example in Kueue.
    """
    pod["metadata"]["uid"] = uid
    try:
        await api.patch({**pod, "status": {"phase": "Failed", "reason": "NodeLost"}}, subresource="status")
    except ApiError as error:
        if not (error.not_found or error.conflict):
            raise


async def _delete_workload(api: KubernetesApi, namespace: str, name: str) -> None:
    version = await api.preferred_version(names.KUEUE_GROUP)
    if version is not None:
        await api.delete(reference(names.WORKLOAD_KIND, namespace, name, api_version=version))


async def _create(api: KubernetesApi, manifest: Manifest, job: Manifest) -> Manifest:
    try:
        return await api.create(manifest)
    except ApiError as error:
        if not error.conflict:
            raise
        existing = await api.get(manifest)
        owners = existing["metadata"].get("ownerReferences", ())
        if any(owner["uid"] == job["metadata"]["uid"] for owner in owners):
            # This or another operator created it, and the watch has not delivered it yet.
            return existing
        is_of_earlier_job = any((owner["kind"], owner["name"]) == (KIND, job["metadata"]["name"]) for owner in owners)
        if is_of_earlier_job or existing["metadata"].get("deletionTimestamp"):
            raise ApiError(0, "StillTerminating", "an object of an earlier job is still being deleted") from error
        raise ApiError(
            409,
            "NameConflict",
            f"another {manifest['kind']} of this name exists and does not belong to this job; delete it, or give the "
            "job another name",
        ) from error


async def _set_finalizer(api: KubernetesApi, cache: ObjectCache, job: Manifest, *, present: bool) -> None:
    metadata = job["metadata"]
    # The cache has the resource version of the status that was just written.
    job = cache.job((metadata["namespace"], metadata["name"])) or job
    metadata = job["metadata"]
    others = [finalizer for finalizer in metadata.get("finalizers", ()) if finalizer != names.FINALIZER]
    patch = job_reference(metadata["namespace"], metadata["name"])
    # A merge patch replaces the whole list, so it must fail if another controller has changed the list meanwhile.
    patch["metadata"] |= {
        "resourceVersion": metadata["resourceVersion"],
        "finalizers": [*others, names.FINALIZER] if present else others,
    }
    try:
        response = await api.patch(patch)
    except ApiError as error:
        if error.conflict:
            raise OutdatedError from error
        if not error.not_found:
            raise
        return
    if not (response["metadata"].get("deletionTimestamp") and not response["metadata"].get("finalizers")):
        cache.update_job_from_response(response)


async def post_event(api: KubernetesApi, job: Manifest, event: Event, now: float) -> None:
    """Post a Kubernetes Event on a job, unless an identical one was posted within the last minutes.

    The Event's name is a hash of its content. Identical Events therefore have the same name, and the operator needs
    neither to remember them nor the permission to read Events.
    """
    metadata = job["metadata"]
    period = int(now // _EVENT_PERIOD_S)
    digest = hashlib.sha256(f"{metadata['uid']}/{event.reason}/{event.message}/{period}".encode()).hexdigest()[:16]
    timestamp = format_timestamp(now)
    body = {
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
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MAX_EVENT_MESSAGE],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "count": 1,
    }
    level = logging.WARNING if event.type == "Warning" else logging.INFO
    logger.log(level, "%s: %s", event.reason, event.message, extra=_log_fields(job))
    try:
        await api.create(body)
    except ApiError as error:
        if not error.conflict:
            logger.warning("An Event could not be posted: %s", error, extra=_log_fields(job))


def _target(action: Action, job: Manifest) -> Target:
    match action:
        case Create(manifest) | Apply(manifest):
            return Target(manifest["kind"], manifest["metadata"]["name"])
        case DeletePod(pod, _, _):
            return Target("Pod", pod, "deletion")
        case DeleteObject(_, kind, object_name, _):
            return Target(kind, object_name, "deletion")
        case KeepBundle(config_map, _):
            return Target("ConfigMap", config_map)
        case DeleteWorkload(workload):
            return Target(names.WORKLOAD_KIND, workload, "deletion")
        case DeleteJob():
            return Target(KIND, job["metadata"]["name"], "deletion")
        case SetFinalizer():
            return Target(KIND, job["metadata"]["name"], "finalizer")


def _scope(action: Action, target: Target) -> tuple[str, ...]:
    """Return what an action has in common with those that the API server would reject for the same reason."""
    if isinstance(action, Create | Apply):
        return target.kind, action.manifest["metadata"].get("labels", {}).get(names.COMPONENT_LABEL, "")
    return target.kind, target.operation


def _log_fields(job: Manifest) -> dict[str, str]:
    """Return the extra fields of log records about a job."""
    return {"job": f"{job['metadata']['namespace']}/{job['metadata']['name']}"}


MAX_BYTES = 700 << 10
"""Size of the archive. A ConfigMap may have 1 MiB, and a request to the API server is larger by a third."""
_MAX_LOG_BYTES = 512 << 10
"""Maximum size of each log at first; it is halved until the archive is small enough."""
_MIN_LOG_BYTES = 512
_READ_TIMEOUT_S = 15.0
"""Seconds within which logs and Events are read; what has not arrived by then is missing."""
_WRITE_TIMEOUT_S = 15.0
_LOG_LINES = 1000
_LOG_BYTES = 1 << 20
"""Maximum size of an answer of the API server; the rest is cut."""
_KEPT_BYTES = 8 << 20
"""Maximum size of all logs of a job together, so that the operator needs no more memory for a job of many pods.
Even compressed, more would not fit into a ConfigMap."""
_MIN_KEPT_BYTES = 4 << 10


async def keep_bundle(api: KubernetesApi, job: Manifest, name: str, pods: Sequence[str], now: float) -> None:
    """Store the job, its Events and the ends of the logs of its pods in a ConfigMap.

    What cannot be read is named in the bundle.

    Raises:
        ApiError: if the ConfigMap cannot be made or written in time.
    """
    evidence = Evidence(job)
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            await evidence.read(_ApiReader(api, job, pods))
    except TimeoutError:
        evidence.missing["logs"] = f"some logs or Events could not be read within {_READ_TIMEOUT_S:.0f} s"
    try:
        # In a thread, because compressing takes too long for the event loop of all jobs.
        manifest = await asyncio.to_thread(bundle_config_map, evidence, name, now)
    except Exception as error:
        # Otherwise, the reconcile would be repeated, and a failed job would keep its pods.
        logger.exception("The bundle of a failed job cannot be made.")
        raise ApiError(0, "BundleFailed", f"{type(error).__name__}: {error}") from error
    try:
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await api.apply(manifest)
    except TimeoutError:
        raise ApiError(0, "Timeout", f"the bundle could not be stored within {_WRITE_TIMEOUT_S:.0f} s") from None


class _ApiReader:
    """Reads about a job from the API server."""

    def __init__(self, api: KubernetesApi, job: Manifest, pods: Sequence[str]) -> None:
        self._api, self._pods = api, pods
        self._namespace, self._job = job["metadata"]["namespace"], job["metadata"]["name"]

    async def events(self) -> list[Manifest]:
        found = await asyncio.gather(*(self._api.events(self._namespace, name) for name in (self._job, *self._pods)))
        return [event for events in found for event in events]

    async def pods(self) -> list[Manifest]:
        found: list[Manifest] = []
        for name in self._pods:
            try:
                found.append(await self._api.get(reference("Pod", self._namespace, name)))
            except ApiError as error:
                if not error.not_found:
                    raise
        return found

    async def log(self, log: ContainerLog, num_logs: int) -> str:
        def read(num_lines: int) -> Awaitable[str]:
            return self._api.log(
                self._namespace,
                log.pod,
                log.container,
                previous=log.previous,
                num_lines=num_lines,
                max_bytes=_LOG_BYTES,
            )

        text = await read_end(read, _LOG_LINES, _LOG_BYTES)
        return last_lines(text, max(_MIN_KEPT_BYTES, _KEPT_BYTES // num_logs))


async def read_end(read: Callable[[int], Awaitable[str]], num_lines: int, max_bytes: int) -> str:
    """Return the last lines of a log.

    The API server cuts an answer at its end, where a log says why a container has failed. Therefore, an answer that was
    cut is read again with fewer lines.

    Args:
        read: returns the given number of last lines, cut to *max_bytes*.
        num_lines: maximum number of lines.
        max_bytes: an answer of this size was probably cut.
    """
    while True:
        text = await read(num_lines)
        if len(text.encode(errors="replace")) < max_bytes or num_lines <= 1:
            return text
        num_lines = max(1, num_lines // 4)


def last_lines(text: str, max_bytes: int) -> str:
    """Return the last lines of *text* that have at most *max_bytes* bytes, or the end of its last line."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return text
    end = data[len(data) - max_bytes :]
    is_line = data[len(data) - max_bytes - 1 : len(data) - max_bytes] == b"\n"
    rest = end if is_line else end.partition(b"\n")[2]
    return (rest or end).decode(errors="ignore")


def bundle_config_map(evidence: Evidence, name: str, now: float) -> dict[str, Any]:
    """Return the ConfigMap with what is kept of a failed job. It has no owner, so that it outlives the job."""
    metadata = evidence.job["metadata"]
    labels = names.labels_outside_release("bundle") | {names.BUNDLE_LABEL: metadata["name"]}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": labels,
            "annotations": {names.JOB_UID_ANNOTATION: metadata["uid"]},
        },
        "data": {"README": _summary(evidence.job, name, now)},
        "binaryData": {ARCHIVE_KEY: base64.b64encode(pack(evidence, now)).decode()},
    }


def pack(evidence: Evidence, now: float, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the archive of a bundle, with as much of the ends of the logs as fits into *max_bytes*."""
    redactor = Redactor()
    logs = {path: redactor.text(text) for path, text in evidence.logs.items() if isinstance(text, str)}
    limit = _MAX_LOG_BYTES
    while True:
        shortened: dict[str, str | bytes] = {
            path: last_lines(text, limit).encode(errors="replace") for path, text in logs.items()
        }
        archive = _archive(replace(evidence, logs=shortened), redactor, now)
        if len(archive) <= max_bytes or limit <= _MIN_LOG_BYTES:
            return archive
        limit //= 2


def _archive(evidence: Evidence, redactor: Redactor, now: float) -> bytes:
    metadata = evidence.job["metadata"]
    file = io.BytesIO()
    archive = BundleArchive(file, folder=f"bundle-{metadata['namespace']}-{metadata['name']}", redactor=redactor)
    evidence.add_to(archive)
    archive.close(
        f"Bundle of job {metadata['namespace']}/{metadata['name']}",
        f"Kept by the operator when the job failed ({format_timestamp(now)}). Passwords, tokens and keys are replaced "
        "by `***`. If the logs were long, their beginnings are missing.",
    )
    return file.getvalue()


def _summary(job: Mapping[str, Any], name: str, now: float) -> str:
    metadata = job["metadata"]
    conditions = job.get("status", {}).get("conditions", ())
    failed: Mapping[str, str] = next((one for one in conditions if one["type"] == "Failed"), {})
    why = Redactor().text(f"{failed.get('reason', '')}: {failed.get('message', '')}")
    key = ARCHIVE_KEY.replace(".", "\\.")
    return (
        f"What was kept of job {metadata['namespace']}/{metadata['name']} (uid {metadata['uid']}), which failed at "
        f"{format_timestamp(now)}: {why}\n\n"
        f"kubectl rollouts bundle {metadata['name']} reads it. Without the plugin:\n\n"
        f"  kubectl get configmap {name} -o jsonpath='{{.binaryData.{key}}}' | base64 -d > {ARCHIVE_KEY}\n\n"
        "The next job of this name that fails replaces it. It is not deleted with the job; delete it with\n"
        f"kubectl delete configmap {name}\n"
    )
