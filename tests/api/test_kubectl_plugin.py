"""The kubectl plugin: the commands that it gives to kubectl, and its messages. tests/cluster runs it on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout_operator.cluster.apply import bundle_config_map as kept_config_map
from rollout_operator.objects import names

from rollout_api.bundle import Evidence, read_archive
from rollout_api.kubectl_plugin import kubectl as pods
from rollout_api.kubectl_plugin.bundle import belongs_to, bundle_config_map, kept_archive
from rollout_api.kubectl_plugin.cli import build_parser, main
from rollout_api.kubectl_plugin.commands import (
    choose_worker,
    connection_of,
    describe,
    exec_arguments,
    failure_lines,
    forward_target,
    forwarded_url,
    http_snippet,
    logs_arguments,
    plan_text,
    redis_snippet,
)
from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError, explain_error, explanation, missing_job, summary
from rollout_api.redis_client.address import without_password


def job(*conditions: tuple[str, str, str, str], **status: Any) -> dict[str, Any]:
    """Return a RolloutJob with conditions: type, status, reason and message."""
    found = [dict(zip(("type", "status", "reason", "message"), one, strict=True)) for one in conditions]
    return {
        "metadata": {"name": "math", "namespace": "rollouts", "uid": "u-1"},
        "spec": {},
        "status": {"state": "Starting", "conditions": found} | status,
    }


def worker(slot: int, rank: int = 0, *, node: str = "a", **metadata: Any) -> dict[str, Any]:
    name = names.pod_name("math", names.WORKER, slot, rank=rank)
    labels = names.labels("math", names.WORKER) | {names.SLOT_LABEL: str(slot), names.RANK_LABEL: str(rank)}
    return {
        "metadata": {"name": name, "labels": labels} | metadata,
        "spec": {"nodeName": node, "terminationGracePeriodSeconds": 45},
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["kubectl", "get", "pods"]),
        (
            {"namespace": "rollouts", "context": "prod", "kubeconfig": "/k"},
            ["kubectl", "--namespace=rollouts", "--context=prod", "--kubeconfig=/k", "get", "pods"],
        ),
    ],
)
def test_the_options_of_kubectl_are_passed_on(options: dict[str, str], expected: list[str]) -> None:
    assert expected == Kubectl(**options).command("get", "pods")


@pytest.mark.parametrize("line", ["status math -n rollouts", "-n rollouts status math"])
def test_the_namespace_may_be_before_or_after_the_command(line: str) -> None:
    assert "rollouts" == build_parser().parse_args(line.split()).namespace


@pytest.mark.parametrize(
    "line",
    ["", "drain math", "drain math 0 --node n", "logs math --head --worker 1", "report math", "connect math --port x"],
)
def test_incomplete_and_contradictory_commands_are_refused(line: str) -> None:
    with pytest.raises(SystemExit) as refused:
        build_parser().parse_args(line.split())
    assert 2 == refused.value.code


def test_pods_are_selected_by_the_labels_that_the_operator_sets() -> None:
    def parsed(selector: str) -> dict[str, str]:
        return dict(label.split("=") for label in selector.split(","))

    assert names.selector("math") == parsed(pods.selector("math"))
    assert names.selector("math", names.HEAD) == parsed(pods.selector("math", pods.HEAD))
    assert {**names.selector("math", names.WORKER), names.SLOT_LABEL: "3"} == parsed(
        pods.selector("math", pods.WORKER, 3)
    )


def test_commands_run_in_the_head_for_the_job_with_this_uid() -> None:
    command = ("status", "--json")
    rollout = ["rollout", "status", "rollouts/math", "--json", "--uid=u-1"]
    assert ["exec", "math-head", "-c", "head", "--", "env", "COLUMNS=120", *rollout] == exec_arguments(
        "math-head", job(), command, columns=120, tty=False
    )
    assert ["exec", "-it", "math-head", "-c", "head", "--", *rollout] == exec_arguments(
        "math-head", job(), command, columns=120, tty=True
    )


def test_all_logs_are_shown_and_followed_however_many_pods_there_are() -> None:
    shown = logs_arguments("a=b", 64, follow=False, tail=-1)
    assert ["logs", "--selector=a=b", "--prefix", "--tail=-1", "--ignore-errors"] == shown
    assert {"--follow", "--max-log-requests=69"} <= set(logs_arguments("a=b", 64, follow=True, tail=10))


def test_failed_pods_are_shown_with_the_ends_of_their_logs() -> None:
    failure = {"pod": "math-worker-0", "time": "T", "reason": "Error", "exitCode": 4, "message": "one\ntwo"}
    assert ["T math-worker-0: Error, exit code 4", "  one", "  two"] == failure_lines(job(failures=[failure]))
    assert ["No pod of this job has failed."] == failure_lines(job())


@pytest.mark.parametrize(
    ("known", "hint"),
    [
        (["math-grpo", "code"], "did you mean math-grpo?"),
        (["agents"], "the jobs there are agents"),
        ([], "choose another namespace with -n"),
    ],
)
def test_a_missing_job_is_answered_with_those_that_exist(known: list[str], hint: str) -> None:
    assert hint in missing_job("math-gpro", "namespace rollouts", known)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([("Ready", "True", "Running", "")], ""),
        (
            [("Ready", "False", "Failed", ""), ("Failed", "True", "DeadlineExceeded", "too late")],
            "DeadlineExceeded: too late",
        ),
        (
            [
                ("Accepted", "True", "Valid", ""),
                ("WorkersReady", "False", "Unschedulable", "0/3 nodes have a GPU"),
                ("EngineReady", "Unknown", "HeadNotReady", ""),
                ("Ready", "False", "Unschedulable", ""),
            ],
            "Unschedulable: 0/3 nodes have a GPU",
        ),
        ([("Ready", "False", "Suspended", "")], "Suspended"),
        ([], ""),
    ],
)
def test_the_first_condition_that_is_not_true_explains_the_state(
    conditions: list[tuple[str, str, str, str]], expected: str
) -> None:
    assert expected == explanation(job(*conditions))
    assert f"rollouts/math is Starting{': ' if expected else ''}{expected}" == summary(job(*conditions))


def test_a_worker_is_chosen_by_its_number_or_its_pod() -> None:
    found = [worker(1), worker(0), worker(0, rank=1), worker(2, deletionTimestamp="T")]
    assert "math-worker-0" == choose_worker("math", found, "0")["metadata"]["name"]
    assert "math-worker-1" == choose_worker("math", found, "math-worker-1")["metadata"]["name"]
    for unknown in ("2", "math-worker-0-1"):
        with pytest.raises(PluginError, match="its workers are: math-worker-0, math-worker-1"):
            choose_worker("math", found, unknown)


def test_a_drain_says_what_happens_to_running_rollouts() -> None:
    assert "have 25 s to finish; the others continue on other workers" in plan_text([worker(0)], 2)
    assert "the others wait for the replacements" in plan_text([worker(0), worker(1)], 2)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://agents-server.rollouts.svc:8000", ("rollouts", "service/agents-server", 8000)),
        ("https://agents-server.rollouts.svc", ("rollouts", "service/agents-server", 8000)),
        ("redis://u:p@das-redis.infra.svc.cluster.local/0", ("infra", "service/das-redis", 6379)),
        ("redis://u:p@das-redis:6380/0", ("rollouts", "service/das-redis", 6380)),
    ],
)
def test_a_port_is_forwarded_to_the_service_of_a_url(url: str, expected: tuple[str, str, int]) -> None:
    assert expected == forward_target(url, "rollouts")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://u:secret@redis.example.com:6379/0", "connect to it directly"),
        ("redis+sentinel://u:secret@a,b/main", "several servers"),
    ],
)
def test_servers_without_a_service_are_not_forwarded(url: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as refused:
        forward_target(url, "rollouts")
    assert "secret" not in str(refused.value)


def test_the_forwarded_url_keeps_login_and_database() -> None:
    url = "redis://job:secret@das-redis.rollouts.svc:6379/0"
    assert "redis://job:secret@127.0.0.1:5000/0" == forwarded_url(url, 5000)
    assert "redis://job:***@das-redis.rollouts.svc:6379/0" == without_password(url)
    assert "http://127.0.0.1:5000" == forwarded_url("http://agents-server.rollouts.svc:8000", 5000)


def test_a_connection_names_the_secret_and_hides_its_content() -> None:
    published = {
        "uid": "u-1",
        "secretName": "math-redis",
        "secretKey": "url",
        "serverUrl": "http://s.rollouts.svc:8000",
    }
    found = job(connection=published)
    found["spec"]["server"] = {"tokensSecretName": "agents"}
    text = "\n".join(describe(found, connection_of(found), None))
    for part in ("http://s.rollouts.svc:8000/v1", "Secret math-redis, key url", "Secret agents", "--port-forward"):
        assert part in text
    shown = "\n".join(describe(found, connection_of(found), "redis://u:secret@r/0"))
    assert "redis://u:secret@r/0" in shown
    with pytest.raises(PluginError, match="has not published"):
        connection_of(job())


def test_the_snippets_are_python() -> None:
    compile(http_snippet(job(), "http://127.0.0.1:5000", "agents"), "http", "exec")
    compile(redis_snippet(job(), "redis://u:p@127.0.0.1:5000/0"), "redis", "exec")
    secret = job(connection={"secretName": "math-redis"})
    compile(describe(secret, connection_of(secret), None)[-2], "secret", "exec")


def test_a_missing_kubectl_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert 1 == ended.value.code
    assert "kubectl is not on the PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('error: the server doesn\'t have a resource type "rolloutjobs"', "installed with its CRD"),
        ("Error from server (Forbidden): pods is forbidden", "ask an administrator"),
        ('error: context "nope" does not exist', 'context "nope" does not exist'),
        ("E1127 22:48:31 1 memcache.go:265] noise\nThe connection was refused", "The connection was refused"),
    ],
)
def test_errors_of_kubectl_say_what_to_do(message: str, expected: str) -> None:
    error = str(explain_error(message))
    assert expected in error
    assert not error.startswith("error:")
    assert "noise" not in error


def test_the_bundle_that_the_operator_keeps_is_found() -> None:
    assert names.bundle_config_map("math") == bundle_config_map("math")
    kept = kept_config_map(Evidence(job()), bundle_config_map("math"), 0.0)
    for uid in ("u-1", None):
        archive = kept_archive(kept, uid)
        assert isinstance(archive, bytes)
        assert {"job.json", "events.json", "README.md"} == {name for name, _ in read_archive(archive)}
    assert "earlier job of this name (uid u-1)" in str(kept_archive(kept, "u-2"))
    assert "is no bundle" in str(kept_archive({"metadata": {"name": "math-bundle"}}, "u-1"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("math", True),
        ("math-head", True),
        ("math-worker-0-1", True),
        ("math-worker-3-r2", True),
        ("math-server-6f5d-x2x1", True),
        ("math-grpo", False),
        ("math-grpo-head", False),
        ("maths", False),
    ],
)
def test_events_of_other_jobs_are_left_out(name: str, expected: bool) -> None:
    assert expected == belongs_to(name, "math")
