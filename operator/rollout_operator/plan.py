"""Plans one reconcile of a job, as a pure function of the observed state.

Every reconcile plans from the whole observed state. The only memory between reconciles is the job's status, so a
reconcile may be interrupted anywhere, repeated, or done by another operator. Facts that would be lost together with a
pod, for example that it failed or that the job has completed, are written to the status first; only a later reconcile,
which observes them there, deletes the pod.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout_api.manifest.rollout_job import OPERATOR, FieldError, ManifestError
from rollout_api.manifest.status import ConditionType
from rollout_operator.actions import Event, Plan
from rollout_operator.conditions import Conditions, derive_state, set_summary
from rollout_operator.job_context import JobContext
from rollout_operator.job_reconciler import JobReconciler
from rollout_operator.observed import Observed
from rollout_operator.pods import head_pod, worker_pod
from rollout_operator.strategic_merge import PatchError
from rollout_operator.teardown import plan_deletion


def plan(observed: Observed) -> Plan:
    """Return what to do about a job now."""
    spec = observed.job.get("spec") or {}
    if spec.get("managedBy", OPERATOR) != OPERATOR:
        return Plan()
    if observed.metadata.get("deletionTimestamp"):
        return plan_deletion(observed)
    try:
        context = JobContext.from_observed(observed)
        _check_pods_can_run(context)
    except ManifestError as error:
        return _plan_invalid(observed, error)
    return JobReconciler(observed, context).plan()


def _check_pods_can_run(context: JobContext) -> None:
    """Reject manifests that are valid for ``rollout run`` but cannot run in pods.

    Raises:
        ManifestError: with one error per field.
    """
    spec, errors = context.job.spec, []
    for path, url in (("spec.redis.url", spec.redis.url), ("spec.history.redis.url", spec.history.redis.url)):
        if url is not None and url.startswith("unix:"):
            errors.append(FieldError(path, "pods cannot reach a Unix socket on another machine; use a redis:// URL"))
    builders: dict[str, Callable[[], object]] = {
        "head": lambda: head_pod(context),
        "workers": lambda: worker_pod(context, 0, replacement=False),
    }
    for section, build in builders.items():
        try:
            build()
        except PatchError as error:
            errors.append(FieldError(f"spec.{section}.podTemplate", str(error)))
    if errors:
        raise ManifestError(errors)


def _plan_invalid(observed: Observed, error: ManifestError) -> Plan:
    """Report the errors of a manifest. Existing pods, which an earlier operator version may have created, are kept."""
    generation = observed.metadata.get("generation", 0)
    conditions = Conditions.following(observed.status.get("conditions", ()), observed.now, generation)
    message = "; ".join(f"{field_error.path}: {field_error.message}" for field_error in error.errors)
    conditions.set(ConditionType.ACCEPTED, "False", "Invalid", message)
    state = derive_state(conditions, suspending=False)
    set_summary(conditions, state)
    status = {
        **observed.status,
        "observedGeneration": generation,
        "state": state,
        "conditions": conditions.dump(),
    }
    if status == observed.status:
        return Plan()
    return Plan(status, (Event("Warning", "Invalid", message),))
