"""Plans one reconcile of an accepted job that is not being deleted. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollout_api.manifest.rollout_job import ManifestError, RolloutJob
from rollout_api.manifest.status import (
    ConditionType,
    EnvironmentErrors,
    ModelPrefetch,
    PodGroup,
    RolloutJobStatus,
    WorkersStatus,
)
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext, changed_settings, revision_of
from rollout_operator.objects.observed import (
    STARTING_PERIOD_S,
    STATUS_PERIOD_S,
    HeadStatus,
    Manifest,
    Observed,
    PodView,
    format_timestamp,
    parse_timestamp,
)
from rollout_operator.objects.owned_objects import (
    DEPLOYMENT,
    check_pods_can_run,
    connection,
    disruption_budget,
    is_outdated,
    owned_objects,
    server_objects,
    server_status,
)
from rollout_operator.objects.runtimes import RUNTIME_NOT_FOUND, RuntimeNotFoundError
from rollout_operator.planning.actions import Apply, Create, DeleteJob, Event, Plan, PlanBuilder, SetFinalizer
from rollout_operator.planning.conditions import (
    Conditions,
    RunningConditions,
    derive_state,
    is_true,
    set_summary,
)
from rollout_operator.planning.failures import JOB_COMPONENTS, backoffs_by_place, record_failures, repeated_failure
from rollout_operator.planning.pod_planner import PodPlanner, desired_workers
from rollout_operator.planning.teardown import (
    POD_NOT_TERMINATING,
    delete_pods,
    delete_server,
    describe_overdue,
    plan_bundle,
    release_quota,
    remove_pods,
    run_cleanup,
)

_ONLY_ON_RESUME = frozenset({"model.cache", "workers.podsPerWorker"})
"""Settings that all pods of a job must share, so that a rolling update cannot change them."""
_PROGRESS_PERIOD_S = 60.0
"""Seconds between two writes of a status of which only the progress has changed; fewer if the job is young.

Each write costs a transaction of etcd, and is sent to everyone who watches jobs. Nothing acts on the progress in the
status: autoscaling uses the head's own status, and metrics and ``rollout top`` show each second.
"""
_PROGRESS_SHARE = 1 / 6
"""The same as a share of the job's age, so that ``kubectl get --watch`` shows the progress of a short job, too."""
_MAX_ENVIRONMENT_MESSAGE = 600
"""Maximum length of texts about an environment's errors; the rest is cut."""


