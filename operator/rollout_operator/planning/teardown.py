"""Plans the end of a job: keep what its pods can tell, delete them, inform Redis, and remove the finalizer. Pure."""

from __future__ import annotations

from rollout_api.manifest.rollout_job import ManifestError
from rollout_operator.objects import names
from rollout_operator.objects.head_status import STATUS_PERIOD_S
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import Observed, PodView, Target
from rollout_operator.objects.owned_objects import cleanup_objects, connection
from rollout_operator.objects.pods import cleanup_pod
from rollout_operator.planning.actions import (
    Create,
    DeleteObject,
    DeletePod,
    DeleteWorkload,
    Event,
    KeepBundle,
    Plan,
    PlanBuilder,
    SetFinalizer,
)

POD_NOT_TERMINATING = "PodNotTerminating"
"""Reason of Events and conditions about a pod that should have terminated long ago."""
_CLEANUP_TIMEOUT_S = 120.0
"""Seconds after which the finalizer is removed even if the cleanup pod has not terminated."""
_BLOCKED_CLEANUP_TIMEOUT_S = 20.0
"""The same for a cleanup pod that cannot start."""
_BLOCKED_REASONS = frozenset({"CreateContainerConfigError", "ErrImageNeverPull", "InvalidImageName"})
"""Reasons why a pod cannot start that do not resolve themselves while its job is being removed."""
MAX_PODS = 16
"""Number of pods whose logs are kept."""


def plan_deletion(observed: Observed) -> Plan:
    """Plan for a job that is being deleted: delete its pods, run the cleanup pod, then remove the finalizer.

    Kubernetes deletes the job's other objects once the finalizer is removed. In a foreground deletion, which is Argo
    CD's default, it has deleted them before, and it would delete new ones until it removes its own finalizer. The
    cleanup therefore waits for this, and then begins by creating what it needs.
    """
    finalizers = observed.metadata.get("finalizers", ())
    if names.FINALIZER not in finalizers:
        return Plan()
    builder = PlanBuilder()
    try:
        context = JobContext.for_cleanup(observed)
    except ManifestError:
        return Plan(actions=(SetFinalizer(False),))
    delete_server(builder, observed)
    if not remove_pods(builder, observed):
        release_quota(builder, observed)
        if names.FOREGROUND_FINALIZER not in finalizers:
            run_cleanup(builder, observed, context, "the job was deleted", delete_messages=True)
    return Plan(events=tuple(builder.events), actions=tuple(builder.actions), requeue_after=builder.requeue_after)


def remove_pods(builder: PlanBuilder, observed: Observed) -> bool:
    """Delete the head and the workers, and return whether any of them must be waited for.

    A pod that does not terminate in time is reported, but delays the cleanup no longer.
    """
    pods = [pod for pod in observed.pods if pod.component != names.CLEANUP and not pod.retained]
    delete_pods(builder, pods, observed)
    if pods:
        builder.requeue(STATUS_PERIOD_S)
    return not all(pod.is_overdue(observed.now) for pod in pods)


def delete_server(builder: PlanBuilder, observed: Observed) -> None:
    """Delete the objects of the HTTP server."""
    server = names.server(observed.metadata["name"])
    for (kind, name), manifest in observed.objects.items():
        if name == server:
            builder.actions.append(DeleteObject(manifest["apiVersion"], kind, name, manifest["metadata"]["uid"]))


def describe_overdue(pod: PodView) -> str:
    """Return what is known about a pod that should have terminated long ago, and what to do about it."""
    return (
        f"Pod {pod.name} should have terminated, but node {pod.node} has not removed it and is not known to be lost. "
        "Its processes may still be running. Repair the node, or, once they have ended, run "
        f"kubectl delete pod {pod.name} --force in the namespace of the job."
    )


def delete_pods(builder: PlanBuilder, pods: list[PodView], observed: Observed) -> None:
    """Delete pods; a pod on a lost node is deleted without waiting for the node's confirmation.

    On a node that is ready, a pod that does not terminate still holds its GPUs. Without its Pod object, the scheduler
    would give them to another pod.
    """
    for pod in pods:
        if not pod.deleting:
            builder.actions.append(DeletePod(pod.name, pod.uid))
        elif pod.is_overdue(observed.now):
            if not pod.has_running_containers or pod.node in observed.lost_nodes:
                builder.actions.append(DeletePod(pod.name, pod.uid, force=True))
            else:
                builder.warn(POD_NOT_TERMINATING, describe_overdue(pod))


