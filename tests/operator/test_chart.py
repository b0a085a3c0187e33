"""The Helm chart: rendered objects, rejected values, and agreement of its README, arguments and dashboard with code."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import redis
import yaml
from kubernetes.aio.client import ApiClient
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.retry import Retry
from rollout_operator.__main__ import parse_arguments
from rollout_operator.cluster.admin_secret import admin_secret
from rollout_operator.cluster.http_server import MetricsCollector
from rollout_operator.cluster.kubernetes_api import KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.cluster.reconciler import Reconciler
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.names import JOB_LABEL
from rollout_operator.objects.observed import ClusterInfo
from rollout_operator.objects.owned_objects import owned_objects
from rollout_operator.objects.pods import head_pod

from rollout_api.manifest.rollout_job import parse_job
from rollout_api.manifest.status import State
from rollout_api.ports import free_port
from rollout_api.redis_client.server_functions import libraries, load
from rollout_head.coordinator.metrics import StatusMetrics
from rollout_store.history_service.service import HistoryCollector, ServiceState
from rollout_store.job import EngineReport
from rollout_store.runtime.engine_metrics import ENGINE_METRICS, LABELED_ENGINE_METRICS
from scripts import crd
from scripts.dashboards import dashboards
from scripts.release.chart import package_chart
from tests.support.cluster.chart import CHART, HELM, VALUE_SETS, render_chart
from tests.support.job_status import job_status
from tests.support.manifests import rollout_job
from tests.support.planned_jobs import running_job, spec
from tests.support.prometheus_server import needs_prometheus, prometheus_server
from tests.support.simulated_cluster import SimulatedCluster
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *arguments, "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True)


def render(**values: Any) -> list[dict[str, Any]]:
    return render_chart("rl", **values)


def containers(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    specs = [
        resource["spec"] if resource["kind"] == "Pod" else resource["spec"]["template"]["spec"]
        for resource in objects
        if resource["kind"] in ("Pod", "Deployment", "StatefulSet")
    ]
    return [(spec, container) for spec in specs for container in (*spec.get("initContainers", ()), *spec["containers"])]


def test_the_chart_has_no_defects_that_helm_lint_finds() -> None:
    process = helm("lint", str(CHART), "--strict")
    assert not process.returncode, process.stdout


def test_the_templates_depend_on_nothing_but_the_values() -> None:
    # Argo CD renders the chart without a cluster, and again and again.
    for template in (CHART / "templates").rglob("*.*"):
        actions = " ".join(re.findall(r"\{\{.*?\}\}", template.read_text(), re.DOTALL))
        assert not re.search(r"\b(lookup|rand\w+|gen[A-Z]\w+|now|uuidv4)\b", actions), template


def test_all_pods_satisfy_the_restricted_pod_security_standard() -> None:
    found = containers(render())
    assert 6 == len(found)
    for pod, container in found:
        assert pod["securityContext"]["runAsNonRoot"]
        assert "RuntimeDefault" == pod["securityContext"]["seccompProfile"]["type"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert {"drop": ["ALL"]} == container["securityContext"]["capabilities"]


def test_permissions_are_limited_to_the_given_namespaces() -> None:
    objects = render(operator={"namespaces": ["a", "b"]})
    kinds = [(resource["kind"], resource["metadata"].get("namespace")) for resource in objects]
    assert not {"ClusterRole", "ClusterRoleBinding"} & {kind for kind, _ in kinds}
    assert {"a", "b", "rl"} == {namespace for kind, namespace in kinds if kind == "Role"}
    # In its own namespace, which the operator does not watch, rollout-redis-users may only create Secrets.
    (role,) = [
        resource
        for resource in objects
        if resource["kind"] == "Role"
        and (resource["metadata"]["name"], resource["metadata"]["namespace"]) == ("das-redis-users", "rl")
    ]
    assert [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}] == role["rules"]


@pytest.mark.parametrize(
    ("value", "group", "resource", "verbs"),
    [
        ("readNodes", "", "nodes", ["get"]),
        ("readClusterRuntimes", "das.rollout.dev", "clusterrolloutruntimes", ["list", "watch"]),
    ],
)
def test_an_operator_of_some_namespaces_may_read_resources_of_the_cluster_on_request(
    value: str, group: str, resource: str, verbs: list[str]
) -> None:
    objects = render(operator={"namespaces": ["a"], value: True})
    rules = [rule for manifest in objects if manifest["kind"] == "ClusterRole" for rule in manifest["rules"]]
    assert [{"apiGroups": [group], "resources": [resource], "verbs": verbs}] == rules
    assert not [manifest for manifest in render(operator={"namespaces": ["a"]}) if manifest["kind"] == "ClusterRole"]


def test_an_operator_of_selected_namespaces_may_find_them() -> None:
    values = {"operator": {"namespaceSelector": {"team": "a", "stage": "b"}}}
    objects = render(**values)
    for name in ("operator", "redis-users"):
        assert ["--namespace-selector=stage=b,team=a"] == [
            argument for argument in arguments(name, **values) if argument.startswith("--namespace")
        ]
        role = named(objects, "ClusterRole", f"das-{name}.rl")
        assert {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list", "watch"]} in role["rules"]
    assert "namespaces" not in {
        resource
        for made in render()
        if made["kind"] == "ClusterRole"
        for rule in made["rules"]
        for resource in rule["resources"]
    }
    (peer,) = [
        peer
        for peer in named(objects, "NetworkPolicy", "das-redis")["spec"]["ingress"][0]["from"]
        if "namespaceSelector" in peer
    ]
    assert {"namespaceSelector": {"matchLabels": {"team": "a", "stage": "b"}}} == peer


def test_the_policy_for_pod_templates_applies_to_the_namespaces_of_the_operator() -> None:
    def binding(**values: Any) -> dict[str, Any]:
        policy, found = [made for made in render(**values) if made["kind"].startswith("ValidatingAdmissionPolicy")]
        assert policy["metadata"]["name"] == found["spec"]["policyName"] == "das-operator-pod-templates.rl"
        assert "das" == policy["metadata"]["labels"]["app.kubernetes.io/instance"]
        spec: dict[str, Any] = found["spec"]
        return spec

    restricted = {"restrictPodTemplates": True}
    label = "kubernetes.io/metadata.name"
    assert "matchResources" not in binding(admissionPolicy=restricted)
    some = binding(admissionPolicy={**restricted, "exemptNamespaces": ["b"]}, operator={"namespaces": ["a", "b"]})
    assert [
        {"key": label, "operator": "In", "values": ["a", "b"]},
        {"key": label, "operator": "NotIn", "values": ["b"]},
    ] == some["matchResources"]["namespaceSelector"]["matchExpressions"]
    selected = binding(admissionPolicy=restricted, operator={"namespaceSelector": {"team": "a"}})
    assert {"matchLabels": {"team": "a"}} == selected["matchResources"]["namespaceSelector"]
    assert not [made for made in render() if made["kind"].startswith("ValidatingAdmissionPolicy")]


def test_the_policy_for_pod_templates_needs_a_release_that_has_it() -> None:
    values = {"admissionPolicy": {"restrictPodTemplates": True}}
    assert not helm("template", "das", str(CHART), "--kube-version=1.30.0", values=values).returncode
    process = helm("template", "das", str(CHART), "--kube-version=1.29.9", values=values)
    assert "admissionPolicy.restrictPodTemplates needs Kubernetes 1.30" in process.stderr


def paths_of_fields(schema: Any, pattern: str, path: str = "") -> set[str]:
    """Return the paths of the fields with a matching name in the schema of a custom resource."""
    found = set()
    for name, field in schema.get("properties", {}).items():
        field_path = f"{path}.{name}".lstrip(".")
        found |= {field_path} if re.fullmatch(pattern, name) else paths_of_fields(field, pattern, field_path)
    return found


def test_the_policy_checks_all_pod_templates_and_names_of_secrets() -> None:
    policy = (CHART / "files" / "pod-template-policy.yaml").read_text()
    paths, secrets = set(), set()
    for plural in ("rolloutjobs", "rolloutruntimes"):
        assert plural in policy
        crd = yaml.safe_load((ROOT / "crds" / f"{plural}.das.rollout.dev.yaml").read_text())
        for version in crd["spec"]["versions"]:
            schema = {"properties": {"spec": version["schema"]["openAPIV3Schema"]["properties"]["spec"]}}
            paths |= paths_of_fields(schema, "podTemplate")
            secrets |= paths_of_fields(schema, "secretKeyRef|.*Secret(Ref|Name)")
    assert secrets == {
        path.replace("?", "")
        for path in re.findall(r"object\.(spec[.?\w]+Secret(?:Ref|Name)|spec[.?\w]+secretKeyRef)", policy)
    }
    parts = re.findall(r"\['head', .*?\]", policy)
    assert 2 == len(parts)
    for part in parts:
        assert paths == {f"spec.{name}.podTemplate" for name in re.findall(r"\w+", part)}


def test_people_get_access_through_the_aggregated_roles_on_request() -> None:
    roles = {
        manifest["metadata"]["name"]: manifest
        for manifest in render(rbac={"aggregateRoles": True})
        if manifest["kind"] == "ClusterRole"
    }
    view, edit = roles["das-rolloutjobs-view.rl"], roles["das-rolloutjobs-edit.rl"]
    assert "true" == view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"]
    assert "true" == edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"]
    assert {"get", "list", "watch"} == {verb for rule in view["rules"] for verb in rule["verbs"]}
    assert not {"das-rolloutjobs-view.rl", "das-rolloutjobs-edit.rl"} & {
        manifest["metadata"]["name"] for manifest in render()
    }


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged chart."""
    return package_chart(tmp_path_factory.mktemp("chart"))


