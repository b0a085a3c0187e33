"""Plans one reconcile of a job, as a pure function of the observed state.

Every reconcile plans from the whole observed state. The only memory between reconciles is the job's status, so a
reconcile may be interrupted anywhere, repeated, or done by another operator. Facts that would be lost together with a
pod, for example that it failed or that the job has completed, are written to the status first; only a later reconcile,
which observes them there, deletes the pod.
"""

from __future__ import annotations

from rollout_api.manifest.rollout_job import OPERATOR, ManifestError
from rollout_api.manifest.status import ConditionType
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import Observed
from rollout_operator.objects.owned_objects import check_pods_can_run
from rollout_operator.objects.runtimes import RUNTIME_NOT_FOUND, RuntimeNotFoundError
from rollout_operator.planning.actions import Event, Plan
from rollout_operator.planning.conditions import Conditions, derive_state, set_summary
from rollout_operator.planning.job_planner import JobPlanner
from rollout_operator.planning.teardown import plan_deletion


def plan(observed: Observed) -> Plan:
    """Return what to do about a job now."""
    spec = observed.job.get("spec") or {}
    if spec.get("managedBy", OPERATOR) != OPERATOR:
        return Plan()
    if observed.metadata.get("deletionTimestamp"):
        return plan_deletion(observed)
    try:
        wanted = JobContext.from_spec(observed)
        context = wanted.pinned_as_in(observed.status)
        check_pods_can_run(context)
    except ManifestError as error:
        return _plan_invalid(observed, error)
    return JobPlanner(observed, context, wanted).plan()


def _plan_invalid(observed: Observed, error: ManifestError) -> Plan:
    """Report the errors of a manifest, and change nothing else.

    Existing pods are kept, and a job that has ended or is suspended remains so.
    """
    generation = observed.metadata.get("generation", 0)
    conditions = Conditions.following(observed.status.get("conditions", ()), observed.now, generation)
    for kind in ConditionType:
        conditions.carry_over(kind)
    message = "; ".join(f"{field_error.path}: {field_error.message}" for field_error in error.errors)
    reason = RUNTIME_NOT_FOUND if isinstance(error, RuntimeNotFoundError) else "Invalid"
    conditions.set(ConditionType.ACCEPTED, "False", reason, message)
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
    return Plan(status, (Event("Warning", reason, message),))
