"""What holds for the planner whatever happens: a state machine plays kubelet, scheduler, user and chaos."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_operator import names
from rollout_operator.head_status import EngineStatus, HeadStatus

from tests.support.simulated_cluster import ModelCluster

PASSES = 12
GPUS = 2
REPLICAS = st.integers(1, 5)


class Life(RuleBasedStateMachine):
    """A job from its beginning to its end."""

    @initialize(
        replicas=REPLICAS, autoscale=st.booleans(), limit=st.integers(0, 3), ttl=st.none() | st.integers(0, 100)
    )
    def begin(self, replicas: int, autoscale: bool, limit: int, ttl: int | None) -> None:
        lifecycle: dict[str, Any] = {"backoffLimit": limit}
        if ttl is not None:
            lifecycle["ttlSecondsAfterFinished"] = ttl
        self.most = replicas + 2 if autoscale else replicas
        workers: dict[str, Any] = {"replicas": replicas, "autoscale": autoscale, "gpusPerWorker": GPUS}
        if autoscale:
            workers["maxReplicas"] = self.most
        self.cluster = ModelCluster(
            {
                "source": {"trainer": {}},
                "model": {"uri": "Qwen/Qwen3-8B"},
                "workers": workers,
                "lifecycle": lifecycle,
            }
        )
        self.foreign = {"metadata": {"name": "math-worker-99", "uid": "theirs"}, "spec": {}, "status": {}}
        self.stale = self.cluster.look()

    # the operator

    @rule()
    def look_and_act(self) -> None:
        self.cluster.carry_out(self.cluster.look())

    @rule(steps=st.integers(0, 8))
    def look_and_be_killed(self, steps: int) -> None:
        self.cluster.carry_out(self.cluster.look(), steps)

    @rule()
    def another_operator_looks(self) -> None:
        """Its plan is carried out later, when it is out of date. Its status is not: that is refused with 409."""
        self.stale = self.cluster.look()

    @rule()
    def another_operator_acts(self) -> None:
        if self.stale.status is None:
            self.cluster.carry_out(self.stale)

    # Kubernetes

    def _pod(self, data: st.DataObject) -> str | None:
        there = sorted(self.cluster.pods)
        return data.draw(st.sampled_from(there)) if there else None

    @rule(data=st.data(), ready=st.booleans())
    def a_pod_runs(self, data: st.DataObject, ready: bool) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.run(name, ready=ready)

    @rule(data=st.data(), code=st.sampled_from([1] * 6 + [137, 3, 7, 2, 0]), whose=st.sampled_from(["", "", "Evicted"]))
    def a_pod_ends(self, data: st.DataObject, code: int, whose: str) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.end(name, code, pod_reason=whose if code else "")

    @rule(data=st.data())
    def a_pod_that_was_told_to_end_has(self, data: st.DataObject) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.vanish(name)

    @rule(data=st.data())
    def somebody_deletes_a_pod(self, data: st.DataObject) -> None:
        if (name := self._pod(data)) is not None:
            self.cluster.delete_pod(name)

    @rule(data=st.data())
    def somebody_deletes_an_object(self, data: st.DataObject) -> None:
        if self.cluster.objects:
            del self.cluster.objects[data.draw(st.sampled_from(sorted(self.cluster.objects)))]

    @rule(seconds=st.sampled_from([1, 10, 60, 400]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.now += seconds

    @rule(waiting=st.integers(0, 100), assigned=st.integers(0, 16), idle=st.sampled_from([0.0, 100.0]))
    def the_head_speaks(self, waiting: int, assigned: int, idle: float) -> None:
        engines = tuple(
            EngineStatus(worker=name, slots=16, assigned=assigned, idle_seconds=idle) for name in self.cluster.workers()
        )
        self.cluster.head = HeadStatus(waiting=waiting, assigned=assigned, engines=engines, seconds_left=500.0)

    # the user

    @precondition(lambda self: self.cluster.job is not None)
    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.cluster.change(lifecycle={"suspend": suspend})

    @precondition(lambda self: self.cluster.job is not None)
    @rule(replicas=REPLICAS)
    def scale(self, replicas: int) -> None:
        workers = self.cluster.job["spec"]["workers"]
        if replicas <= workers.get("maxReplicas", replicas):
            self.cluster.change(workers={"replicas": replicas})
            self.most = max(self.most, replicas)

    @precondition(lambda self: self.cluster.job is not None)
    @rule(really=st.sampled_from([False] * 9 + [True]))
    def delete(self, really: bool) -> None:
        if really:
            self.cluster.delete_job()

    # what always holds

    @invariant()
    def no_more_gpus_than_were_ever_asked_for(self) -> None:
        if hasattr(self, "cluster"):
            assert self.cluster.gpus() <= GPUS * self.most

    @invariant()
    def what_was_counted_stays_counted(self) -> None:
        if hasattr(self, "cluster") and self.cluster.job is not None:
            now = self.cluster.status.get("failedPods", 0)
            assert now >= getattr(self, "counted", 0)
            assert now <= len(self.cluster.failed), "one pod was counted twice"
            self.counted = now

    @invariant()
    def an_end_is_an_end(self) -> None:
        if hasattr(self, "cluster") and self.cluster.job is not None:
            state = self.cluster.status.get("state")
            if getattr(self, "ended", None):
                assert state == self.ended
            self.ended = state if state in ("Succeeded", "Failed") else None

    def teardown(self) -> None:
        """From wherever it is, the job settles once nothing happens any more, and a second look changes nothing."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for _ in range(4):
            cluster.settle(PASSES)
            cluster.now += 1000  # every pause is over, and whoever was to end is lost
        cluster.settle(PASSES)
        if cluster.job is None:
            assert not cluster.pods
            return
        if cluster.job["metadata"].get("deletionTimestamp") or cluster.status["state"] in ("Succeeded", "Failed"):
            assert not [name for name in cluster.workers() if cluster.pods[name]["status"]["phase"] != "Failed"]
            return
        if cluster.job["spec"].get("lifecycle", {}).get("suspend"):
            assert not cluster.pods
            assert cluster.status["state"] == "Suspended"
            return
        assert 1 == len(cluster.heads())
        workers = cluster.job["spec"]["workers"]
        slots = [cluster.pods[name]["metadata"]["labels"][names.SLOT_LABEL] for name in cluster.workers()]
        assert len(slots) == len(set(slots))
        if not workers["autoscale"]:
            pending = [name for name in cluster.workers() if cluster.pods[name]["status"]["phase"] == "Pending"]
            assert workers["replicas"] == len(slots) or len(pending) >= 4


Life.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_life = Life.TestCase
