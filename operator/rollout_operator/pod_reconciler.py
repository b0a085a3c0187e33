"""Decides which head and worker pods to create and delete, for a job that is running. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_operator import names
from rollout_operator.actions import Create, DeletePod, PlanBuilder
from rollout_operator.head_status import STATUS_PERIOD_S
from rollout_operator.job_context import JobContext
from rollout_operator.observed import Observed, PodView
from rollout_operator.pods import head_pod, worker_pod
from rollout_operator.scaling import workers_to_remove
from rollout_operator.teardown import delete_pods


@dataclass(frozen=True)
class PodReconciler:
    """Adds the actions that bring a job's pods to their desired number."""

    observed: Observed
    context: JobContext
    builder: PlanBuilder
    recorded_failures: set[str]
    """Uids of failed pods that the status already lists. Other failed pods must be recorded before they are deleted."""
    backoff: float
    """Seconds until pods may be replaced again after failures; 0 if they may be replaced now."""

    def reconcile_head(self) -> None:
        """Create the head pod if there is none."""
        live, terminating = self._remove_terminated(self.observed.component(names.HEAD))
        # A head that does not terminate in time is not waited for: it has no GPUs, and Redis admits one coordinator.
        # Kueue, however, would delete a second head as a pod in excess of the group's.
        waits = any(pod.in_pod_group or not pod.is_overdue(self.observed.now) for pod in terminating)
        if not live and not waits and not self.backoff:
            self.builder.actions.append(Create(head_pod(self.context, taken=self._taken_names)))

    def reconcile_workers(self, desired: int, slots_used: int) -> list[PodView]:
        """Create or delete workers until there are *desired* ones, at most one per slot.

        Args:
            desired: the desired number of workers.
            slots_used: number of slots that ever had a worker; a new pod in one of these is a replacement.

        Returns:
            The workers that exist now and are neither terminated nor being deleted.
        """
        workers = self.context.job.spec.workers
        live, terminating = self._remove_terminated(self.observed.component(names.WORKER))
        if len(live) > desired:
            for pod in workers_to_remove(live, len(live) - desired, workers, self.observed.head):
                self.builder.actions.append(DeletePod(pod.name, pod.uid))
            return live
        # A pod that is terminating still holds its GPUs. A terminated one does not, but its slot is not free yet.
        missing = desired - len(live) - sum(pod.has_running_containers for pod in terminating)
        occupied = {pod.slot for pod in (*live, *terminating)}
        free_slots = [slot for slot in range(desired) if slot not in occupied][: max(0, missing)]
        pending = sum(pod.replacement and pod.phase == "Pending" and not pod.in_pod_group for pod in live)
        for slot in free_slots:
            replacement = slot < slots_used
            if replacement:
                # Kueue admits a group only when all its pods exist.
                is_limited = not self.context.is_in_pod_group(slot)
                if self.backoff or (is_limited and pending >= workers.max_pending_replacements):
                    continue
                pending += is_limited
            manifest = worker_pod(self.context, slot, replacement=replacement, taken=self._taken_names)
            self.builder.actions.append(Create(manifest))
        return live

    @property
    def _taken_names(self) -> set[str]:
        """Names of pods that exist but are not waited for."""
        return {pod.name for pod in self.observed.pods if pod.retained or pod.is_overdue(self.observed.now)}

    def outdated(self) -> list[PodView]:
        """Return the pods that have the settings of an earlier revision: the workers, and then the head."""
        revision = self.context.revision
        pods = (*self.observed.component(names.WORKER), *self.observed.component(names.HEAD))
        return [pod for pod in pods if revision is not None and pod.revision != revision.hash and not pod.deleting]

    def replace_outdated(self, desired: int) -> None:
        """Delete one outdated pod, unless a pod is being deleted.

        It is one that is not ready, if there is any: an update may be what makes the pods start. Otherwise *desired*
        workers and the head must exist and be ready.
        """
        existing = (*self.observed.component(names.WORKER), *self.observed.component(names.HEAD))
        pods = [pod for pod in existing if not pod.retained]
        if any(pod.deleting for pod in pods):
            return
        outdated = self.outdated()
        candidates = [pod for pod in outdated if not pod.ready]
        if not candidates and len(pods) == desired + 1 and all(pod.ready for pod in pods):
            candidates = outdated
        self.builder.actions.extend(DeletePod(pod.name, pod.uid) for pod in candidates[:1])

    def _remove_terminated(self, pods: list[PodView]) -> tuple[list[PodView], list[PodView]]:
        """Delete the pods that have terminated or are stuck, except those whose failure has yet to be recorded.

        Returns:
            The live pods, and the pods that are terminating or terminated and occupy their slot. A pod that a finalizer
            retains occupies none.
        """
        live = []
        terminating = []
        for pod in pods:
            if pod.retained:
                continue
            if pod.deleting:
                delete_pods(self.builder, [pod], self.observed)
                terminating.append(pod)
                self.builder.requeue(STATUS_PERIOD_S)
            elif not pod.terminated and pod.uid not in self.recorded_failures:
                live.append(pod)
            else:
                if pod.phase == "Succeeded" or pod.uid in self.recorded_failures:
                    self.builder.actions.append(DeletePod(pod.name, pod.uid))
                terminating.append(pod)
        return live, terminating
