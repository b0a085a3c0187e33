"""Plans what is kept of a job that has failed, before its pods are deleted. Pure."""

from __future__ import annotations

from rollout_operator import names
from rollout_operator.actions import Event, KeepBundle, PlanBuilder
from rollout_operator.observed import Observed, PodView, Target

MAX_PODS = 16
"""Number of pods whose logs are kept."""


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