@pytest.mark.parametrize("packaged", [False, True])
def test_the_chart_installs_the_crds_of_the_repository(packaged: bool, package: Path) -> None:
    chart = package if packaged else CHART
    crds = {
        resource["spec"]["names"]["kind"]: resource
        for resource in render_chart("rl", chart=chart)
        if resource["kind"] == "CustomResourceDefinition"
    }
    assert crd.documents() == crds
    assert {"keep"} == {one["metadata"]["annotations"]["helm.sh/resource-policy"] for one in crds.values()}
    assert "CustomResourceDefinition" not in {
        resource["kind"] for resource in render_chart("rl", chart=chart, crds={"install": False})
    }


def test_a_copy_of_the_chart_without_crds_is_refused(tmp_path: Path) -> None:
    """Tools that copy the chart without its symbolic links must not install it without CRDs silently."""
    chart = shutil.copytree(CHART, tmp_path / "chart", ignore=shutil.ignore_patterns("crds"))
    with pytest.raises(RuntimeError, match=r"files/crds is empty: use the packaged chart, or set crds\.install=false"):
        render_chart("rl", chart=chart)
    assert render_chart("rl", chart=chart, crds={"install": False})


def test_the_chart_contains_no_secret() -> None:
    for values in VALUE_SETS.values():
        assert not [resource for resource in render(**values) if resource["kind"] == "Secret"]


