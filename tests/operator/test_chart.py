"""The Helm chart: what it renders, what it refuses, and that its README and dashboard say the truth."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "das-rollout"
HELM = Path(sys.executable).with_name("helm")


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), *arguments, "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values or {}), capture_output=True, text=True)


def render(**values: Any) -> list[dict[str, Any]]:
    done = helm("template", "das", str(CHART), "--namespace", "rl", values=values)
    assert not done.returncode, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def containers(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    specs = [
        one["spec"] if one["kind"] == "Pod" else one["spec"]["template"]["spec"]
        for one in objects
        if one["kind"] in ("Pod", "Deployment", "StatefulSet")
    ]
    return [(spec, container) for spec in specs for container in spec["containers"]]


def test_all_pods_pass_the_restricted_profile() -> None:
    found = containers(render(redis={"users": True}))
    assert 4 == len(found)
    for pod, container in found:
        assert pod["securityContext"]["runAsNonRoot"]
        assert "RuntimeDefault" == pod["securityContext"]["seccompProfile"]["type"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert {"drop": ["ALL"]} == container["securityContext"]["capabilities"]


def test_with_namespaces_there_are_no_rights_beyond_them() -> None:
    objects = render(operator={"namespaces": ["a", "b"]}, redis={"users": True})
    kinds = [(one["kind"], one["metadata"].get("namespace")) for one in objects]
    assert not {"ClusterRole", "ClusterRoleBinding"} & {kind for kind, _ in kinds}
    assert {"a", "b", "rl"} == {namespace for kind, namespace in kinds if kind == "Role"}


def test_the_crd_stays_when_the_release_goes_and_may_be_left_out() -> None:
    (crd,) = [one for one in render() if one["kind"] == "CustomResourceDefinition"]
    assert "keep" == crd["metadata"]["annotations"]["helm.sh/resource-policy"]
    assert not [one for one in render(crds={"install": False}) if one["kind"] == "CustomResourceDefinition"]


def test_the_bundled_redis_evicts_nothing_and_its_password_is_in_secrets_alone() -> None:
    objects = render(redis={"namespaces": ["team-a", "team-b"]})
    secrets = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one for one in objects if one["kind"] == "Secret"
    }
    assert {("rl", "das-redis-admin"), ("team-a", "rollout-redis"), ("team-b", "rollout-redis")} == set(secrets)
    password = secrets["rl", "das-redis-admin"]["stringData"]["password"]
    assert password in secrets["team-a", "rollout-redis"]["stringData"]["url"]
    rest = yaml.safe_dump([one for one in objects if one["kind"] != "Secret"])
    assert password not in rest
    assert "noeviction" in rest
    assert not [one for one in render(redis={"bundled": False}) if one["kind"] in ("Secret", "StatefulSet")]


def test_only_who_makes_redis_users_has_the_admins_secret() -> None:
    named = {"adminSecret": "redis-admin", "bundled": False, "users": True}
    for values, secret in (({"users": True}, "das-redis-admin"), (named, "redis-admin")):
        holders = {
            container["name"]
            for _, container in containers(render(redis=values))
            for one in container.get("env", ())
            if one.get("valueFrom", {}).get("secretKeyRef", {}).get("name") == secret
        }
        assert {"redis-users"} == holders - {"redis"}
    done = helm("template", "das", str(CHART), values={"redis": {"bundled": False, "users": True}})
    assert "redis.users needs redis.adminSecret" in done.stderr


@pytest.mark.parametrize(
    "values",
    [
        {"operator": {"replicas": 0}},
        {"operator": {"replica": 1}},
        {"operator": {"logLevel": "loud"}},
        {"image": {"worker": ""}},
        {"redis": {"maxMemory": "much"}},
        {"typo": 1},
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    done = helm("template", "das", str(CHART), values=values)
    assert done.returncode
    assert next(iter(values)) in done.stderr


def leaves(values: Any, path: str = "") -> set[str]:
    if isinstance(values, dict) and values and path not in ("operator.resources", "redis.resources"):
        return {leaf for name, one in values.items() for leaf in leaves(one, f"{path}.{name}".lstrip("."))}
    return {path}


def test_the_readme_has_every_value() -> None:
    table = (CHART / "README.md").read_text().partition("## Values")[2]
    named = set()
    for cell in re.findall(r"^\| ([^|]+) \|", table, flags=re.M):
        names = re.findall(r"`([^`]+)`", cell)
        section = names[0].rpartition(".")[0] if names else ""
        named |= {section + name if name.startswith(".") else name for name in names}
    assert leaves(yaml.safe_load((CHART / "values.yaml").read_text())) == named


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\brollout_[a-z_]+", target["expr"])
    }
    sources = "".join(
        path.read_text()
        for path in (ROOT / "docs" / "cluster.md", ROOT / "operator" / "rollout_operator" / "service.py")
    )
    for name in asked:
        bare = name.removeprefix("rollout_").removeprefix("engine_").removeprefix("operator_").removesuffix("_total")
        assert bare in sources, name
