"""The operator is killed before and after each of its changes to the cluster; the next one goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes


def test_killed_around_every_call_it_makes_what_one_that_lives_makes(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    log = cluster.directory / "log" / "operator-killed.log"
    mortal = OperatorProcess(cluster.kubeconfig, log, f"--namespace={jobs.namespace}", "--log-format=text")

    def until(condition: Callable[[], bool], name: str) -> int:
        """Start operators that die at their first, second … call, until the state is reached; how many died."""
        for deaths in range(60):
            mortal.start(die_at=f"{'before' if deaths % 2 else 'after'}:{deaths % 3}")
            try:
                jobs.wait(lambda: mortal.ended() or condition(), 30)
            finally:
                alive = not mortal.ended()
                if alive:
                    mortal.kill()
            if condition():
                return deaths
            assert not alive, f"{name} is not reached and nobody is killed"
        pytest.fail(f"{name} is not reached")

    jobs.make("math", lifecycle={"ttlSecondsAfterFinished": 2})
    deaths = until(lambda: len(jobs.running("math")) == 3 and jobs.state("math") == "Starting", "running")
    assert deaths >= 5
    uids = {name: pod.metadata.uid for name, pod in jobs.pods("math").items()}
    assert {"math-head", "math-worker-0", "math-worker-1"} == set(uids)

    nodes.end(jobs.namespace, "math-worker-0", 1)
    until(lambda: jobs.status("math").get("failedPods") == 1 and len(jobs.running("math")) == 3, "replaced")
    later = {name: pod.metadata.uid for name, pod in jobs.pods("math").items()}
    assert later.keys() == uids.keys()
    assert {"math-worker-0"} == {name for name in uids if uids[name] != later[name]}

    nodes.end(jobs.namespace, "math-head")
    until(lambda: jobs.get("math") is None, "deleted")
    jobs.wait(lambda: not jobs.pods("math"), 90)


def test_of_two_operators_one_works_and_the_other_takes_over(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    options = [f"--namespace={jobs.namespace}", f"--lease={jobs.namespace}/operator", "--log-format=text"]
    both = [
        OperatorProcess(cluster.kubeconfig, cluster.directory / "log" / f"operator-lease-{number}.log", *options)
        for number in range(2)
    ]
    for one in both:
        one.start()
        one.wait_until_ready()
    jobs.make("first")
    jobs.wait(lambda: len(jobs.running("first")) == 3)
    leading = [one.metric("rollout_operator_leading") for one in both]
    assert [0.0, 1.0] == sorted(leading)
    leader, other = (both[0], both[1]) if leading[0] else (both[1], both[0])
    leader.kill()
    jobs.make("second")
    jobs.wait(lambda: len(jobs.running("second")) == 3, 45)
    assert 1.0 == other.metric("rollout_operator_leading")
    assert 0 == other.terminate()
    # given back: the next one need not wait until it runs out
    leader.start()
    leader.wait_until_ready()
    jobs.make("third")
    jobs.wait(lambda: len(jobs.running("third")) == 3, 10)
    leader.terminate()


def test_two_operators_at_once_make_no_pod_twice(cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes) -> None:
    both = [
        OperatorProcess(
            cluster.kubeconfig,
            cluster.directory / "log" / f"operator-both-{number}.log",
            f"--namespace={jobs.namespace}",
            "--log-format=text",
        )
        for number in range(2)
    ]
    for one in both:
        one.start()
    for one in both:
        one.wait_until_ready()
    for number in range(4):
        jobs.make(f"math-{number}")
    for number in range(4):
        jobs.wait(lambda number=number: len(jobs.running(f"math-{number}")) == 3, 60)
        assert 3 == len(jobs.pods(f"math-{number}"))
        nodes.end(jobs.namespace, f"math-{number}-worker-0", 1)
    for number in range(4):
        jobs.wait(
            lambda number=number: (
                jobs.status(f"math-{number}").get("failedPods") == 1 and len(jobs.running(f"math-{number}")) == 3
            ),
            60,
        )
    for one in both:
        one.terminate()


def test_what_went_unnoticed_while_a_watch_was_away_for_too_long_is_found(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes, operator: OperatorProcess
) -> None:
    """A new API server remembers no old versions: it answers 410 Gone."""
    jobs.make("math")
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    before = jobs.pods("math")["math-worker-1"].metadata.uid
    assert operator.process is not None
    operator.process.send_signal(signal.SIGSTOP)
    cluster.kill("apiserver")
    cluster.spawn("apiserver")
    cluster.wait_until_ready()
    jobs.core.delete_namespaced_pod("math-worker-1", jobs.namespace, grace_period_seconds=0)
    operator.process.send_signal(signal.SIGCONT)
    jobs.wait(lambda: (pod := jobs.pods("math").get("math-worker-1")) and pod.metadata.uid != before, 60)
    assert "away for too long" in operator.log()


def test_the_api_server_may_be_restarted(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes, operator: OperatorProcess
) -> None:
    jobs.make("before")
    jobs.wait(lambda: len(jobs.running("before")) == 3)
    cluster.kill("apiserver")
    cluster.spawn("apiserver")
    cluster.wait_until_ready()
    jobs.wait(lambda: cluster.kubectl("get", "rolloutjobs", check=False).returncode == 0)
    jobs.make("after")
    jobs.wait(lambda: len(jobs.running("after")) == 3, 90)
    assert 3 == len(jobs.pods("before"))
    assert not operator.ended()


def test_an_api_server_that_knows_no_rollout_jobs_for_a_while_is_waited_for(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes, operator: OperatorProcess
) -> None:
    """It answers 404 where its own caches are not filled, after a restart or an upgrade."""
    jobs.make("kept")
    jobs.wait(lambda: len(jobs.running("kept")) == 3)
    cluster.withdraw_group()
    jobs.wait(lambda: "404" in operator.log())
    cluster.serve_group()
    jobs.make("after")
    jobs.wait(lambda: len(jobs.running("after")) == 3, 60)
    assert 3 == len(jobs.pods("kept"))
    assert 0 == operator.terminate()