def test_all_references_to_secrets_are_to_existing_ones_or_to_those_that_are_created() -> None:
    def references(**values: Any) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for _, container in containers(render(**values)):
            for variable in container.get("env", ()):
                if "valueFrom" in variable:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    found.setdefault(reference["name"], set()).add(reference["key"])
        return found

    created = admin_secret("rl", "das-redis-admin", "das-redis.rl.svc:6379")
    expected = {"das-redis-admin": set(created["stringData"]), "das-redis-history-service": {"url"}}
    assert expected == references()
    assert {"redis": {"p"}} == references(**VALUE_SETS["own password"])
    expected = {"redis": {"url", "user-key"}, "das-redis-history-service": {"url"}}
    assert expected == references(**VALUE_SETS["external Redis with users"])
    assert {"redis": {"url"}} == references(**VALUE_SETS["external Redis without users"])


def test_only_redis_and_the_process_for_its_users_have_the_admin_secret() -> None:
    external = {"redis": {"adminSecret": {"name": "redis-admin"}, "bundled": False}}
    for values, secret in (({}, "das-redis-admin"), (external, "redis-admin")):
        holders = {
            container["name"]
            for _, container in containers(render(**values))
            for variable in container.get("env", ())
            if variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == secret
        }
        assert {"redis-users"} == holders - {"redis"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"redisUsers": {"enabled": False}}, "redis.bundled needs redisUsers.enabled"),
        (
            {"redis": {"bundled": False, "adminSecret": {"name": "a"}, "ca": {"secret": "a", "configMap": "b"}}},
            "redis.ca",
        ),
        ({"monitoring": {"podMonitor": True, "serviceMonitor": True}}, "every metric would be collected twice"),
        ({"operator": {"namespaces": ["a"], "namespaceSelector": {"a": "b"}}}, "set either operator.namespaces or"),
        (
            {
                "redis": {"bundled": False, "adminSecret": {"name": "a"}},
                "networkPolicies": {"egress": {"enabled": True}},
            },
            "networkPolicies.egress.redis must have a rule",
        ),
    ],
)
def test_values_that_contradict_each_other_are_rejected(values: dict[str, Any], message: str) -> None:
    process = helm("template", "das", str(CHART), values=values)
    assert process.returncode
    assert message in process.stderr


def arguments(name: str, **values: Any) -> list[str]:
    """Return the arguments of a container, or none if the chart does not render it with these values."""
    found: list[list[str]] = [one["args"] for _, one in containers(render(**values)) if one["name"] == name]
    return found[0] if found else []


def test_the_operator_knows_whether_jobs_have_users() -> None:
    def are_announced(**values: Any) -> bool:
        users = arguments("redis-users", **values)
        announced = "--redis-users" in arguments("operator", **values)
        assert announced == bool(users and "--only-managed" not in users)
        return announced

    assert are_announced()
    assert are_announced(**VALUE_SETS["external Redis with users"])
    assert not are_announced(redisUsers={"byDefault": False})
    assert not are_announced(**VALUE_SETS["own password"])
    assert not are_announced(redis={"bundled": False})


def ca_files(container: dict[str, Any]) -> list[str]:
    """Return the files that a container reads the CA of Redis from."""
    options = [argument.partition("=") for argument in container.get("args", ())]
    variables = [variable for variable in container.get("env", ()) if variable["name"] == "SSL_CERT_FILE"]
    return [value for name, _, value in options if name == "--ca-file"] + [variable["value"] for variable in variables]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (VALUE_SETS["external Redis with users"], {"history", "redis-users"}),
        (VALUE_SETS["external Redis without users"], {"history"}),
        # The bundled server has no certificate, but the history service may use another server.
        ({"redis": {"ca": {"secret": "ca"}}, "history": {"redis": {"existingSecret": "histories"}}}, {"history"}),
    ],
)
def test_the_ca_of_an_external_redis_is_mounted_where_it_is_read(values: dict[str, Any], expected: set[str]) -> None:
    readers = set()
    for pod, container in containers(render(**values)):
        for file in ca_files(container):
            readers.add(container["name"])
            (mount,) = [mount for mount in container["volumeMounts"] if file.startswith(f"{mount['mountPath']}/")]
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
            (item,) = (volume.get("secret") or volume["configMap"])["items"]
            assert {"key": values["redis"]["ca"].get("key", "ca.crt"), "path": Path(file).name} == item
    assert expected == readers


