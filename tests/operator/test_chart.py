"""The Helm chart: rendered objects, rejected values, and agreement of its README, arguments and dashboard with code."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import yaml
from kubernetes.aio.client import ApiClient
from prometheus_client.registry import Collector
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from rollout_operator.http_server import MetricsCollector
from rollout_operator.kubernetes_api import KubernetesApi
from rollout_operator.object_cache import ObjectCache
from rollout_operator.reconciler import Reconciler

from rollout_api.manifest.rollout_job import API_VERSION, KIND, parse_job
from rollout_api.protocol.access_rules import service_rules
from rollout_worker.history_service.http import HistoryCollector
from rollout_worker.history_service.service import ServiceState
from rollout_worker.job.coordinator.metrics import ENGINE_METRICS, StatusMetrics
from rollout_worker.job.coordinator.status import StatusBoard, StatusInput
from rollout_worker.job.job_store import EngineReport
from rollout_worker.policy.canary import DriftTest
from rollout_worker.policy.remaining_length import RemainingWork
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "das-rollout"
HELM = Path(sys.executable).with_name("helm")


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *arguments, "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True)


def render(**values: Any) -> list[dict[str, Any]]:
    process = helm("template", "das", str(CHART), "--namespace", "rl", values=values)
    assert not process.returncode, process.stderr
    return [resource for resource in yaml.safe_load_all(process.stdout) if resource]


def containers(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    specs = [
        resource["spec"] if resource["kind"] == "Pod" else resource["spec"]["template"]["spec"]
        for resource in objects
        if resource["kind"] in ("Pod", "Deployment", "StatefulSet")
    ]
    return [(spec, container) for spec in specs for container in spec["containers"]]


def test_all_pods_satisfy_the_restricted_pod_security_standard() -> None:
    found = containers(render(redis={"users": True}))
    assert 5 == len(found)
    for pod, container in found:
        assert pod["securityContext"]["runAsNonRoot"]
        assert "RuntimeDefault" == pod["securityContext"]["seccompProfile"]["type"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert {"drop": ["ALL"]} == container["securityContext"]["capabilities"]


def test_permissions_are_limited_to_the_given_namespaces() -> None:
    objects = render(operator={"namespaces": ["a", "b"]}, redis={"users": True})
    kinds = [(resource["kind"], resource["metadata"].get("namespace")) for resource in objects]
    assert not {"ClusterRole", "ClusterRoleBinding"} & {kind for kind, _ in kinds}
    assert {"a", "b", "rl"} == {namespace for kind, namespace in kinds if kind == "Role"}


def test_an_operator_of_some_namespaces_may_read_nodes_on_request() -> None:
    objects = render(operator={"namespaces": ["a"], "readNodes": True})
    rules = [rule for manifest in objects if manifest["kind"] == "ClusterRole" for rule in manifest["rules"]]
    assert [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}] == rules


def test_people_get_access_through_the_aggregated_roles_on_request() -> None:
    roles = {
        manifest["metadata"]["name"]: manifest
        for manifest in render(rbac={"aggregateRoles": True})
        if manifest["kind"] == "ClusterRole"
    }
    view, edit = roles["das-rolloutjobs-view"], roles["das-rolloutjobs-edit"]
    assert "true" == view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"]
    assert "true" == edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"]
    assert {"get", "list", "watch"} == {verb for rule in view["rules"] for verb in rule["verbs"]}
    assert not {"das-rolloutjobs-view", "das-rolloutjobs-edit"} & {
        manifest["metadata"]["name"] for manifest in render()
    }


def test_the_crd_is_kept_on_uninstall_and_can_be_omitted() -> None:
    (crd,) = [resource for resource in render() if resource["kind"] == "CustomResourceDefinition"]
    assert "keep" == crd["metadata"]["annotations"]["helm.sh/resource-policy"]
    assert not [
        resource for resource in render(crds={"install": False}) if resource["kind"] == "CustomResourceDefinition"
    ]


def test_the_bundled_redis_evicts_nothing_and_only_secrets_contain_its_password() -> None:
    objects = render(redis={"namespaces": ["team-a", "team-b"]})
    secrets = {
        (resource["metadata"]["namespace"], resource["metadata"]["name"]): resource
        for resource in objects
        if resource["kind"] == "Secret"
    }
    expected = {("rl", "das-redis-admin"), ("rl", "das-redis-history")}
    assert expected | {("team-a", "rollout-redis"), ("team-b", "rollout-redis")} == set(secrets)
    password = secrets["rl", "das-redis-admin"]["stringData"]["password"]
    assert password in secrets["team-a", "rollout-redis"]["stringData"]["url"]
    assert password not in secrets["rl", "das-redis-history"]["stringData"]["url"]
    rest = yaml.safe_dump([resource for resource in objects if resource["kind"] != "Secret"])
    for secret in secrets.values():
        assert secret["stringData"].get("password", password) not in rest
    assert "noeviction" in rest
    assert not [
        resource for resource in render(redis={"bundled": False}) if resource["kind"] in ("Secret", "StatefulSet")
    ]


def test_only_the_redis_users_process_has_the_admin_secret() -> None:
    named = {"adminSecret": "redis-admin", "bundled": False, "users": True}
    for values, secret in (({"users": True}, "das-redis-admin"), (named, "redis-admin")):
        holders = {
            container["name"]
            for _, container in containers(render(redis=values))
            for variable in container.get("env", ())
            if variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == secret
        }
        assert {"redis-users"} == holders - {"redis"}
    process = helm("template", "das", str(CHART), values={"redis": {"bundled": False, "users": True}})
    assert "redis.users needs redis.adminSecret" in process.stderr


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [resource for resource in objects if resource["kind"] == kind and resource["metadata"]["name"] == name]
    return found


def test_the_history_service_runs_if_it_has_a_redis_server() -> None:
    def secret_of(**values: Any) -> dict[str, str] | None:
        found = [container for _, container in containers(render(**values)) if container["name"] == "history"]
        if not found:
            return None
        (container,) = found
        variables = {variable["name"]: variable for variable in container["env"]}
        secret: dict[str, str] = variables["ROLLOUT_HISTORY_REDIS_URL"]["valueFrom"]["secretKeyRef"]
        return secret

    own_secret = {"redis": {"existingSecret": "histories", "key": "address"}}
    assert {"name": "das-redis-history", "key": "url"} == secret_of()
    assert {"name": "histories", "key": "address"} == secret_of(history=own_secret)
    assert {"name": "histories", "key": "address"} == secret_of(history=own_secret, redis={"bundled": False})
    assert secret_of(redis={"bundled": False}) is None
    assert secret_of(history={"enabled": False}) is None
    # The bundled server has no user for a service that does not use it.
    for history in (own_secret, {"enabled": False}):
        assert "rollout-history on" not in yaml.safe_dump(render(history=history))


def test_the_history_service_is_selected_by_its_labels() -> None:
    objects = render(monitoring={"podMonitor": True})
    service = named(objects, "Deployment", "das-history")["spec"]
    labels = service["template"]["metadata"]["labels"]
    assert service["selector"]["matchLabels"] == labels
    assert named(objects, "Service", "das-history")["spec"]["selector"] == labels
    assert named(objects, "PodMonitor", "das-history")["spec"]["selector"]["matchLabels"] == labels
    assert named(objects, "NetworkPolicy", "das-history")["spec"]["podSelector"]["matchLabels"] == labels
    (to_redis,) = named(objects, "NetworkPolicy", "das-redis")["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": labels}} in to_redis["from"]
    # The labels do not select the operator.
    assert named(objects, "Deployment", "das-operator")["spec"]["selector"]["matchLabels"] != labels


def test_the_bundled_redis_starts_with_a_user_for_the_history_service(tmp_path: Path) -> None:
    objects = render(redis={"namespaces": ["team-a"]})
    (container,) = [container for _, container in containers(objects) if container["name"] == "redis"]
    secrets = {
        resource["metadata"]["name"]: resource["stringData"]
        for resource in objects
        if resource["kind"] == "Secret" and resource["metadata"]["namespace"] == "rl"
    }
    environment = {
        variable["name"]: secrets[variable["valueFrom"]["secretKeyRef"]["name"]][
            variable["valueFrom"]["secretKeyRef"]["key"]
        ]
        for variable in container["env"]
    }
    (script,) = container["args"]
    words = shlex.split(script)
    place = words.index("rollout-history")
    assert ["on", ">$HISTORY_PASSWORD", *service_rules()] == words[place + 1 :]

    port = free_port()
    elsewhere = script.replace("--dir /data", f"--dir {tmp_path} --port {port}")
    command = [*container["command"], elsewhere]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL) as server:
        try:
            url = secrets["das-redis-history"]["url"].replace("das-redis.rl.svc:6379", f"127.0.0.1:{port}")
            until_it_listens = Retry(ConstantBackoff(0.1), 100)
            with redis.Redis.from_url(url, retry=until_it_listens) as client:
                assert client.set("history:x", 1)
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.get("rollout:{uid}:results")
        finally:
            server.terminate()


@pytest.mark.parametrize(
    "values",
    [
        {"operator": {"replicas": 0}},
        {"operator": {"replica": 1}},
        {"operator": {"logLevel": "loud"}},
        {"image": {"worker": ""}},
        {"redis": {"maxMemory": "much"}},
        {"history": {"retention": "a month"}},
        {"history": {"redis": {"url": "redis://h"}}},
        {"typo": 1},
    ],
)
def test_invalid_values_are_rejected(values: dict[str, Any]) -> None:
    process = helm("template", "das", str(CHART), values=values)
    assert process.returncode
    assert next(iter(values)) in process.stderr


def leaves(values: Any, path: str = "") -> set[str]:
    if isinstance(values, dict) and values and not path.endswith(".resources"):
        return {leaf for name, value in values.items() for leaf in leaves(value, f"{path}.{name}".lstrip("."))}
    return {path}


def test_the_readme_lists_every_value() -> None:
    table = (CHART / "README.md").read_text().partition("## Values")[2]
    named = set()
    for cell in re.findall(r"^\| ([^|]+) \|", table, flags=re.M):
        names = re.findall(r"`([^`]+)`", cell)
        section = names[0].rpartition(".")[0] if names else ""
        named |= {section + name if name.startswith(".") else name for name in names}
    assert leaves(yaml.safe_load((CHART / "values.yaml").read_text())) == named


def test_the_operator_accepts_the_arguments_of_the_chart() -> None:
    deployment = named(render(operator={"namespaces": ["a"]}), "Deployment", "das-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    options = {argument.partition("=")[0] for argument in container["args"]}
    process = subprocess.run([sys.executable, "-m", "rollout_operator", "--help"], capture_output=True, text=True)
    assert options <= set(re.findall(r"--[a-z-]+", process.stdout))


def exported_names(collector: Collector) -> set[str]:
    """Return the names of a collector's metrics as Prometheus stores them."""
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in collector.collect()}