def release_quota(builder: PlanBuilder, observed: Observed) -> None:
    """Delete the Workloads of a job whose pods have all ended, if Kueue retains any of them.

    The pods tell which Workloads these are, because an outdated operator may have created some of an earlier group.
    """
    groups = {pod.pod_group for pod in observed.pods if pod.retained and pod.in_pod_group}
    builder.actions += [DeleteWorkload(group) for group in sorted(groups)]


def run_cleanup(
    builder: PlanBuilder, observed: Observed, context: JobContext, reason: str, *, delete_messages: bool
) -> None:
    """Run the cleanup pod, and remove the job's finalizer when it has terminated or exceeded its timeout."""
    target = Target("Pod", names.cleanup_pod(context.name))
    rejections = [rejection for rejection in observed.rejections if rejection.target == target]
    pods = observed.component(names.CLEANUP)
    if not pods and not rejections:
        if observed.metadata.get("deletionTimestamp"):
            # Kubernetes may have deleted these, and the watch may not have reported it yet. Existing ones are kept.
            builder.actions += [Create(needed) for needed in cleanup_objects(context, observed.cluster)]
        builder.actions.append(Create(cleanup_pod(context, delete_messages=delete_messages, reason=reason)))
        builder.requeue(_CLEANUP_TIMEOUT_S)
        return
    waited = observed.now - min((pod.created for pod in pods), default=observed.now)
    blocked = any(pod.reason in _BLOCKED_REASONS for pod in pods)
    timeout = _BLOCKED_CLEANUP_TIMEOUT_S if blocked else _CLEANUP_TIMEOUT_S
    # A cleanup pod that somebody has deleted is created again.
    ended = any(pod.phase == "Succeeded" or (pod.terminated and not pod.deleting) for pod in pods)
    if pods and not ended and waited < timeout:
        builder.requeue(timeout - waited)
        return
    if not any(pod.phase == "Succeeded" for pod in pods):
        cause = next((pod.message or pod.reason for pod in pods if pod.message or pod.reason), "")
        cause = cause or next(
            (rejection.message for rejection in rejections), "the cleanup pod did not finish within its timeout"
        )
        builder.warn(
            "CleanupFailed",
            f"Redis could not be informed that the job has ended ({cause.strip()[-300:]}). Keys that begin with "
            f"{connection(context).key_prefix} may remain in Redis, and clients may wait until they time out.",
        )
    builder.actions.append(SetFinalizer(False))


def plan_bundle(builder: PlanBuilder, observed: Observed) -> bool:
    """Plan to keep the bundle of a failed job, and return whether the deletion of its pods must wait for it.

    The next reconcile observes the bundle, or that it could not be kept; either way, the pods are deleted then. A job
    without finalizer has been torn down already: if somebody has deleted its bundle, it stays deleted.
    """
    if names.FINALIZER not in observed.metadata.get("finalizers", ()):
        return False
    name = names.bundle_config_map(observed.metadata["name"])
    kept = observed.kept_bundle
    if kept is not None and kept.job_uid == observed.metadata["uid"]:
        return False
    if any(rejection.target == Target("ConfigMap", name) for rejection in observed.rejections):
        return False
    if kept is not None and kept.is_foreign:
        builder.warn(
            "BundleNotKept",
            f"The end of the job's logs is lost: ConfigMap {name} exists and is no bundle of a job. Delete it, or give "
            "the next job another name.",
        )
        return False
    pods = [pod for pod in observed.pods if pod.component != names.CLEANUP]
    builder.actions.append(KeepBundle(name, tuple(pod.name for pod in sorted(pods, key=_rank)[:MAX_PODS])))
    message = f"The job's status, its Events and the ends of its logs are kept in ConfigMap {name}."
    builder.events.append(Event("Normal", "KeepingBundle", message))
    builder.requeue(0.0)
    return True


def _rank(pod: PodView) -> tuple[bool, bool, bool, int, int]:
    """Return the place of a pod in the order of importance: the head, then pods that have failed or are not ready."""
    return pod.component != names.HEAD, pod.phase != "Failed", pod.ready, pod.slot, pod.rank