def test_settings_of_a_component_reach_its_pods_and_no_others() -> None:
    settings = {**VALUE_SETS["everything"]["operator"], "image": "other:1"}
    del settings["replicas"]
    names = {"operator": "operator", "redis": "redis", "redisUsers": "redis-users", "history": "history"}
    for section in names:
        for resource in render(**{section: settings}):
            if resource["kind"] not in ("Deployment", "StatefulSet"):
                continue
            template = resource["spec"]["template"]
            own = template["spec"]["containers"][0]["name"] == names[section]
            assert own == ("team" in template["metadata"]["labels"])
            assert own == (template["metadata"].get("annotations") == {"note": "x"})
            assert own == (template["spec"].get("priorityClassName") == "system-cluster-critical")
            assert own == (template["spec"].get("topologySpreadConstraints") == settings["topologySpreadConstraints"])
            assert own == any(volume["name"] == "extra" for volume in template["spec"].get("volumes", ()))
            for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
                assert own == any(variable["name"] == "HTTPS_PROXY" for variable in container["env"])
                assert own == any(mount["name"] == "extra" for mount in container["volumeMounts"])
                assert own == (container["image"] == "other:1")


def test_several_replicas_are_spread_over_nodes_and_drained_one_at_a_time() -> None:
    objects = render(history={"replicas": 2})
    for name in ("das-operator", "das-history"):
        deployment = named(objects, "Deployment", name)["spec"]
        (constraint,) = deployment["template"]["spec"]["topologySpreadConstraints"]
        assert deployment["selector"] == constraint["labelSelector"]
        assert "ScheduleAnyway" == constraint["whenUnsatisfiable"]
        budget = named(objects, "PodDisruptionBudget", name)["spec"]
        assert deployment["selector"] == budget["selector"]
        assert 1 == budget["maxUnavailable"]


def test_labels_and_names_can_be_changed() -> None:
    objects = render(commonLabels={"cost-center": "17"}, nameOverride="rollouts")
    for resource in objects:
        if resource["kind"] == "CustomResourceDefinition":
            continue
        assert resource["metadata"]["name"].startswith("das-rollouts-")
        assert "17" == resource["metadata"]["labels"]["cost-center"]
        if resource["kind"] in ("Deployment", "StatefulSet"):
            assert "17" == resource["spec"]["template"]["metadata"]["labels"]["cost-center"]
            assert "cost-center" not in resource["spec"]["selector"]["matchLabels"]
    names = {resource["metadata"]["name"] for resource in render(fullnameOverride="x")}
    assert {"x-operator", "x-redis", "x-redis-users", "x-history"} <= names