def history_service_metrics() -> set[str]:
    return exported_names(HistoryCollector(ServiceState()))


def operator_metrics() -> set[str]:
    api, cache = KubernetesApi(cast(ApiClient, None)), ObjectCache()
    return exported_names(MetricsCollector(api, cache, Reconciler(api, cache, "image"), None))


def job_metrics() -> set[str]:
    """Return the metrics of a job whose engine reports all counters."""
    board = StatusBoard(
        parse_job(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"name": "math"},
                "spec": {"model": {"uri": "policy"}, "source": {"trainer": {}}},
            }
        )
    )
    counters = dict.fromkeys(ENGINE_METRICS, 0.0)
    board.update(
        StatusInput(
            uid="uid",
            coordinator=1,
            requests=0,
            waiting=0,
            assigned={},
            totals={},
            engines={"engine-0": EngineReport("engine-0", counters=counters)},
            engine_errors={},
            engines_lost=0,
            migrated=0,
            dead_letters=0,
            weight_version=0,
            unread={"client": 0},
            slow_clients=[],
            remaining=RemainingWork(0.0, 0.0),
            drift=DriftTest(1),
            closing=False,
        )
    )
    return exported_names(StatusMetrics(board))


def documented_metrics(page: str) -> set[str]:
    return set(re.findall(r"`(rollout_[a-z_]+)`", (ROOT / "docs" / page).read_text()))


def test_the_docs_list_every_metric_of_the_history_service() -> None:
    text = (ROOT / "docs" / "history.md").read_text()
    assert history_service_metrics() == set(re.findall(r"\brollout_history_[a-z_]+", text))


def test_the_docs_list_every_metric_of_the_operator() -> None:
    assert operator_metrics() == documented_metrics("kubernetes.md")


def test_the_docs_list_every_metric_of_a_job() -> None:
    assert set() == job_metrics() - documented_metrics("several-machines.md")


def test_the_dashboard_queries_only_existing_metrics() -> None:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    queried = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\brollout_[a-z_]+", target["expr"])
    }
    assert queried
    # These are exported only while their value is known.
    estimates = {"rollout_saved_ratio", "rollout_remaining_seconds", "rollout_tail_seconds"}
    assert set() == queried - history_service_metrics() - operator_metrics() - job_metrics() - estimates
