"""Operators and API servers that crash, are restarted, or run twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rollout_operator.cluster.leader_election import LEASE_DURATION_S

from tests.support.cluster.complete_control_plane import GARBAGE_COLLECTION_TIMEOUT_S, CompleteControlPlane
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess, new_operator
from tests.support.cluster.virtual_nodes import VirtualNodes

CRASHES_TIMEOUT_S = 180.0
"""An allowance for slow machines, on which each of the many starts of a crashing operator takes seconds."""
CONFLICTS_TIMEOUT_S = 60.0
"""Seconds within which two operators at once, which conflict with each other, start or replace pods of four jobs."""
TAKEOVER_TIMEOUT_S = 45.0
"""Seconds within which a new job's pods run although the leader was killed and its Lease has to expire first."""
RELEASED_LEASE_TIMEOUT_S = LEASE_DURATION_S - 5.0
"""Seconds within which a new job's pods run after the leader has ended: it does not take the duration of a Lease."""
RECOVERY_TIMEOUT_S = 60.0
"""Seconds within which an operator notices what happened while it could not watch, once it can again."""
RESTART_TIMEOUT_S = 90.0
"""Seconds within which a new job's pods run after a restart of the API server, whose other clients recover, too."""


def test_an_operator_that_crashes_around_every_change_reaches_the_same_result(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    operator = new_operator(cluster, jobs.namespace, "crashing-operator")
    operator.start(crashing=True)

    def wait(condition: Callable[[], bool]) -> None:
        jobs.wait(lambda: not operator.is_running() or condition(), CRASHES_TIMEOUT_S)
        assert operator.is_running(), operator.log()[-3000:]

    try:
        jobs.create("math", lifecycle={"ttlSecondsAfterFinished": 2})
        wait(lambda: len(jobs.running("math")) == 3 and jobs.state("math") == "Starting")
        assert operator.log().count("Crashed") >= 5
        created = {name: pod.metadata.uid for name, pod in jobs.pods("math").items()}
        assert {"math-head", "math-worker-0", "math-worker-1"} == set(created)

        nodes.terminate_pod(jobs.namespace, "math-worker-0", 1)
        wait(lambda: jobs.status("math").get("failedPods") == 1 and len(jobs.running("math")) == 3)
        later = {name: pod.metadata.uid for name, pod in jobs.pods("math").items()}
        assert later.keys() == created.keys()
        assert {"math-worker-0"} == {name for name in created if created[name] != later[name]}

        nodes.terminate_pod(jobs.namespace, "math-head")
        wait(lambda: jobs.get("math") is None)
    finally:
        operator.terminate()
    jobs.wait(lambda: not jobs.pods("math"), GARBAGE_COLLECTION_TIMEOUT_S)


def test_a_second_operator_takes_over_when_the_leader_ends(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    lease = f"--lease={jobs.namespace}/operator"
    operators = [new_operator(cluster, jobs.namespace, f"operator-{number}", lease) for number in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.wait_until_ready()
    jobs.create("first")
    jobs.wait_for_running("first", 3)
    leading = [operator.metric("rollout_operator_leading") for operator in operators]
    assert [0.0, 1.0] == sorted(leading)
    leader, other = operators if leading[0] else reversed(operators)
    leader.kill()
    jobs.create("second")
    jobs.wait_for_running("second", 3, TAKEOVER_TIMEOUT_S)
    assert 1.0 == other.metric("rollout_operator_leading")

    # An operator that is terminated releases its lease, so the next one does not wait until it expires.
    leader.start()
    leader.wait_until_ready()
    assert 0 == other.terminate()
    jobs.create("third")
    jobs.wait_for_running("third", 3, RELEASED_LEASE_TIMEOUT_S)
    leader.terminate()


def test_two_operators_at_once_create_no_pod_twice(cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes) -> None:
    operators = [new_operator(cluster, jobs.namespace, f"operator-{number}") for number in range(2)]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.wait_until_ready()
    names = [f"math-{number}" for number in range(4)]
    for name in names:
        jobs.create(name)
    for name in names:
        jobs.wait_for_running(name, 3, CONFLICTS_TIMEOUT_S)
        assert 3 == len(jobs.pods(name))
        nodes.terminate_pod(jobs.namespace, f"{name}-worker-0", 1)
    for name in names:
        jobs.wait(
            lambda name=name: jobs.status(name).get("failedPods") == 1 and len(jobs.running(name)) == 3,
            CONFLICTS_TIMEOUT_S,
        )
    for operator in operators:
        operator.terminate()


def test_a_pod_deleted_during_an_interrupted_watch_is_replaced(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes, operator: OperatorProcess
) -> None:
    """A restarted API server knows no earlier resource versions, so it answers the continued watch with 410 Gone."""
    jobs.create("math")
    jobs.wait_for_running("math", 3)
    deleted = jobs.pods("math")["math-worker-1"].metadata.uid
    operator.pause()
    cluster.kill_process("apiserver")
    cluster.restart_api_server()
    jobs.core.delete_namespaced_pod("math-worker-1", jobs.namespace, grace_period_seconds=0)
    operator.resume()
    jobs.wait(
        lambda: (worker := jobs.pods("math").get("math-worker-1")) and worker.metadata.uid != deleted,
        RECOVERY_TIMEOUT_S,
    )
    assert "interrupted for too long" in operator.log()


def test_the_operator_continues_after_a_restart_of_the_api_server(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes, operator: OperatorProcess
) -> None:
    jobs.create("before")
    jobs.wait_for_running("before", 3)
    cluster.kill_process("apiserver")
    cluster.restart_api_server()
    cluster.wait_until_jobs_are_served()
    jobs.create("after")
    jobs.wait_for_running("after", 3, RESTART_TIMEOUT_S)
    assert 3 == len(jobs.pods("before"))
    assert operator.is_running()


@pytest.mark.complete_cluster
def test_the_operator_waits_while_the_api_server_does_not_serve_rollout_jobs(
    cluster: CompleteControlPlane, jobs: Jobs, nodes: VirtualNodes, operator: OperatorProcess
) -> None:
    """A restarted API server answers 404 until it has read the registered API groups."""
    jobs.create("before")
    jobs.wait_for_running("before", 3)
    cluster.unregister_api_group()
    jobs.wait(lambda: "404" in operator.log())
    cluster.register_api_group()
    jobs.create("after")
    jobs.wait_for_running("after", 3, RECOVERY_TIMEOUT_S)
    assert 3 == len(jobs.pods("before"))
    assert 0 == operator.terminate()