def test_a_selector_matches_the_pods_of_one_component_only() -> None:
    pods = {}
    selectors = {}
    for resource in render():
        name = resource["metadata"]["name"]
        if resource["kind"] == "Pod":
            pods[name] = resource["metadata"]["labels"]
        elif resource["kind"] in ("Deployment", "StatefulSet"):
            pods[name] = resource["spec"]["template"]["metadata"]["labels"]
            selectors[f"{resource['kind']} {name}"] = resource["spec"]["selector"]["matchLabels"]
        elif resource["kind"] == "Service":
            selectors[f"Service {name}"] = resource["spec"]["selector"]
    assert len(pods) > 4
    for name, selector in selectors.items():
        assert [name.partition(" ")[2]] == [pod for pod, labels in pods.items() if selector.items() <= labels.items()]


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
    assert {"name": "das-redis-history-service", "key": "url"} == secret_of()
    assert {"name": "histories", "key": "address"} == secret_of(history=own_secret)
    assert {"name": "histories", "key": "address"} == secret_of(history=own_secret, redis={"bundled": False})
    assert secret_of(redis={"bundled": False}) is None
    assert secret_of(history={"enabled": False}) is None
    # There is no user for a service that does not use this server.
    assert "--history-secret=rl/das-redis-history-service" in yaml.safe_dump(render())
    for history in (own_secret, {"enabled": False}):
        assert "--history-secret" not in yaml.safe_dump(render(history=history))


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_each_component_is_monitored_under_its_own_labels(kind: str) -> None:
    objects = render(monitoring={kind[0].lower() + kind[1:]: True})
    for name in ("das-operator", "das-history"):
        deployment = named(objects, "Deployment", name)["spec"]
        pods, service = deployment["template"]["metadata"]["labels"], named(objects, "Service", name)
        selector = deployment["selector"]["matchLabels"]
        assert selector == service["spec"]["selector"]
        assert selector == named(objects, "NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]
        monitored = pods if kind == "PodMonitor" else service["metadata"]["labels"]
        assert named(objects, kind, name)["spec"]["selector"]["matchLabels"].items() <= monitored.items()
    (from_history,) = [
        peer
        for peer in named(objects, "NetworkPolicy", "das-redis")["spec"]["ingress"][0]["from"]
        if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name") == "das-rollout-history"
    ]
    assert selector == from_history["podSelector"]["matchLabels"]


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_the_token_reaches_all_that_serve_or_read_metrics(kind: str) -> None:
    objects = render(
        statusToken={"existingSecret": "status", "key": "t"}, monitoring={kind[0].lower() + kind[1:]: True}
    )
    secret = {"name": "status", "key": "t"}
    holders = {
        container["name"]
        for _, container in containers(objects)
        for variable in container.get("env", ())
        if variable["name"] == "ROLLOUT_STATUS_TOKEN" and variable["valueFrom"] == {"secretKeyRef": secret}
    }
    assert {"operator", "history", "test"} == holders
    monitors = [resource for resource in objects if resource["kind"] == kind]
    assert 3 == len(monitors)
    for monitor in monitors:
        # The Secret is in the namespace of the monitor.
        assert "rl" == monitor["metadata"]["namespace"]
        (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
        assert {"type": "Bearer", "credentials": secret} == endpoint["authorization"]
    assert "authorization" not in yaml.safe_dump(render(monitoring={kind[0].lower() + kind[1:]: True})).split()


def scrape_configuration(monitor: dict[str, Any]) -> dict[str, Any]:
    """Return what the Prometheus operator makes of a monitor, in Prometheus' own terms."""
    (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]

    def rules(name: str) -> list[dict[str, Any]]:
        return [
            {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): value for key, value in rule.items()}
            for rule in endpoint.get(name, [])
        ]

    return {
        "honor_labels": endpoint.get("honorLabels", False),
        "relabel_configs": rules("relabelings"),
        "metric_relabel_configs": rules("metricRelabelings"),
    }


class ForgedMetrics(BaseHTTPRequestHandler):
    """The metrics of a head that reports for another tenant's job and for the operator."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(
            b'rollout_tokens_per_second{namespace="victim",job="victim/math"} 0\n'
            b'rollout_operator_leading{namespace="rl"} 1\n'
        )

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@needs_prometheus
@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_the_metrics_of_a_head_are_those_of_its_own_job(kind: str, tmp_path: Path) -> None:
    monitor = named(render(monitoring={kind[0].lower() + kind[1:]: True}), kind, "das-operator-jobs")
    pod = head_pod(JobContext(parse_job(rollout_job(namespace="tenant")), "uid", {}, "image"))["metadata"]
    discovered = {"__meta_kubernetes_namespace": "tenant"} | {
        f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', name)}": value
        for name, value in pod["labels"].items()
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), ForgedMetrics) as head:
        Thread(target=head.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{head.server_port}"
        try:
            with prometheus_server(tmp_path, {target: discovered}, [], **scrape_configuration(monitor)) as server:
                wait_for(lambda: server.query("rollout_tokens_per_second"))
                (series,) = server.query("rollout_tokens_per_second")
                assert [] == server.query("rollout_operator_leading")
        finally:
            head.shutdown()
    assert {
        "__name__": "rollout_tokens_per_second",
        "namespace": "tenant",
        "job": f"tenant/{pod['labels'][JOB_LABEL]}",
        "instance": target,
    } == series["metric"]


def test_pull_secrets_of_all_charts_reach_the_pods() -> None:
    values = {"image": {"pullSecrets": [{"name": "a"}]}, "global": {"imagePullSecrets": ["b", {"name": "c"}, "a"]}}
    for pod, _ in containers(render(**values)):
        assert [{"name": "a"}, {"name": "b"}, {"name": "c"}] == pod["imagePullSecrets"]
    assert "imagePullSecrets" not in yaml.safe_dump([pod for pod, _ in containers(render())])


def test_a_cluster_that_assigns_user_ids_gets_pods_without_them() -> None:
    users = ("runAsUser", "runAsGroup", "fsGroup")
    for apis, expected in (((), dict.fromkeys(users, 1000)), (("security.openshift.io/v1",), {})):
        made = render_chart("rl", apis=apis, crds={"install": False})
        job = JobContext(parse_job(rollout_job()), "uid", {}, "image", cluster_assigns_user_ids=bool(apis))
        for pod in (*(pod for pod, _ in containers(made)), head_pod(job)["spec"]):
            context = pod["securityContext"]
            assert context["runAsNonRoot"]
            assert expected == {name: context[name] for name in users if name in context}


def argocd_health(job: dict[str, Any]) -> str:
    """Return the health that Argo CD shows for a RolloutJob."""

    def table(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"[{json.dumps(key)}]={table(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "{" + ",".join(map(table, value)) + "}"
        return json.dumps(value).replace("null", "nil")

    script = f"obj = {table(job)}; local health = dofile(arg[1]); assert(health.message); print(health.status)"
    command = ["lua5.4", "-", str(CHART / "files" / "argocd-health.lua")]
    process = subprocess.run(command, input=script, capture_output=True, text=True)
    assert not process.returncode, process.stderr
    return process.stdout.strip()


@pytest.mark.skipif(shutil.which("lua5.4") is None, reason="Lua is not installed (Debian: apt-get install lua5.4)")
def test_argocd_shows_the_health_of_a_job() -> None:
    def health(cluster: SimulatedCluster) -> str:
        assert cluster.job is not None
        return argocd_health(cluster.job)

    assert "Progressing" == health(SimulatedCluster(spec()))
    cluster = SimulatedCluster(spec())
    cluster.reconcile()
    assert "Progressing" == health(cluster)
    cluster = running_job()
    assert "Healthy" == health(cluster)
    cluster.change(lifecycle={"suspend": True})
    assert "Progressing" == health(cluster)
    for _ in range(3):
        cluster.reconcile()
        cluster.finish_deletions()
    cluster.reconcile()
    assert "Suspended" == health(cluster)
    invalid = SimulatedCluster(spec(workers={"replicas": 7}))
    invalid.reconcile()
    assert "Degraded" == health(invalid)


def test_monitors_select_the_objects_of_jobs() -> None:
    context = JobContext(parse_job(rollout_job(namespace="rl")), "uid", {}, "image")
    (service,) = [made for made in owned_objects(context, ClusterInfo(), workers=1) if made["kind"] == "Service"]
    pod = head_pod(context)
    for kind, monitored, ports in (
        ("PodMonitor", pod, pod["spec"]["containers"][0]["ports"]),
        ("ServiceMonitor", service, service["spec"]["ports"]),
    ):
        monitor = named(render(monitoring={kind[0].lower() + kind[1:]: True}), kind, "das-operator-jobs")["spec"]
        assert monitor["selector"]["matchLabels"].items() <= monitored["metadata"]["labels"].items()
        (endpoint,) = monitor.get("podMetricsEndpoints") or monitor["endpoints"]
        assert endpoint["port"] in {port["name"] for port in ports}


LIMITED = {"enabled": True}


def policy(name: str, **values: Any) -> dict[str, Any]:
    spec: dict[str, Any] = named(render(**values), "NetworkPolicy", name)["spec"]
    return spec


def destinations(rules: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """Return what egress rules permit: the name of a selected component, a namespace, a CIDR or "any", and the port."""
    found = set()
    for rule in rules:
        for peer in rule.get("to", [{}]):
            pods = peer.get("podSelector", {}).get("matchLabels", {})
            of_namespace = peer.get("namespaceSelector", {}).get("matchLabels", {})
            name = pods.get("app.kubernetes.io/name") or pods.get("app.kubernetes.io/component")
            name = name or peer.get("ipBlock", {}).get("cidr") or of_namespace.get("kubernetes.io/metadata.name", "any")
            found |= {(name, port["port"]) for port in rule["ports"]}
    return found


def test_egress_is_not_limited_by_default() -> None:
    policies = [made for made in render() if made["kind"] == "NetworkPolicy"]
    assert ["das-redis"] == [made["metadata"]["name"] for made in policies if "Egress" in made["spec"]["policyTypes"]]
    assert not [argument for argument in arguments("operator") if argument.startswith("--egress-rules")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("das-operator", {("kube-system", 53), ("any", 443), ("any", 6443), ("head", 8080)}),
        ("das-redis-users", {("kube-system", 53), ("any", 443), ("any", 6443), ("das-rollout-redis", 6379)}),
        ("das-history", {("kube-system", 53), ("das-rollout-redis", 6379)}),
        ("das-redis", set()),
    ],
)
def test_limited_egress_permits_what_each_component_needs(name: str, expected: set[tuple[str, int]]) -> None:
    limited = policy(name, networkPolicies={"egress": LIMITED})
    assert ["Ingress", "Egress"] == limited["policyTypes"]
    assert expected == destinations(limited["egress"])
    selected = limited["podSelector"]["matchLabels"]
    pods = [made["spec"]["template"]["metadata"]["labels"] for made in render() if "template" in made.get("spec", {})]
    assert 1 == len([labels for labels in pods if selected.items() <= labels.items()])


def test_the_rules_of_the_values_reach_the_components_that_they_are_for() -> None:
    def rule(port: int) -> list[dict[str, Any]]:
        return [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": port}]}]

    rules = {"dns": rule(1), "apiServer": rule(2), "redis": rule(3), "jobs": rule(4)}
    values = {
        "redis": {"bundled": False, "adminSecret": {"name": "redis"}},
        "networkPolicies": {"egress": {**LIMITED, **rules}},
    }
    ports = {
        name: {port for destination, port in destinations(policy(name, **values)["egress"]) if destination != "head"}
        for name in ("das-operator", "das-redis-users", "das-history")
    }
    assert {"das-operator": {1, 2}, "das-redis-users": {1, 2, 3}, "das-history": {1, 3}} == ports
    assert [*rule(1), *rule(3), *rule(4)] == [*egress_of_jobs(**values)]


def egress_of_jobs(**values: Any) -> tuple[dict[str, Any], ...]:
    """Return the rules that the operator adds to the NetworkPolicies of jobs."""
    rules: tuple[dict[str, Any], ...] = parse_arguments(arguments("operator", **values)).egress_rules
    return rules


def test_pods_of_jobs_reach_the_name_service_and_the_bundled_redis() -> None:
    rules = egress_of_jobs(networkPolicies={"egress": LIMITED})
    assert {("kube-system", 53), ("das-rollout-redis", 6379)} == destinations([*rules])
    # The limits hold for jobs even if the chart's own pods have no policies.
    assert rules == egress_of_jobs(networkPolicies={"enabled": False, "egress": LIMITED})
    without_redis = {"redis": {"bundled": False}, "networkPolicies": {"egress": LIMITED}}
    assert {("kube-system", 53)} == destinations([*egress_of_jobs(**without_redis)])


class BundledRedis:
    """The bundled server, started as in its pod."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        ((_, self._container),) = [found for found in containers(render()) if found[1]["name"] == "redis"]
        self._port = free_port()

    @contextmanager
    def running(self, password: str) -> Iterator[redis.Redis]:
        """A client of the administrator while the server runs with a password."""
        (script,) = self._container["args"]
        assert "/data" in script
        script = script.replace("/data", str(self._directory)).replace(
            "--appendonly", f"--port {self._port} --appendonly"
        )
        command = [*self._container["command"], script]
        environment = {**os.environ, "REDIS_PASSWORD": password}
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
            try:
                with self.client(f":{password}") as client:
                    wait_for(client.ping, 20, ignored=redis.ConnectionError)
                    yield client
            finally:
                server.terminate()

    def client(self, login: str, host: str = "127.0.0.1") -> redis.Redis:
        """Return a client with a user name and password."""
        return redis.Redis.from_url(f"redis://{login}@{host}:{self._port}", retry=Retry(NoBackoff(), 0))


def test_the_bundled_redis_evicts_nothing_and_keeps_its_users_and_functions_when_it_restarts(tmp_path: Path) -> None:
    server = BundledRedis(tmp_path)
    with server.running("first") as admin:
        assert "noeviction" == admin.config_get("maxmemory-policy")["maxmemory-policy"]
        assert admin.set("history:x", 1)
        admin.acl_setuser("job", enabled=True, passwords=["+word"], keys=["history:*"], commands=["+get"])
        admin.execute_command("ACL", "SAVE")
        load(admin)
        with pytest.raises(redis.AuthenticationError), server.client("") as stranger:
            stranger.get("history:x")
    with server.running("second") as admin, server.client("job:word") as job, server.client(":first") as former_admin:
        assert b"1" == admin.get("history:x") == job.get("history:x")
        assert len(libraries()) == len(admin.function_list())
        with server.client(":second", "[::1]") as on_ipv6:
            assert on_ipv6.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            job.set("history:x", 2)
        with pytest.raises(redis.AuthenticationError):
            former_admin.get("history:x")
    assert not (tmp_path / "users.acl").stat().st_mode & 0o077


@pytest.mark.parametrize(
    "values",
    [
        {"operator": {"replicas": 0}},
        {"operator": {"replica": 1}},
        {"operator": {"logLevel": "loud"}},
        {"image": {"worker": ""}},
        {"redis": {"maxMemory": "much"}},
        {"redis": {"users": True}},
        {"redis": {"adminSecret": "redis"}},
        {"redisUsers": {"extraEnv": [{"value": "x"}]}},
        {"history": {"podLabels": {"a": 1}}},
        {"fullnameOverride": "Das"},
        {"history": {"retention": "a month"}},
        {"history": {"redis": {"url": "redis://h"}}},
        {"admissionPolicy": {"restrict": True}},
        {"networkPolicies": True},
        {"statusToken": {"token": "x"}},
        {"networkPolicies": {"egress": {"jobs": [{"from": []}]}}},
        {"typo": 1},
    ],
)
def test_invalid_values_are_rejected(values: dict[str, Any]) -> None:
    process = helm("template", "das", str(CHART), values=values)
    assert process.returncode
    assert next(iter(values)) in process.stderr


def paths(values: Any, path: str = "") -> list[str]:
    """Return the paths of all values, those of sections included."""
    if not isinstance(values, dict) or path.endswith(".resources"):
        return [path]
    return [path] * bool(path) + [
        found for name, value in values.items() for found in paths(value, f"{path}.{name}".lstrip("."))
    ]


def with_nulls(names: Iterable[str], **values: Any) -> dict[str, Any]:
    """Return a copy of values with null at these paths."""
    values = copy.deepcopy(values)
    for name in names:
        *sections, last = name.split(".")
        target = values
        for section in sections:
            target = target.setdefault(section, {})
            if target is None:
                break
        else:
            target[last] = None
    return values


def test_a_null_is_an_empty_value_or_an_error_that_names_it() -> None:
    every_path = paths(yaml.safe_load((CHART / "values.yaml").read_text()))
    required: list[str] = []
    for depth in range(4):
        nulls = [path for path in every_path if path.count(".") == depth]
        process = helm("template", "das", str(CHART), values=with_nulls(nulls))
        errors = re.findall(r"^- (\S+): (\w+) is required$", process.stderr, re.M)
        required += [name if section == "(root)" else f"{section}.{name}" for section, name in errors]
    assert {"monitoring", "redis.ca", "history.redis", "redis.adminSecret.keys"} <= set(required)
    everything = {
        "networkPolicies": {"egress": {"enabled": True}},
        "monitoring": {"podMonitor": True, "alerts": True, "dashboard": True},
        "rbac": {"aggregateRoles": True},
        "admissionPolicy": {"restrictPodTemplates": True},
    }
    assert render(**with_nulls([path for path in every_path if path not in required], **everything))
    sections = {path.rpartition(".")[0] for path in required} - {""}
    assert sections <= set(required), "a section without which the chart cannot be rendered must be required"


def leaves(values: Any, path: str = "") -> set[str]:
    if isinstance(values, dict) and values and not path.endswith(".resources"):
        return {leaf for name, value in values.items() for leaf in leaves(value, f"{path}.{name}".lstrip("."))}
    return {path}


def test_the_readme_lists_every_value() -> None:
    table = (CHART / "README.md").read_text().partition("\n## Values\n")[2].partition("\n## ")[0]
    named = set()
    for cell in re.findall(r"^\| ([^|]+) \|", table, flags=re.M):
        names = re.findall(r"`([^`]+)`", cell)
        section = names[0].rpartition(".")[0] if names else ""
        named |= {section + name if name.startswith(".") else name for name in names}
    assert leaves(yaml.safe_load((CHART / "values.yaml").read_text())) == named


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("operator", "rollout_operator"),
        ("redis-users", "rollout_operator.redis_users"),
        ("admin-secret", "rollout_operator.cluster.admin_secret"),
    ],
)
def test_a_process_of_the_operator_accepts_the_arguments_of_the_chart(name: str, module: str) -> None:
    process = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    accepted = set(re.findall(r"--[a-z-]+", process.stdout))
    used = set()
    for values in (*VALUE_SETS.values(), {"operator": {"namespaces": ["a"]}}):
        for _, container in containers(render(**values)):
            if container["name"] == name:
                used |= {argument.partition("=")[0] for argument in container["args"] if argument.startswith("--")}
    assert used
    assert used <= accepted


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
    counters = dict.fromkeys(ENGINE_METRICS, 0.0)
    labeled_counters = {name: {"label": 0} for name in LABELED_ENGINE_METRICS}
    report = EngineReport("engine-0", counters=counters, labeled_counters=labeled_counters)
    board = job_status({"engine-0": report})
    return exported_names(StatusMetrics(board))


