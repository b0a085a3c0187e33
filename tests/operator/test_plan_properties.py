"""Invariants of the planner: a state machine acts as kubelet, scheduler, user and a second operator."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_operator.objects import names
from rollout_operator.objects.observed import EngineStatus, HeadStatus, PodView, parse_timestamp
from rollout_operator.planning.actions import Create, Plan

from tests.support.simulated_cluster import SimulatedCluster

MAX_PASSES = 12
GPUS_PER_WORKER = 2
REPLICAS = st.integers(1, 5)
RUNTIME: dict[str, Any] = {"model": {"cache": {"persistentVolumeClaim": "models"}}}


class JobLifecycle(RuleBasedStateMachine):
    """A job from its creation to its deletion."""

    @initialize(
        replicas=REPLICAS,
        autoscale=st.booleans(),
        limit=st.integers(0, 3),
        ttl=st.none() | st.integers(0, 100),
        queued=st.booleans(),
        rolls=st.booleans(),
        prefetches=st.booleans(),
        has_runtime=st.booleans(),
        pods=st.sampled_from([1, 1, 2]),
        data=st.data(),
    )
    def create_job(
        self,
        replicas: int,
        autoscale: bool,
        limit: int,
        ttl: int | None,
        queued: bool,
        rolls: bool,
        prefetches: bool,
        has_runtime: bool,
        pods: int,
        data: st.DataObject,
    ) -> None:
        lifecycle: dict[str, Any] = {
            "backoffLimit": limit,
            "backoffWindowSeconds": 10**9,
            "readyTimeoutSeconds": 10**9,
        }
        if rolls:
            lifecycle["updateStrategy"] = "RollingUpdate"
        if ttl is not None:
            lifecycle["ttlSecondsAfterFinished"] = ttl
        self.max_workers = replicas + 2 if autoscale else replicas
        workers: dict[str, Any] = {"replicas": replicas, "autoscale": autoscale, "gpusPerWorker": GPUS_PER_WORKER}
        if autoscale:
            workers["maxReplicas"] = self.max_workers
        if pods > 1:
            workers["podsPerWorker"] = pods
        if queued:
            workers["minReplicas"] = data.draw(st.integers(1, replicas))
        self.cluster = SimulatedCluster(
            {
                "source": {"trainer": {}},
                "model": {
                    "uri": "Qwen/Qwen3-8B",
                    "cache": {"prefetch": prefetches, **({} if has_runtime else {"persistentVolumeClaim": "models"})},
                },
                "engine": {"tensorParallelSize": GPUS_PER_WORKER if pods > 1 else 1},
                "workers": workers,
                "lifecycle": lifecycle,
                **({"runtimeRef": {"name": "cluster"}} if has_runtime else {}),
            },
            queued=queued,
        )
        self.stale = self.cluster.plan()

    # The operator

    @rule()
    def reconcile(self) -> None:
        if self.cluster.job is not None:
            planned = self.cluster.plan()
            self._check_backoffs(planned)
            self.cluster.execute(planned)

    def _check_backoffs(self, planned: Plan) -> None:
        """Check that no pod is created before the backoff of those in its place has passed."""
        status = self.cluster.status if planned.status is None else planned.status
        delayed = {
            pod
            for backoff in status.get("backoffs", ())
            for pod in backoff["pods"]
            if (parse_timestamp(backoff["time"]) or 0.0) + backoff["seconds"] > self.cluster.now
        }
        for action in planned.actions:
            if isinstance(action, Create) and action.manifest["kind"] == "Pod":
                metadata = action.manifest["metadata"]
                slot = metadata["labels"].get(names.SLOT_LABEL)
                component = metadata["labels"][names.COMPONENT_LABEL]
                assert (f"math-{component}" if slot is None else f"math-worker-{slot}") not in delayed

    @rule(steps=st.integers(0, 8))
    def reconcile_and_be_killed(self, steps: int) -> None:
        self.cluster.execute(self.cluster.plan(), steps)

    @rule()
    def another_operator_plans(self) -> None:
        """Make a plan that is executed later, when it is outdated; a status in it would be rejected with 409."""
        self.stale = self.cluster.plan()

    @rule()
    def another_operator_executes(self) -> None:
        if self.stale.status is None:
            self.cluster.execute(self.stale)

    # Kubernetes

    def _pod(self, data: st.DataObject) -> str | None:
        pods = sorted(self.cluster.pods)
        return data.draw(st.sampled_from(pods)) if pods else None

    @rule(data=st.data(), ready=st.booleans())
    def run_pod(self, data: st.DataObject, ready: bool) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.run(name, ready=ready)

    @rule(
        data=st.data(),
        code=st.sampled_from([1] * 6 + [137, 3, 7, 2, 0]),
        disrupted=st.sampled_from([False, False, True]),
    )
    def terminate_pod(self, data: st.DataObject, code: int, disrupted: bool) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.terminate(name, code, disrupted=disrupted and code != 0)

    @rule(data=st.data(), reason=st.sampled_from(["OutOfcpu", "Evicted"]), node=st.sampled_from(["one", "two"]))
    def reject_pod(self, data: st.DataObject, reason: str, node: str) -> None:
        pods = sorted(name for name in self.cluster.pods if self.cluster.can_bind(name))
        if pods:
            self.cluster.reject(data.draw(st.sampled_from(pods)), reason, node)

    @rule(data=st.data())
    def finish_deletion(self, data: st.DataObject) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.finish_deletion(name)

    @rule(data=st.data())
    def delete_pod(self, data: st.DataObject) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.delete_pod(name)

    @rule(data=st.data())
    def lose_node(self, data: st.DataObject) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.lose_node(name)

    @rule(data=st.data())
    def delete_object(self, data: st.DataObject) -> None:
        if self.cluster.objects:
            del self.cluster.objects[data.draw(st.sampled_from(sorted(self.cluster.objects)))]

    @rule()
    def reconcile_queue(self) -> None:
        self.cluster.reconcile_queue()

    @rule(has_quota=st.booleans(), preempts=st.booleans())
    def change_quota(self, has_quota: bool, preempts: bool) -> None:
        self.cluster.has_quota = has_quota
        if preempts:
            self.cluster.preempt()

    @rule(seconds=st.sampled_from([1, 10, 60, 400]))
    def advance_time(self, seconds: int) -> None:
        self.cluster.now += seconds

    @rule(waiting=st.integers(0, 100), assigned=st.integers(0, 16), idle=st.sampled_from([0.0, 100.0]))
    def update_head_status(self, waiting: int, assigned: int, idle: float) -> None:
        engines = tuple(
            EngineStatus(worker=name, max_running=16, assigned=assigned, idle_seconds=idle)
            for name in self.cluster.workers()
        )
        self.cluster.head = HeadStatus(waiting=waiting, assigned=assigned, engines=engines, remaining_seconds=500.0)

    # The user

    @precondition(lambda self: self.cluster.job is not None)
    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.cluster.change(lifecycle={"suspend": suspend})

    @precondition(lambda self: self.cluster.job is not None)
    @rule(replicas=REPLICAS)
    def scale(self, replicas: int) -> None:
        workers = self.cluster.job["spec"]["workers"]
        if workers.get("minReplicas", 1) <= replicas <= workers.get("maxReplicas", replicas):
            self.cluster.change(workers={"replicas": replicas})
            self.max_workers = max(self.max_workers, replicas)

    @precondition(lambda self: self.cluster.job is not None)
    @rule(image=st.sampled_from(["worker:1", "worker:2"]))
    def change_image(self, image: str) -> None:
        self.cluster.change(image={"name": image})

    @precondition(lambda self: self.cluster.job is not None)
    @rule(replicas=st.sampled_from([None, 1, 2]))
    def change_server(self, replicas: int | None) -> None:
        if replicas is not None:
            self.cluster.change(server={"replicas": replicas})
        elif "server" in self.cluster.job["spec"]:
            self.cluster.change(server=None)

    @rule(image=st.sampled_from(["platform:1", "platform:2", None]), claim=st.sampled_from(["models", "others"]))
    def change_runtime(self, image: str | None, claim: str) -> None:
        """Change the runtime that the job names, or delete it."""
        cache = {"persistentVolumeClaim": claim}
        self.cluster.runtime = image and {"image": {"name": image}, "model": {"cache": cache}}

    @precondition(lambda self: self.cluster.job is not None)
    @rule(confirmed=st.sampled_from([False] * 9 + [True]))
    def delete(self, confirmed: bool) -> None:
        if confirmed:
            self.cluster.delete_job()

    # Invariants

    @invariant()
    def pods_never_occupy_more_gpus_than_requested(self) -> None:
        if hasattr(self, "cluster"):
            assert self.cluster.gpus() <= GPUS_PER_WORKER * self.max_workers

    @invariant()
    def other_pods_start_only_after_the_model_was_downloaded(self) -> None:
        if hasattr(self, "cluster") and self.cluster.job is not None:
            prefetches = self.cluster.job["spec"]["model"]["cache"]["prefetch"]
            if prefetches and "modelPrefetch" not in self.cluster.status:
                assert not self.cluster.heads()
                assert not self.cluster.workers()
            if not prefetches:
                assert not self.cluster.prefetch_pods()

    @invariant()
    def failures_are_counted_once_and_never_forgotten(self) -> None:
        if hasattr(self, "cluster") and self.cluster.job is not None:
            num_failed = self.cluster.status.get("failedPods", 0)
            assert num_failed >= getattr(self, "counted", 0)
            assert num_failed <= len(self.cluster.failed), "one pod was counted twice"
            self.counted = num_failed

    @invariant()
    def finished_jobs_stay_finished(self) -> None:
        if hasattr(self, "cluster") and self.cluster.job is not None:
            state = self.cluster.status.get("state")
            if getattr(self, "finished", None):
                assert state == self.finished
            self.finished = state if state in ("Succeeded", "Failed") else None

    def teardown(self) -> None:
        """Check that the job converges from any state once nothing happens any more."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        cluster.has_quota = True
        cluster.runtime = cluster.runtime or RUNTIME
        for _ in range(8 if cluster.queued else 4):
            cluster.reconcile(MAX_PASSES)
            for name in cluster.prefetch_pods():
                cluster.terminate(name, 0)
            cluster.finish_deletions()
            cluster.reconcile_queue()
            cluster.now += 1000  # every backoff has passed, and pods on lost nodes are overdue
        cluster.reconcile(MAX_PASSES)
        if cluster.job is None:
            assert not cluster.pods
            return
        server = {kind for kind, name in cluster.objects if name.endswith("-server")}
        if cluster.job["metadata"].get("deletionTimestamp") or cluster.status["state"] in ("Succeeded", "Failed"):
            assert not [name for name in cluster.workers() if cluster.pods[name]["status"]["phase"] != "Failed"]
            assert not server
            return
        if cluster.job["spec"].get("lifecycle", {}).get("suspend"):
            assert not cluster.pods
            assert not server
            assert cluster.status["state"] == "Suspended"
            return
        assert not cluster.prefetch_pods()
        [head] = cluster.heads()
        if "server" in cluster.job["spec"]:
            starts = PodView.from_pod(cluster.pods[head]).ready
            assert server >= {"Service", "NetworkPolicy", *(["Deployment"] if starts else [])}
        else:
            assert not server
        workers = cluster.job["spec"]["workers"]
        places = [
            (labels[names.SLOT_LABEL], labels[names.RANK_LABEL])
            for labels in (cluster.pods[name]["metadata"]["labels"] for name in cluster.workers())
        ]
        slots = {slot for slot, _ in places}
        pods = workers.get("podsPerWorker", 1)
        assert sorted(places) == sorted((slot, str(rank)) for slot in slots for rank in range(pods))
        if not workers["autoscale"]:
            pending = [name for name in cluster.workers() if cluster.pods[name]["status"]["phase"] == "Pending"]
            assert not any(cluster.pods[name]["spec"].get("schedulingGates") for name in pending[:-1])
            expected = workers["replicas"]
            if pods > 1 and (group := cluster.status.get("podGroup")) is not None:
                expected = (group["totalCount"] - 1) // pods
            assert expected == len(slots) or len(pending) >= 4


JobLifecycle.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_job_lifecycle = JobLifecycle.TestCase
