"""What to do about one job: a pure function of what is seen of it.

Each pass looks at the whole job and plans from it. Nothing is remembered between passes but what stands in the job's
status, so a pass may be cut short anywhere, repeated, or made by another operator. What would be lost with a pod (that
it failed, that the job is over) is written into the status first; only a later pass, which sees it there, deletes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout_api.manifest.rollout_job import MANAGER, FieldError, ManifestError, RolloutJob, parse_job
from rollout_api.manifest.status import ConditionType, Failure, ProgressStatus, RolloutJobStatus, WorkersStatus
from rollout_operator import names
from rollout_operator.actions import Action, Apply, Create, DeleteJob, DeletePod, Note, Plan, SetFinalizer, Steps
from rollout_operator.conditions import Conditions, is_true, state, timestamp
from rollout_operator.drift import differs
from rollout_operator.failures import Answer, delay, judge
from rollout_operator.head_status import HeadStatus
from rollout_operator.objects import connection, objects
from rollout_operator.observed import Observed, PodView, seconds
from rollout_operator.pods import JobIdentity, end_pod, head_pod, worker_pod
from rollout_operator.scaling import desired, to_give_back
from rollout_operator.strategic_merge import PatchError

STATUS_PERIOD_S = 10.0
"""How often the head of a running job is asked."""

_KEPT_FAILURES = 10
_LONGEST_TEXT = 1000
_TELLING_CANARIES = 20
_DRIFTED = (
    "rollouts without drafts differ from their siblings: drafts change what is sampled, which they must never do. Set "
    'speculation.policy to "off" in a new job, and report it with the versions of vLLM and of this project'
)
_UNVERIFIED = (
    "vLLM does not verify the drafts that are proposed, so that they cost time and save none; look for warnings about "
    "speculation in the log of engines "
)
_END_PATIENCE_S = 120.0
_STUCK_PATIENCE_S = 20.0
_STUCK = frozenset({"CreateContainerConfigError", "ErrImageNeverPull", "InvalidImageName"})
"""Reasons for which a pod does not start that do not pass while its job goes."""
_NOTHING = Plan()


def plan(seen: Observed) -> Plan:
    """What to do now about a job."""
    spec = seen.job.get("spec") or {}
    if spec.get("managedBy", MANAGER) != MANAGER:
        return _NOTHING
    if seen.metadata.get("deletionTimestamp"):
        return _teardown(seen)
    try:
        identity = _identity(seen)
        _check_for_cluster(identity)
    except ManifestError as error:
        return _refused(seen, error)
    pass_ = _Pass(seen, identity)
    if is_true(seen.status.get("conditions", ()), ConditionType.SUCCEEDED):
        pass_.after_success()
    elif is_true(seen.status.get("conditions", ()), ConditionType.FAILED):
        pass_.after_failure()
    else:
        pass_.run()
    return pass_.plan()


def _identity(seen: Observed) -> JobIdentity:
    metadata = seen.metadata
    manifest = {
        "apiVersion": seen.job["apiVersion"],
        "kind": seen.job["kind"],
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "spec": seen.job.get("spec"),
    }
    return JobIdentity(parse_job(manifest), metadata["uid"], metadata.get("labels") or {}, seen.default_image)


def _check_for_cluster(identity: JobIdentity) -> None:
    """Refuse what ``rollout run`` can do and pods cannot."""
    spec, errors = identity.job.spec, []
    for path, url in (("spec.redis.url", spec.redis.url), ("spec.history.redis.url", spec.history.redis.url)):
        if url is not None and url.startswith("unix:"):
            errors.append(FieldError(path, "pods cannot reach a socket of another machine; use redis://"))
    makers: dict[str, Callable[[], object]] = {
        "head": lambda: head_pod(identity),
        "workers": lambda: worker_pod(identity, 0, replacement=False),
    }
    for section, make in makers.items():
        try:
            make()
        except PatchError as error:
            errors.append(FieldError(f"spec.{section}.podTemplate", str(error)))
    if errors:
        raise ManifestError(errors)


def _refused(seen: Observed, error: ManifestError) -> Plan:
    """Say what is wrong. Pods that an earlier version of the operator made are left as they are."""
    generation = seen.metadata.get("generation", 0)
    conditions = Conditions.after(seen.status.get("conditions", ()), seen.now, generation)
    text = "; ".join(f"{one.path}: {one.message}" for one in error.errors)
    conditions.say(ConditionType.ACCEPTED, "False", "Invalid", text)
    status = {
        **seen.status,
        "observedGeneration": generation,
        "state": state(conditions, suspending=False),
        "conditions": _dumped(conditions),
    }
    if status == seen.status:
        return _NOTHING
    return Plan(status, (Note("Warning", "Invalid", text),))


def _dumped(conditions: Conditions) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json", by_alias=True) for one in conditions.all()]


def _teardown(seen: Observed) -> Plan:
    """The job is being deleted: its pods end, Redis is told, and Kubernetes deletes what the job owns."""
    if names.FINALIZER not in seen.metadata.get("finalizers", ()):
        return _NOTHING
    steps = Steps()
    running = [pod for pod in seen.pods if pod.component != names.END]
    try:
        identity = _identity(seen)
    except ManifestError:
        return Plan(actions=(SetFinalizer(False),))
    if running:
        _delete_all(steps, running, seen.now)
        steps.look_again(STATUS_PERIOD_S)
    else:
        _tell_redis(steps, seen, identity, "the job was deleted", delete=True)
    return Plan(notes=tuple(steps.notes), actions=tuple(steps.actions), again=steps.again)


def _delete_all(steps: Steps, pods: list[PodView], now: float) -> None:
    for pod in pods:
        if pod.deleting is None:
            steps.actions.append(DeletePod(pod.name, pod.uid))
        elif pod.lost(now):
            steps.actions.append(DeletePod(pod.name, pod.uid, force=True))


def _tell_redis(steps: Steps, seen: Observed, identity: JobIdentity, reason: str, *, delete: bool) -> None:
    """See the pod that tells Redis through, for as long as that is reasonable; then let the job go."""
    refused = [one for one in seen.obstacles if one.what == f"Pod {names.end_pod(identity.name)}"]
    ends = seen.of(names.END)
    if not ends and not refused:
        steps.actions.append(Create(end_pod(identity, delete=delete, reason=reason)))
        steps.look_again(_END_PATIENCE_S)
        return
    waited = seen.now - min((pod.created for pod in ends), default=seen.now)
    patience = _STUCK_PATIENCE_S if any(pod.reason in _STUCK for pod in ends) else _END_PATIENCE_S
    if ends and not any(pod.ended for pod in ends) and waited < patience:
        steps.look_again(patience - waited)
        return
    if not any(pod.phase == "Succeeded" for pod in ends):
        why = next((pod.message or pod.reason for pod in ends if pod.message or pod.reason), "")
        why = why or next((one.message for one in refused), "it did not end in time")
        steps.notes.append(
            Note(
                "Warning",
                "RedisNotTold",
                f"Redis could not be told of the job's end ({why.strip()[-300:]}). Keys that begin with "
                f"{connection(identity).key_prefix} may remain there, and clients may wait until their time is over.",
            )
        )
    steps.actions.append(SetFinalizer(False))


@dataclass
class _Pass:
    """One look at a job that is accepted."""

    seen: Observed
    identity: JobIdentity
    steps: Steps = field(default_factory=Steps)

    def __post_init__(self) -> None:
        seen = self.seen
        self.job: RolloutJob = self.identity.job
        self.generation: int = seen.metadata.get("generation", 0)
        before = {name: value for name, value in seen.status.items() if name != "conditions"}
        self.status = RolloutJobStatus.model_validate(before)
        self.conditions = Conditions.after(seen.status.get("conditions", ()), seen.now, self.generation)
        self.recorded = {failure.uid for failure in self.status.failures}

    def plan(self) -> Plan:
        """The plan, once one of the other methods was called."""
        suspending = self.job.spec.lifecycle.suspend and not self.conditions.is_true(ConditionType.SUSPENDED)
        self._set(
            observed_generation=self.generation,
            state=state(self.conditions, suspending=suspending),
            connection=connection(self.identity),
        )
        status = self.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        status["conditions"] = _dumped(self.conditions)
        changed = status != self.seen.status
        return Plan(status if changed else None, tuple(self.steps.notes), tuple(self.steps.actions), self.steps.again)

    def _set(self, **fields: Any) -> None:
        self.status = self.status.model_copy(update=fields)

    def _do(self, *actions: Action) -> None:
        self.steps.actions.extend(actions)

    def _warn(self, reason: str, message: str) -> None:
        self.steps.notes.append(Note("Warning", reason, message))

    # after the end

    def _keep_conditions(self) -> None:
        for kind in ConditionType:
            self.conditions.keep(kind)

    def after_success(self) -> None:
        """End what still runs. The head, which has ended, stays for its log until the job is deleted."""
        self._keep_conditions()
        _delete_all(self.steps, [pod for pod in self.seen.pods if not pod.ended], self.seen.now)
        if names.FINALIZER in self.seen.metadata.get("finalizers", ()):
            self._do(SetFinalizer(False))
        self._delete_in_time()

    def after_failure(self) -> None:
        """End what still runs, then tell Redis."""
        self._keep_conditions()
        running = [pod for pod in self.seen.pods if pod.component != names.END]
        if running:
            _delete_all(self.steps, running, self.seen.now)
            self.steps.look_again(STATUS_PERIOD_S)
        elif names.FINALIZER in self.seen.metadata.get("finalizers", ()):
            failed = next(one for one in self.seen.status["conditions"] if one["type"] == ConditionType.FAILED)
            _tell_redis(self.steps, self.seen, self.identity, failed.get("message", ""), delete=False)
        else:
            self._delete_in_time()

    def _delete_in_time(self) -> None:
        kept = self.job.spec.lifecycle.ttl_seconds_after_finished
        ended = seconds(self.status.completion_time)
        if kept is None or ended is None:
            return
        left = ended + kept - self.seen.now
        if left <= 0:
            self._do(DeleteJob())
        else:
            self.steps.look_again(left)

    # before the end

    def run(self) -> None:
        """Bring the job towards what its manifest asks for."""
        self.conditions.say(ConditionType.ACCEPTED, "True", "Valid")
        failing = self._count_failures() or self._overdue()
        if failing is not None:
            self._end(ConditionType.FAILED, *failing)
        elif done := [pod for pod in self.seen.of(names.HEAD) if pod.phase == "Succeeded"]:
            last = HeadStatus.of_message(done[-1].message)
            if last is not None:
                self._set(progress=_progress_of(last), saved=_saved(last))
            self._end(ConditionType.SUCCEEDED, "Closed", "the job was closed, and all that was asked for is answered")
        elif self.job.spec.lifecycle.suspend:
            self._suspend()
        else:
            self._proceed()

    def _end(self, kind: ConditionType, reason: str, message: str) -> None:
        self._keep_conditions()
        self.conditions.say(ConditionType.ACCEPTED, "True", "Valid")
        other = ConditionType.FAILED if kind is ConditionType.SUCCEEDED else ConditionType.SUCCEEDED
        self.conditions.say(other, "False", reason)
        for ended in (ConditionType.PROGRESSING, ConditionType.ENGINE_READY, ConditionType.WORKERS_READY):
            self.conditions.say(ended, "False", kind)
        self.conditions.say(ConditionType.SUSPENDED, "False", kind)
        self.conditions.say(kind, "True", reason, message)
        self._progress()
        self._set(
            completion_time=timestamp(self.seen.now),
            active_seconds=int(self._active()),
            start_time=None,
            workers=self._workers_status(0, []),
        )
        self.steps.notes.append(
            Note("Normal" if kind is ConditionType.SUCCEEDED else "Warning", kind, f"{reason}: {message}")
        )

    def _count_failures(self) -> tuple[str, str] | None:
        """Take failed pods into the status; a reason to fail the job, if there is one."""
        policy = self.job.spec.lifecycle.failure_policy
        failures = list(self.status.failures)
        counted = self.status.failed_pods
        fatal: tuple[str, str] | None = None
        for pod in self.seen.pods:
            ours = pod.component in (names.HEAD, names.WORKER)
            if not ours or pod.phase != "Failed" or pod.deleting is not None or pod.uid in self.recorded:
                continue
            verdict = judge(pod, policy)
            counts = verdict.answer is Answer.REPLACE
            counted += counts
            failures.append(
                Failure(
                    pod=pod.name,
                    uid=pod.uid,
                    component="head" if pod.component == names.HEAD else "worker",
                    reason=verdict.reason,
                    exit_code=pod.exit_code,
                    message=pod.message[-1000:],
                    time=timestamp(self.seen.now),
                    counted=counts,
                )
            )
            code = f", exit code {pod.exit_code}" if pod.exit_code is not None else ""
            text = f"{pod.name} on {pod.node or 'no node'} failed: {verdict.reason}{code}: {pod.message.strip()[-700:]}"
            self._warn("PodFailed" if verdict.reason == "Error" else verdict.reason, text)
            if verdict.answer is Answer.FAIL_JOB:
                fatal = (verdict.reason, text)
        there = {pod.uid for pod in self.seen.pods}
        newest = {failure.uid for failure in failures[-_KEPT_FAILURES:]}
        kept = [failure for failure in failures if failure.uid in there or failure.uid in newest]
        self._set(failures=kept, failed_pods=counted)
        limit = self.job.spec.lifecycle.backoff_limit
        if fatal is None and counted > limit:
            last = next((one for one in reversed(kept) if one.counted), None)
            about = f"; the last, {last.pod}: {last.reason}: {last.message.strip()[-500:]}" if last else ""
            fatal = (
                "BackoffLimitExceeded",
                f"{counted} pod{'s' if counted > 1 else ''} failed, lifecycle.backoffLimit is {limit}{about}",
            )
        return fatal

    def _active(self) -> float:
        """Seconds that the job has run, suspended times apart."""
        began = seconds(self.status.start_time)
        return self.status.active_seconds + (self.seen.now - began if began is not None else 0.0)

    def _overdue(self) -> tuple[str, str] | None:
        limit = self.job.spec.lifecycle.active_deadline_seconds
        if limit is None or self.status.start_time is None:
            return None
        left = limit - self._active()
        if left <= 0:
            return ("DeadlineExceeded", f"the job has run for {limit} s (lifecycle.activeDeadlineSeconds)")
        self.steps.look_again(left)
        return None

    def _suspend(self) -> None:
        """End the workers, which hand over what they make, then the head."""
        workers, heads = self.seen.of(names.WORKER), self.seen.of(names.HEAD)
        _delete_all(self.steps, workers or heads, self.seen.now)
        for kind in (ConditionType.WORKERS_READY, ConditionType.ENGINE_READY, ConditionType.PROGRESSING):
            self.conditions.say(kind, "False", "Suspended", "lifecycle.suspend is set")
        self.conditions.keep(ConditionType.QUOTA_RESERVED)
        for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED):
            self.conditions.say(kind, "False", "Suspended")
        self._progress()
        left = len(workers) + len(heads)
        self._set(workers=self._workers_status(0, workers))
        if left:
            self.conditions.say(
                ConditionType.SUSPENDED, "False", "Draining", f"{left} pods are handing over and ending"
            )
            self.steps.look_again(STATUS_PERIOD_S)
            return
        self.conditions.say(
            ConditionType.SUSPENDED, "True", "Suspended", "no pods; what was begun is in Redis, and goes on from there"
        )
        if self.status.start_time is not None:
            self._set(active_seconds=int(self._active()), start_time=None)
        if self.conditions.news(ConditionType.SUSPENDED):
            self.steps.notes.append(Note("Normal", "Suspended", "the job's pods have ended"))

    def _proceed(self) -> None:
        """Have what a running job has."""
        self.conditions.say(ConditionType.SUSPENDED, "False", "Running")
        self.conditions.say(ConditionType.SUCCEEDED, "False", "Running")
        self.conditions.say(ConditionType.FAILED, "False", "Running")
        if names.FINALIZER not in self.seen.metadata.get("finalizers", ()):
            self._do(SetFinalizer(True))
        if self.status.start_time is None:
            self._set(start_time=timestamp(self.seen.now))
        for wanted in objects(self.identity, self.seen.cluster):
            there = self.seen.objects.get((wanted["kind"], wanted["metadata"]["name"]))
            if there is None:
                self._do(Create(wanted))
            elif differs(wanted, there):
                self._do(Apply(wanted))
        pause = delay((seconds(one.time) or 0.0 for one in self.status.failures if one.counted), self.seen.now)
        if pause:
            self.steps.look_again(pause)
        self._keep_head(pause)
        count = desired(self.job.spec.workers, self._desired_before(), self.seen.head)
        live = self._keep_workers(count, pause)
        self._set(workers=self._workers_status(count, live))
        self._progress()
        self._say_how_it_goes(count, live)
        self.steps.look_again(STATUS_PERIOD_S)

    def _desired_before(self) -> int | None:
        return self.status.workers.desired or None

    def _cleared(self, pods: list[PodView]) -> tuple[list[PodView], list[PodView]]:
        """Those that live, and those that are on their way out; what has ended and is in the status is deleted."""
        live = []
        leaving = []
        for pod in pods:
            if pod.deleting is not None:
                _delete_all(self.steps, [pod], self.seen.now)
                leaving.append(pod)
                self.steps.look_again(STATUS_PERIOD_S)
            elif not pod.ended:
                live.append(pod)
            elif pod.phase == "Succeeded" or pod.uid in self.recorded:
                self._do(DeletePod(pod.name, pod.uid))
                leaving.append(pod)
            else:
                leaving.append(pod)  # first into the status
        return live, leaving

    def _keep_head(self, pause: float) -> None:
        live, leaving = self._cleared(self.seen.of(names.HEAD))
        if live or leaving or pause:
            return
        self._do(Create(head_pod(self.identity)))

    def _keep_workers(self, count: int, pause: float) -> list[PodView]:
        """Have *count* workers, one in each slot; those that live now."""
        workers = self.job.spec.workers
        live, leaving = self._cleared(self.seen.of(names.WORKER))
        if len(live) > count:
            for pod in to_give_back(live, len(live) - count, workers, self.seen.head):
                self._do(DeletePod(pod.name, pod.uid))
            return live
        # what is on its way out still has its GPUs; what has ended has none, but its name is taken
        room = count - len(live) - sum(not pod.ended for pod in leaving)
        taken = {pod.slot for pod in (*live, *leaving)}
        free = [slot for slot in range(count) if slot not in taken][: max(0, room)]
        pending = sum(pod.replacement and pod.phase == "Pending" for pod in live)
        for slot in free:
            replacement = slot < self.status.workers.used
            if replacement:
                if pause or pending >= workers.max_pending_replacements:
                    continue
                pending += 1
            self._do(Create(worker_pod(self.identity, slot, replacement=replacement)))
        return live

    # what is said

    def _workers_status(self, count: int, pods: list[PodView]) -> WorkersStatus:
        live = [pod for pod in pods if pod.deleting is None and not pod.ended]
        ready = sum(pod.ready for pod in live)
        selector = names.selector(self.identity.name, names.WORKER)
        return WorkersStatus(
            desired=count,
            replicas=len(live),
            ready=ready,
            used=max([self.status.workers.used, *(pod.slot + 1 for pod in pods)]),
            summary=f"{ready}/{count}",
            selector=",".join(f"{name}={value}" for name, value in sorted(selector.items())),
        )

    def _progress(self) -> None:
        head = self.seen.head
        if head is None:
            quiet = self.status.progress.model_copy(update={"tokens_per_second": 0, "seconds_left": None})
            self._set(progress=quiet)
            return
        self._set(progress=_progress_of(head), saved=_saved(head))

    def _say_how_it_goes(self, count: int, live: list[PodView]) -> None:
        gated = [pod for pod in self.seen.pods if pod.gated and pod.deleting is None]
        if self.identity.queue is None:
            self.conditions.say(ConditionType.QUOTA_RESERVED, "True", "NoQueue")
        elif gated:
            text = f"{len(gated)} pods wait in queue {self.identity.queue}"
            self.conditions.say(ConditionType.QUOTA_RESERVED, "False", "Waiting", text)
        else:
            self.conditions.say(ConditionType.QUOTA_RESERVED, "True", "Admitted", f"by queue {self.identity.queue}")

        ready = sum(pod.ready for pod in live)
        if ready >= count:
            self.conditions.say(ConditionType.WORKERS_READY, "True", "AllReady")
        else:
            reason, text = self._why_not_ready(live)
            self.conditions.say(ConditionType.WORKERS_READY, "False", reason, text)
            if reason not in ("Starting", "Waiting") and self.conditions.news(ConditionType.WORKERS_READY):
                self._warn(reason, text)

        head = self.seen.head
        if head is None:
            self.conditions.say(ConditionType.ENGINE_READY, "Unknown", *self._why_no_head())
            self.conditions.say(ConditionType.PROGRESSING, "Unknown", "HeadNotReady")
            return
        errors = "; ".join(f"{engine}: {error}" for engine, error in sorted(head.engine_errors.items()))[:_LONGEST_TEXT]
        if head.engines:
            self.conditions.say(ConditionType.ENGINE_READY, "True", "Sampling", errors)
        elif errors:
            self.conditions.say(ConditionType.ENGINE_READY, "False", "EngineFailed", errors)
            if self.conditions.news(ConditionType.ENGINE_READY):
                self._warn("EngineFailed", errors)
        else:
            self.conditions.say(ConditionType.ENGINE_READY, "False", "Loading", "no engine has loaded the model yet")
        self._say_how_drafts_are(head)
        if head.redis_away:
            self.conditions.say(ConditionType.PROGRESSING, "False", "RedisUnreachable", head.redis_away)
            if self.conditions.news(ConditionType.PROGRESSING):
                self._warn("RedisUnreachable", head.redis_away)
        elif head.assigned:
            self.conditions.say(ConditionType.PROGRESSING, "True", "Sampling")
        elif head.waiting:
            self.conditions.say(ConditionType.PROGRESSING, "False", "NoEngine", "rollouts wait for an engine")
        else:
            self.conditions.say(ConditionType.PROGRESSING, "False", "Idle", "nothing is asked for")

    def _say_how_drafts_are(self, head: HeadStatus) -> None:
        kind = ConditionType.DRAFTS_HEALTHY
        if self.job.spec.speculation.policy == "off":
            self.conditions.say(kind, "Unknown", "Off", "speculation.policy is off")
        elif head.distribution_drift:
            self.conditions.say(kind, "False", "DistributionDrift", _DRIFTED)
        elif head.unverified:
            self.conditions.say(kind, "False", "NotVerified", _UNVERIFIED + ", ".join(head.unverified)[:_LONGEST_TEXT])
        elif head.canaries < _TELLING_CANARIES:
            self.conditions.say(kind, "Unknown", "NotCheckedYet", "too few rollouts without drafts have ended")
        else:
            self.conditions.say(kind, "True", "Checked")
        news = self.conditions.news(kind)
        if news is not None and news.status == "False":
            self._warn(news.reason, news.message)

    def _why_not_ready(self, live: list[PodView]) -> tuple[str, str]:
        """The worst of what keeps workers from being ready."""
        if self.seen.obstacles:
            return self.seen.obstacles[0].reason, str(self.seen.obstacles[0])
        for pod in live:
            if pod.reason:
                return pod.reason, f"{pod.name}: {pod.message or pod.reason}"
        for pod in live:
            if pod.unschedulable:
                return "Unschedulable", f"{pod.name}: {pod.unschedulable}"
        if any(pod.gated for pod in live):
            return "Waiting", "workers wait in a queue"
        if self.seen.head is not None and self.seen.head.engine_errors:
            engine, error = min(self.seen.head.engine_errors.items())
            return "EngineFailed", f"{engine}: {error}"[:_LONGEST_TEXT]
        return "Starting", "workers are starting"

    def _why_no_head(self) -> tuple[str, str]:
        for pod in self.seen.of(names.HEAD):
            if pod.deleting is None and not pod.ended:
                if pod.reason:
                    return pod.reason, f"{pod.name}: {pod.message or pod.reason}"
                if pod.unschedulable:
                    return "Unschedulable", f"{pod.name}: {pod.unschedulable}"
        return "HeadNotReady", "the head does not answer yet"


def _saved(head: HeadStatus) -> str | None:
    return None if head.saved is None else f"{round(100 * head.saved)}%"


def _progress_of(head: HeadStatus) -> ProgressStatus:
    accepted = f"{head.accepted_per_step:.2f}" if head.steps else None
    return ProgressStatus(
        done=head.done,
        total=head.total,
        open=head.waiting + head.assigned,
        epoch=head.epoch,
        weight_version=head.weight_version,
        tokens=head.tokens,
        tokens_per_second=round(head.tokens_per_second),
        accepted_per_step=accepted,
        seconds_left=None if head.seconds_left is None else round(head.seconds_left),
        summary=str(head.done) if head.total is None else f"{head.done}/{head.total}",
    )