def all_metrics() -> set[str]:
    # These are exported only while their value is known.
    estimates = {"rollout_saved_ratio", "rollout_remaining_seconds", "rollout_tail_seconds"}
    return history_service_metrics() | operator_metrics() | job_metrics() | estimates


def metrics_in(expressions: Iterable[str]) -> set[str]:
    return {name for expression in expressions for name in re.findall(r"\brollout_[a-z_]+", expression)}


def rendered_dashboards() -> dict[str, Any]:
    """Return the dashboards of the rendered ConfigMap by title."""
    (configmap,) = [
        found
        for found in render(monitoring={"dashboard": True})
        if found["kind"] == "ConfigMap" and found["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    parsed = map(json.loads, configmap["data"].values())
    return {dashboard["title"]: dashboard for dashboard in parsed}


def test_the_dashboards_query_only_existing_metrics() -> None:
    found = rendered_dashboards()
    assert {dashboard["title"]: dashboard for dashboard in dashboards().values()} == found
    for dashboard in found.values():
        queried = metrics_in(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
        assert queried
        assert set() == {re.sub("_bucket$", "", name) for name in queried} - all_metrics()


def alerts() -> list[dict[str, Any]]:
    (rule,) = [found for found in render(monitoring={"alerts": True}) if found["kind"] == "PrometheusRule"]
    (group,) = rule["spec"]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_each_alert_uses_existing_metrics_and_has_a_section_in_the_runbook() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert ["Conditions", "Events"] == headings[-2:]
    assert headings[:-2] == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        metrics = metrics_in([alert["expr"]])
        assert metrics
        assert set() == metrics - all_metrics()
        assert f"docs/runbook.md#{alert['alert'].lower()}" == alert["annotations"]["runbook_url"]
        assert {"summary", "description", "runbook_url"} == set(alert["annotations"])


def test_the_alert_about_the_operator_is_about_that_of_the_release() -> None:
    (rule,) = (alert for alert in alerts() if alert["alert"] == "RolloutOperatorDown")
    assert 'absent(rollout_operator_leading{namespace="rl"} == 1)' == rule["expr"]
    assert "rl" == rule["labels"]["namespace"]


def test_a_failed_job_is_counted_under_the_state_that_its_alert_looks_for() -> None:
    states = {state for alert in alerts() for state in re.findall(r'state="(\w+)"', alert["expr"])}
    assert states
    assert states <= set(State)