@dataclass
class JobPlanner:
    """Derives a plan from the observed state of a job."""

    observed: Observed
    context: JobContext
    """For pods of the pinned revision."""
    wanted_context: JobContext
    """For pods of the current spec."""
    builder: PlanBuilder = field(default_factory=PlanBuilder)

    def __post_init__(self) -> None:
        observed = self.observed
        self.job: RolloutJob = self.context.job
        self.generation: int = observed.metadata.get("generation", 0)
        status_fields = {name: value for name, value in observed.status.items() if name != "conditions"}
        self.status = RolloutJobStatus.read(status_fields)
        self.conditions = Conditions.following(observed.status.get("conditions", ()), observed.now, self.generation)
        self.listed_failures = {failure.uid for failure in self.status.failures}
        wanted = self.wanted_context
        self.wanted_revision = revision_of(wanted.job, observed.default_image, has_runtime=wanted.has_runtime)

    def plan(self) -> Plan:
        """Return what to do about the job."""
        conditions = self.observed.status.get("conditions", ())
        if is_true(conditions, ConditionType.SUCCEEDED):
            self._plan_succeeded()
        elif is_true(conditions, ConditionType.FAILED):
            self._plan_failed()
        else:
            self._plan_active()
        suspending = self.job.spec.lifecycle.suspend and not self.conditions.is_true(ConditionType.SUSPENDED)
        state = derive_state(self.conditions, suspending=suspending)
        set_summary(self.conditions, state, repeated_failure(backoffs_by_place(self.status), at_limit=True))
        self._update_status(
            observed_generation=self.generation,
            state=state,
            connection=connection(self.context),
            server=server_status(self.context, self.observed),
        )
        status = self.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        status["conditions"] = self.conditions.dump()
        changed = status != self.observed.status and not self._differs_in_recent_progress(status)
        builder = self.builder
        return Plan(status if changed else None, tuple(builder.events), tuple(builder.actions), builder.requeue_after)

    def _differs_in_recent_progress(self, status: Manifest) -> bool:
        """Return whether a status contains nothing new but progress, which was written a short while ago."""
        written = parse_timestamp(self.observed.status.get("progress", {}).get("lastUpdateTime"))
        created = parse_timestamp(self.observed.metadata.get("creationTimestamp")) or 0.0
        period = min(_PROGRESS_PERIOD_S, _PROGRESS_SHARE * (self.observed.now - created))
        if written is None or not 0 <= self.observed.now - written < period:
            return False
        return _without_progress(status) == _without_progress(self.observed.status)

    def _update_status(self, **fields: Any) -> None:
        self.status = self.status.model_copy(update=fields)

    @property
    def _has_finalizer(self) -> bool:
        return names.FINALIZER in self.observed.metadata.get("finalizers", ())

    # Jobs that have succeeded or failed

    def _carry_over_conditions(self) -> None:
        for kind in ConditionType:
            self.conditions.carry_over(kind)

    def _plan_succeeded(self) -> None:
        """Delete the pods that still run. A head that has ended is kept for its log until the job is deleted.

        Kueue finishes a group by itself if all its pods have succeeded. Otherwise the Workload has to be deleted, and
        Kueue deletes the head.
        """
        self._carry_over_conditions()
        delete_server(self.builder, self.observed)
        running = [pod for pod in self.observed.pods if pod.has_running_containers]
        if running:
            delete_pods(self.builder, running, self.observed)
            self.builder.requeue(STATUS_PERIOD_S)
        elif any(pod.retained and pod.phase != "Succeeded" for pod in self.observed.pods):
            release_quota(self.builder, self.observed)
        if self._has_finalizer:
            self.builder.actions.append(SetFinalizer(False))
        self._delete_after_ttl()

    def _plan_failed(self) -> None:
        """Keep what the pods can still tell, delete the head and the workers, then run the cleanup pod."""
        self._carry_over_conditions()
        delete_server(self.builder, self.observed)
        if plan_bundle(self.builder, self.observed) or remove_pods(self.builder, self.observed):
            return
        release_quota(self.builder, self.observed)
        if self._has_finalizer:
            conditions = self.observed.status["conditions"]
            failed = next(condition for condition in conditions if condition["type"] == ConditionType.FAILED)
            reason = failed.get("message", "")
            run_cleanup(self.builder, self.observed, self.context, reason, delete_messages=False)
        else:
            self._delete_after_ttl()

    def _delete_after_ttl(self) -> None:
        ttl = self.job.spec.lifecycle.ttl_seconds_after_finished
        completed = parse_timestamp(self.status.completion_time)
        if ttl is None or completed is None:
            return
        remaining = completed + ttl - self.observed.now
        if remaining <= 0:
            self.builder.actions.append(DeleteJob())
        else:
            self.builder.requeue(remaining)

    # Jobs that have neither succeeded nor failed

    def _plan_active(self) -> None:
        """Record failures, then complete, suspend or run the job."""
        self._set_accepted()
        self._record_prefetch()
        self.status, failure = record_failures(
            self.builder, self.observed, self.status, self.job.spec.lifecycle, self.listed_failures
        )
        failure = failure or self._check_deadline()
        if failure is not None:
            self._complete(ConditionType.FAILED, *failure)
        elif succeeded := [pod for pod in self.observed.component(names.HEAD) if pod.phase == "Succeeded"]:
            last_status = HeadStatus.from_termination_message(succeeded[-1].message)
            if last_status is not None:
                self._show_figures(last_status)
            elif succeeded[-1].message.startswith("{"):
                self.builder.warn("HeadStatusInvalid", "The final figures of the head cannot be used.")
            self._complete(
                ConditionType.SUCCEEDED, "Completed", "The job was closed and all its requests have been answered."
            )
        elif self.job.spec.lifecycle.suspend:
            self._suspend()
        else:
            self._run()

    def _set_accepted(self) -> None:
        self.conditions.set(ConditionType.ACCEPTED, "True", "Valid", "The manifest is valid.")

    def _complete(self, kind: ConditionType, reason: str, message: str) -> None:
        """Set the conditions and the status of a job that has just succeeded or failed."""
        self._carry_over_conditions()
        self._set_accepted()
        other = ConditionType.FAILED if kind is ConditionType.SUCCEEDED else ConditionType.SUCCEEDED
        self.conditions.set(other, "False", reason, f"The job has {kind.lower()}.")
        for inactive in (
            ConditionType.PROGRESSING,
            ConditionType.ENGINE_READY,
            ConditionType.WORKERS_READY,
            ConditionType.SUSPENDED,
        ):
            self.conditions.set(inactive, "False", kind, f"The job has {kind.lower()}.")
        self.conditions.set(kind, "True", reason, message)
        self._update_progress()
        self._update_status(
            completion_time=format_timestamp(self.observed.now),
            active_seconds=int(self._active_seconds()),
            start_time=None,
            workers=self._workers_status(0, []),
        )
        succeeded = kind is ConditionType.SUCCEEDED
        self.builder.events.append(Event("Normal" if succeeded else "Warning", kind, f"{reason}: {message}"))

    def _record_prefetch(self) -> None:
        """Note in the status that the model has been downloaded, so that the pod which has done it can be deleted."""
        claim = self.job.spec.model.cache.persistent_volume_claim
        revision = "" if self.status.revision is None else self.status.revision.hash
        pods = self.observed.component(names.PREFETCH)
        has_succeeded = any(pod.phase == "Succeeded" and pod.revision == revision for pod in pods)
        if has_succeeded and claim is not None and not self._has_model:
            now = format_timestamp(self.observed.now)
            self._update_status(model_prefetch=ModelPrefetch(persistent_volume_claim=claim, completion_time=now))

    @property
    def _has_model(self) -> bool:
        """Whether the model has been downloaded into the claim of the model cache."""
        prefetch = self.status.model_prefetch
        claim = self.job.spec.model.cache.persistent_volume_claim
        return prefetch is not None and prefetch.persistent_volume_claim == claim

    @property
    def _waits_for_model(self) -> bool:
        """Whether the head and the workers are created only after the model has been downloaded."""
        return self.job.spec.model.cache.prefetch and not self.observed.has_pods and not self._has_model

    def _active_seconds(self) -> float:
        """Return for how long the job has run, without the time during which it was suspended."""
        started = parse_timestamp(self.status.start_time)
        return self.status.active_seconds + (self.observed.now - started if started is not None else 0.0)

    def _check_deadline(self) -> tuple[str, str] | None:
        """Return reason and message if the job has exceeded its active deadline, else None."""
        limit = self.job.spec.lifecycle.active_deadline_seconds
        if limit is None or self.status.start_time is None:
            return None
        remaining = limit - self._active_seconds()
        if remaining <= 0:
            return (
                "DeadlineExceeded",
                f"The job was active for {limit} s, which is its limit lifecycle.activeDeadlineSeconds.",
            )
        self.builder.requeue(remaining)
        return None

    def _suspend(self) -> None:
        """Delete the server and the workers, which hand over their rollouts, and then the other pods."""
        delete_server(self.builder, self.observed)
        pods = [pod for pod in self.observed.pods if pod.component in JOB_COMPONENTS]
        existing = [pod for pod in pods if not pod.retained]
        hands_over = any(pod.component == names.WORKER and not pod.is_overdue(self.observed.now) for pod in existing)
        delete_pods(
            self.builder, [pod for pod in existing if pod.component == names.WORKER or not hands_over], self.observed
        )
        if not existing:
            release_quota(self.builder, self.observed)
        for kind in (ConditionType.WORKERS_READY, ConditionType.ENGINE_READY, ConditionType.PROGRESSING):
            self.conditions.set(kind, "False", "Suspended", "spec.lifecycle.suspend is true.")
        self.conditions.carry_over(ConditionType.QUOTA_RESERVED)
        for kind in (ConditionType.SUCCEEDED, ConditionType.FAILED):
            self.conditions.set(kind, "False", "Suspended", "The job is suspended.")
        self._update_progress()
        self._update_status(workers=self._workers_status(0, self.observed.leaders))
        if num_pods := len(pods):
            overdue = next((pod for pod in existing if pod.is_overdue(self.observed.now)), None)
            self.conditions.set(
                ConditionType.SUSPENDED,
                "False",
                "Draining" if overdue is None else POD_NOT_TERMINATING,
                f"Pods are handing over their rollouts and terminating; {num_pods} remain."
                if overdue is None
                else describe_overdue(overdue),
            )
            self.builder.requeue(STATUS_PERIOD_S)
            return
        self.conditions.set(
            ConditionType.SUSPENDED,
            "True",
            "Suspended",
            "The job has no pods. Its unfinished rollouts are in Redis and continue from there when it resumes.",
        )
        self._update_status(pod_group=None, revision=None, backoffs=[])
        if self.status.start_time is not None:
            self._update_status(active_seconds=int(self._active_seconds()), start_time=None)
        if self.conditions.transition(ConditionType.SUSPENDED):
            self.builder.events.append(Event("Normal", "Suspended", "All pods of the job have terminated."))

    def _run(self) -> None:
        """Create and update everything that a running job needs."""
        for kind in (ConditionType.SUSPENDED, ConditionType.SUCCEEDED, ConditionType.FAILED):
            self.conditions.set(kind, "False", "Running", "The job is active.")
        if not self._has_finalizer:
            self.builder.actions.append(SetFinalizer(True))
        if self.status.start_time is None:
            self._update_status(start_time=format_timestamp(self.observed.now))
        self._pin_revision()
        if not self._waits_for_model:
            self._form_pod_group()
        removable = [pod.name for pod in self.observed.leaders if pod.live and not pod.in_pod_group]
        desired = desired_workers(self.job.spec.workers, self._previously_desired(), self.observed.head, removable)
        if self.context.pod_group is not None and self.context.pods_per_worker > 1:
            # Kueue would admit the pods of a further worker one by one, and the first ones would hold their GPUs idly.
            # It would never admit a smaller group again after a preemption.
            desired = self.context.num_grouped_workers
        self._plan_objects(desired)
        backoffs = backoffs_by_place(self.status)
        pods = PodPlanner(self.observed, self.context, self.builder, self.listed_failures, backoffs)
        conditions = RunningConditions(self.observed, self.context, self.builder, self.conditions, backoffs)
        workers: list[PodView] = []
        if self._waits_for_model:
            pods.plan_prefetch()
            self._update_status(workers=self._workers_status(desired, workers))
            conditions.update_before_prefetch_ends()
        else:
            if "modelPrefetch" in self.observed.status or not self.job.spec.model.cache.prefetch:
                pods.remove_prefetch()
            if self._group_is_incomplete():
                self._restart_group()
            else:
                pods.plan_head()
                workers = pods.plan_workers(desired, self.status.workers.slots_used)
            self._update_status(workers=self._workers_status(desired, workers))
            conditions.update(desired, workers)
        self._plan_disruption_budget()
        self._update_pods(pods, desired)
        self._update_progress()
        head = self.observed.head
        is_starting = head is not None and not head.engines and any(pod.ready for pod in workers)
        self.builder.requeue(STARTING_PERIOD_S if is_starting else STATUS_PERIOD_S)

    def _pin_revision(self) -> None:
        """Pin the settings of the current spec for new pods, if all pods may have them.

        Without a pinned revision, the context is that of the current spec, and its pods have been checked.
        """
        # All pods of a job have the same model cache, which may have to be filled first, and all pods of a worker must
        # agree on their number.
        can_roll = self._can_roll and not _ONLY_ON_RESUME.intersection(self._pending_changes())
        may_change = can_roll or not self.observed.has_pods
        if self.context.revision is None or (may_change and self._pending_changes() and not self._invalid_update()):
            self._update_status(revision=self.wanted_revision, backoffs=[])
            self.context = self.wanted_context.pinned_to(self.wanted_revision)
            self.job = self.context.job

    def _pending_changes(self) -> list[str]:
        """Return the settings of new pods that differ from the current spec."""
        revision = self.status.revision
        return [] if revision is None else changed_settings(revision, self.wanted_revision)

    @property
    def _can_roll(self) -> bool:
        """Whether pods are replaced one by one. Kueue would take a group with different pods for another one."""
        return self.job.spec.lifecycle.update_strategy == "RollingUpdate" and self.context.pod_group is None

    def _invalid_update(self) -> str:
        """Return why pods cannot be created from the current spec; empty if they can."""
        try:
            check_pods_can_run(self.wanted_context)
        except ManifestError as error:
            return "; ".join(f"{one.path}: {one.message}" for one in error.errors)
        return ""

    def _update_pods(self, pods: PodPlanner, desired: int) -> None:
        """Replace pods of an earlier revision, or report that they exist."""
        kind = ConditionType.UP_TO_DATE
        if (error := self.wanted_context.runtime_error) is not None:
            reason = RUNTIME_NOT_FOUND if isinstance(error, RuntimeNotFoundError) else "InvalidUpdate"
            self.conditions.set(kind, "False", reason, f"The pods keep their settings. {error}"[:1000])
        elif changes := self._pending_changes():
            if invalid := self._invalid_update():
                self.conditions.set(kind, "False", "InvalidUpdate", f"The pods keep their settings. {invalid}"[:1000])
            else:
                message = f"Suspend and resume the job to apply these changes: {', '.join(changes)}."
                if not _ONLY_ON_RESUME.intersection(changes):
                    message += (
                        " If the job is in no queue, lifecycle.updateStrategy: RollingUpdate applies them without a "
                        "suspension."
                    )
                self.conditions.set(kind, "False", "ChangesPending", message)
        elif not pods.outdated():
            self.conditions.set(kind, "True", "UpToDate", "The pods have the settings of the spec.")
        elif self._can_roll:
            pods.replace_outdated(desired)
            self.conditions.set(kind, "False", "Updating", "Pods are being replaced one by one.")
        else:
            self.conditions.set(
                kind, "False", "ChangesPending", "Suspend and resume the job to replace pods with earlier settings."
            )

    def _previously_desired(self) -> int | None:
        """Return the number of workers that autoscaling continues from; None for ``replicas``.

        It is the last number, unless somebody has changed ``replicas`` since then, for example by ``kubectl scale``.
        """
        workers = self.status.workers
        is_scaled = workers.requested not in (None, self.job.spec.workers.replicas)
        return None if is_scaled else workers.desired or None

    @property
    def _group_workers(self) -> int:
        """Number of workers that Kueue admits as a whole: all of them if they have several pods."""
        workers = self.job.spec.workers
        return workers.effective_min if self.context.pods_per_worker == 1 else workers.replicas

    def _form_pod_group(self) -> None:
        """Form the group of pods that Kueue admits as a whole, when a job starts or resumes.

        The group keeps its size and its queue until the job is suspended, because all its pods have to agree on them.
        """
        queue = self.context.queue
        if queue is None or self.status.pod_group is not None or self.observed.has_pods:
            return
        group = PodGroup(
            name=names.pod_group(self.context.name, self.context.uid, self.status.start_time or ""),
            queue=queue,
            total_count=self._group_workers * self.context.pods_per_worker + 1,
        )
        self._update_status(pod_group=group)
        self.context = replace(self.context, pod_group=group)

    def _group_is_incomplete(self) -> bool:
        """Return whether the group needs a pod that Kueue does not admit.

        A worker succeeds shortly before the head of a job that was closed. If the head has not succeeded a while later,
        the worker is still needed.
        """
        return any(
            pod.irreplaceable and pod.is_overdue(self.observed.now) for pod in self.observed.component(names.WORKER)
        )

    def _restart_group(self) -> None:
        """Delete all pods of the group and its Workload, so that Kueue admits new ones. Rollouts are handed over."""
        self.builder.warn(
            "WorkerSucceeded",
            "A worker has ended with exit code 0 although the job needs it, and Kueue admits no other pod in its "
            "place. All pods are replaced, and rollouts continue from their last checkpoints. Look at the worker's log "
            "for why it has ended.",
        )
        if not remove_pods(self.builder, self.observed):
            release_quota(self.builder, self.observed)

    @property
    def _has_ready_head(self) -> bool:
        return any(pod.ready for pod in self.observed.component(names.HEAD))

    def _plan_objects(self, workers: int) -> None:
        """Create the objects that are missing, and apply those that differ from the desired ones."""
        for desired in (
            *owned_objects(self.context, self.observed.cluster, workers=workers),
            *server_objects(self.context),
        ):
            self._plan_object(desired)
        if self.job.spec.server is None:
            delete_server(self.builder, self.observed)

    def _plan_object(self, desired: dict[str, Any]) -> None:
        actual = self.observed.objects.get((desired["kind"], desired["metadata"]["name"]))
        # A server would wait in vain for a job without a head, for example while the job is queued.
        if actual is None and (desired["kind"] != DEPLOYMENT or self._has_ready_head):
            self.builder.actions.append(Create(desired))
        elif actual is not None and is_outdated(desired, actual):
            self.builder.actions.append(Apply(desired))

    def _plan_disruption_budget(self) -> None:
        """Let one of the pods that serve the job, or will soon, be evicted at a time.

        Pods that cannot be scheduled or created do not count, or they would block every eviction.
        """
        pods = [pod for pod in self.observed.pods if pod.component in (names.HEAD, names.WORKER)]
        num_expected = sum(pod.is_expected(self.observed.now) for pod in pods)
        if not any(rejection.target.kind == "Pod" for rejection in self.observed.rejections):
            num_expected += sum(
                isinstance(action, Create) and action.manifest["kind"] == "Pod" for action in self.builder.actions
            )
        if (api_version := self.observed.cluster.disruption_budget_api) is not None:
            self._plan_object(disruption_budget(self.context, self.observed.cluster, api_version, num_expected))

    # Status

    def _workers_status(self, desired: int, pods: list[PodView]) -> WorkersStatus:
        live = [pod for pod in pods if pod.live]
        ready = sum(pod.ready for pod in live)
        selector = names.selector(self.context.name, names.WORKER)
        if self.context.pods_per_worker > 1:
            selector[names.RANK_LABEL] = "0"
        return WorkersStatus(
            desired=desired,
            requested=self.job.spec.workers.replicas if desired else None,
            replicas=len(live),
            ready=ready,
            gpus=len(live) * self.job.spec.workers.gpus_per_worker,
            slots_used=max([self.status.workers.slots_used, *(pod.slot + 1 for pod in pods)]),
            summary=f"{ready}/{desired}",
            selector=",".join(f"{name}={value}" for name, value in sorted(selector.items())),
        )

    def _update_progress(self) -> None:
        head = self.observed.head
        if head is None:
            stalled = self.status.progress.model_copy(update={"tokens_per_second": 0, "seconds_left": None})
            self._update_status(progress=stalled)
        else:
            self._show_figures(head)

    def _show_figures(self, head: HeadStatus) -> None:
        """Show the figures of a head. Those that do not change keep their time, so that they are not written again."""
        last = self.status.progress
        progress = head.progress.model_copy(update={"last_update_time": last.last_update_time})
        if progress != last:
            progress = progress.model_copy(update={"last_update_time": format_timestamp(self.observed.now)})
        self._update_status(progress=progress, time_saved=head.time_saved)
        self._update_environment_errors(head)

    def _update_environment_errors(self, head: HeadStatus) -> None:
        """Show the errors of the environment, and report new types of errors in one Event."""
        known = {error.type for error in self.status.environment_errors}
        if new := [kind for kind in head.environment_errors if kind not in known]:
            error = head.environment_errors[new[0]]
            kinds = new[0] if len(new) == 1 else f"{new[0]}, and {len(new) - 1} other types of errors"
            message = (
                f"Rollouts of the problem {error.problem} and maybe others got no reward ({kinds}): {error.message}"
            )
            self.builder.warn("EnvironmentErrors", message[:_MAX_ENVIRONMENT_MESSAGE])
        errors = [
            EnvironmentErrors(
                type=kind,
                count=error.count,
                problem=error.problem[:_MAX_ENVIRONMENT_MESSAGE],
                message=error.message[:_MAX_ENVIRONMENT_MESSAGE],
            )
            for kind, error in head.environment_errors.items()
        ]
        self._update_status(environment_errors=errors)


def _without_progress(status: Manifest) -> dict[str, Any]:
    """Return a status without the figures that change all the time while a job runs."""
    errors = [error["type"] for error in status.get("environmentErrors", ())]
    return {**status, "progress": None, "timeSaved": None, "environmentErrors": errors}
