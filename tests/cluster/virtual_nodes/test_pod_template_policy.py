"""The chart's ValidatingAdmissionPolicy: it refuses pod templates that ask for privileges, and no others."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiException
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.pods import cleanup_pod, head_pod, prefetch_pod, worker_pod
from rollout_operator.objects.strategic_merge import PatchError

from rollout_api import parse_job
from rollout_api.manifest.pod_spec import RUNTIME_KIND
from rollout_api.manifest.rollout_job import API_VERSION, KIND
from tests.support.cluster.chart import CHART, render_chart
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs

pytestmark = pytest.mark.current_cluster
EXAMPLES = Path(__file__).parents[3] / "examples"
OWN_CONTAINERS = {"head": "head", "workers": "worker", "server": "server"}
"""Section of the manifest → name of the container that the operator creates."""
TOKEN = {"serviceAccountToken": {"path": "token"}}
FURTHER = {"name": "further", "image": "x", "securityContext": {"allowPrivilegeEscalation": False}}
"""A further container that is permitted."""

REFUSED_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"hostNetwork": True}, "remove hostNetwork"),
    ({"hostPID": True, "hostIPC": True}, "remove hostIPC, hostPID"),
    ({"hostNetwork": "yes"}, "remove hostNetwork"),
    ({"serviceAccountName": "admin"}, "remove serviceAccountName"),
    ({"serviceAccount": "admin"}, "remove serviceAccount,"),
    ({"serviceAccountName": None}, "Remove spec.{section}.podTemplate.spec.serviceAccountName"),
    ({"automountServiceAccountToken": True}, "automountServiceAccountToken: remove it"),
    ({"automountServiceAccountToken": None}, "Remove spec.{section}.podTemplate.spec.automountServiceAccountToken"),
    ({"securityContext": {"runAsUser": 0}}, "root is not permitted"),
    ({"securityContext": {"runAsNonRoot": False}}, "root is not permitted"),
    (
        {"securityContext": {"runAsNonRoot": None}},
        "Remove spec.{section}.podTemplate.spec.securityContext.runAsNonRoot",
    ),
    ({"securityContext": {"$patch": "replace"}}, "Remove spec.{section}.podTemplate.spec.securityContext.$patch"),
    ({"securityContext": None}, "Remove spec.{section}.podTemplate.spec.securityContext"),
    ({"$patch": "replace", "containers": []}, "Remove spec.{section}.podTemplate.spec.$patch"),
    ({"containers": None}, "Remove spec.{section}.podTemplate.spec.containers"),
    ({"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}, "hostPath for root"),
    ({"volumes": [{"name": "tmp", "$patch": "replace", "hostPath": {"path": "/"}}]}, "hostPath for tmp"),
    ({"volumes": [{"name": "token", "projected": {"sources": [{"configMap": {"name": "x"}}, TOKEN]}}]}, "no token"),
    ({"containers": "none"}, "expected iterable type"),
    ({"containers": [{"image": "x"}]}, "no such key: name"),
    (
        {"initContainers": [{"name": "further"}]},
        "initContainers[further].securityContext.allowPrivilegeEscalation: set",
    ),
    ({"initContainers": [{**FURTHER, "securityContext": None}]}, "initContainers[further].securityContext"),
]
REFUSED_CONTAINERS: list[tuple[dict[str, Any], str]] = [
    ({"securityContext": {"privileged": True}}, "privileged: remove it"),
    ({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}, "capabilities.add: remove it"),
    ({"securityContext": {"capabilities": {"drop": []}}}, "capabilities.drop: set it to [ALL]"),
    ({"securityContext": {"capabilities": {"drop": None}}}, "capabilities.drop"),
    ({"securityContext": {"capabilities": {"$patch": "replace"}}}, "capabilities.$patch"),
    ({"securityContext": {"capabilities": None}}, "securityContext.capabilities"),
    ({"securityContext": {"allowPrivilegeEscalation": True}}, "allowPrivilegeEscalation: set it to false"),
    ({"securityContext": {"allowPrivilegeEscalation": None}}, "securityContext.allowPrivilegeEscalation"),
    ({"securityContext": {"runAsUser": 0}}, "root is not permitted"),
    ({"securityContext": {"runAsNonRoot": False}}, "root is not permitted"),
    ({"securityContext": {"$patch": "replace"}}, "securityContext.$patch"),
    ({"securityContext": None}, "].securityContext"),
    ({"$patch": "delete"}, "].$patch"),
    ({"$patch": "replace", "image": "x"}, "].$patch"),
    ({"ports": [{"containerPort": 8080, "hostPort": 80}]}, "remove hostPort"),
]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"metadata": {"annotations": {"note": "x"}}},
    {"spec": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"pool": "a"}, "affinity": None}},
    {"spec": {"securityContext": {"supplementalGroups": [44], "runAsUser": 2000, "runAsNonRoot": True}}},
    {"spec": {"hostNetwork": False, "hostPID": None, "automountServiceAccountToken": False}},
    {
        "spec": {
            "volumes": [
                {"name": "ca", "configMap": {"name": "ca"}},
                {"name": "both", "projected": {"sources": [{"secret": {"name": "x"}}, {"configMap": {"name": "ca"}}]}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "tmp", "$patch": "replace", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
            "containers": [
                {
                    "name": "OWN",
                    "env": [{"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}, {"name": "USER", "$patch": "delete"}],
                    "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                    "readinessProbe": {"$patch": "replace", "tcpSocket": {"port": "http"}},
                    "ports": [{"containerPort": 9, "hostPort": 0}],
                    "securityContext": {"runAsUser": 2000, "privileged": False, "capabilities": {"drop": ["ALL"]}},
                },
                FURTHER,
            ],
            "initContainers": [FURTHER],
        }
    },
]


def named(template: dict[str, Any], section: str) -> dict[str, Any]:
    """Return a template with the name of the operator's container in a section."""
    result: dict[str, Any] = json.loads(json.dumps(template).replace('"OWN"', f'"{OWN_CONTAINERS[section]}"'))
    return result


def job(jobs: Jobs, name: str, template: dict[str, Any], *sections: str) -> dict[str, Any]:
    """Return a job with a template in some sections, in which fields may be None."""
    manifest = copy.deepcopy(jobs.manifest(name))
    for section in sections:
        manifest["spec"].setdefault(section, {})["podTemplate"] = named(template, section)
    return manifest


def refused_templates() -> list[tuple[dict[str, Any], str]]:
    found = [({"spec": spec}, message) for spec, message in REFUSED_SPECS]
    for container, message in REFUSED_CONTAINERS:
        found.append(({"spec": {"containers": [{"name": "OWN", **container}]}}, message))
        found.append(({"spec": {"containers": [FURTHER, {**FURTHER, **container}]}}, message))
        found.append(({"spec": {"initContainers": [{**FURTHER, **container}]}}, message))
    return [*found, ({"spec": None}, "podTemplate.spec"), ({"$patch": "replace", "spec": {}}, "podTemplate.$patch")]


def policy_objects(**values: Any) -> list[dict[str, Any]]:
    objects = render_chart("rl", admissionPolicy={"restrictPodTemplates": True, **values})
    return [made for made in objects if made["kind"].startswith("ValidatingAdmissionPolicy")]


def create(cluster: ControlPlane, manifest: dict[str, Any]) -> str:
    """Create a job without storing it, and return why the API server refuses it, or an empty string."""
    process = cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    return process.stderr


@pytest.fixture(scope="module")
def restricted(cluster: ControlPlane) -> Iterator[Jobs]:
    """A namespace with the policy, without an operator, and with a job that is older and that it would refuse."""
    jobs = Jobs(cluster, "restricted")
    # Kubernetes itself sets this label, by which the policy is limited to the namespaces of an operator.
    label = f"kubernetes.io/metadata.name={jobs.namespace}"
    cluster.kubectl("label", "--overwrite", "namespace", jobs.namespace, label)
    jobs.create("older", head={"podTemplate": {"spec": {"hostNetwork": True}}})
    objects = render_chart(
        "rl", admissionPolicy={"restrictPodTemplates": True}, operator={"namespaces": [jobs.namespace]}
    )
    policy = [made for made in objects if made["kind"].startswith("ValidatingAdmissionPolicy")]
    assert 2 == len(policy)
    cluster.apply(*policy)
    bad = jobs.manifest("bad", head={"podTemplate": {"spec": {"hostNetwork": True}}})
    jobs.wait(lambda: create(cluster, bad))
    yield jobs
    for made in policy:
        cluster.kubectl("delete", made["kind"], made["metadata"]["name"])
    jobs.close()


@pytest.mark.parametrize("section", OWN_CONTAINERS)
def test_templates_that_ask_for_privileges_are_refused(restricted: Jobs, section: str) -> None:
    for number, (template, message) in enumerate(refused_templates()):
        refusal = restricted.rejection(job(restricted, f"refused-{number}", template, section))
        assert message.format(section=section) in refusal, template
        assert f"spec.{section}.podTemplate" in refusal or "expression" in refusal


@pytest.mark.parametrize("section", OWN_CONTAINERS)
def test_other_templates_are_accepted(restricted: Jobs, section: str) -> None:
    for number, template in enumerate(ACCEPTED):
        assert "" == restricted.rejection(job(restricted, f"{section}-{number}", template, section))


def test_runtimes_of_a_namespace_are_restricted_like_jobs(restricted: Jobs) -> None:
    runtime: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": RUNTIME_KIND,
        "metadata": {"name": "own", "namespace": restricted.namespace},
        "spec": {"head": {"podTemplate": named(ACCEPTED[-1], "head")}},
    }
    assert "" == create(restricted.cluster, runtime)
    runtime["spec"] = {"workers": {"podTemplate": {"spec": {"hostNetwork": True}}}}
    assert "spec.workers.podTemplate.spec: remove hostNetwork" in create(restricted.cluster, runtime)


def test_the_examples_are_accepted(restricted: Jobs) -> None:
    examples = [made for file in EXAMPLES.glob("**/*.yaml") for made in yaml.safe_load_all(file.read_text())]
    manifests = [made for made in examples if made["kind"] == KIND]
    assert manifests
    for manifest in manifests:
        manifest["metadata"]["namespace"] = restricted.namespace
        assert "" == restricted.rejection(manifest)


def test_all_violations_are_reported_at_once(restricted: Jobs) -> None:
    refusal = restricted.rejection(
        restricted.manifest(
            "several",
            head={"podTemplate": {"spec": {"hostPID": True, "serviceAccountName": "admin"}}},
            workers={"podTemplate": {"spec": {"containers": [{"name": "worker", "ports": [{"hostPort": 1}]}]}}},
        )
    )
    for part in ("hostPID", "serviceAccountName", "spec.workers.podTemplate.spec.containers[worker].ports"):
        assert part in refusal


def test_a_job_that_is_older_than_the_policy_can_be_scaled_and_deleted(restricted: Jobs) -> None:
    restricted.patch("older", workers={"replicas": 3}, lifecycle={"suspend": True})
    restricted.cluster.kubectl(
        "patch", "-n", restricted.namespace, "rj/older", "--type=merge", "-p", '{"metadata": {"finalizers": ["a.b/c"]}}'
    )
    with pytest.raises(ApiException, match="remove hostIPC, hostNetwork"):
        restricted.patch("older", head={"podTemplate": {"spec": {"hostIPC": True}}})
    with pytest.raises(ApiException, match="remove hostNetwork"):
        restricted.patch("older", workers={"podTemplate": {"metadata": {}}})
    restricted.patch("older", head={"podTemplate": {"spec": {"hostNetwork": False}}})


def test_the_policy_can_be_applied_without_the_chart(restricted: Jobs) -> None:
    file = CHART / "files" / "pod-template-policy.yaml"
    restricted.cluster.kubectl("apply", "--dry-run=server", "-f", str(file))
    policy, binding = yaml.safe_load_all(file.read_text())
    assert policy["metadata"]["name"] == binding["spec"]["policyName"]
    assert policy["spec"] == policy_objects()[0]["spec"]


def privileges(pod: dict[str, Any]) -> list[str]:
    """Return what a pod may that a pod of the operator without a template may not."""
    spec = pod["spec"]
    security = spec.get("securityContext") or {}
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    if spec.get("serviceAccountName") != "math-rollout" or spec.get("serviceAccount"):
        found.append("service account")
    if spec.get("automountServiceAccountToken") is not False:
        found.append("token")
    for volume in spec.get("volumes", ()):
        sources = volume.get("projected", {}).get("sources", ())
        found += ["volume"] * ("hostPath" in volume or any("serviceAccountToken" in source for source in sources))
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        own = container.get("securityContext") or {}
        if (
            not own.get("runAsNonRoot", security.get("runAsNonRoot"))
            or own.get("runAsUser", security.get("runAsUser")) == 0
        ):
            found.append("root")
        if (
            own.get("privileged")
            or own.get("allowPrivilegeEscalation") is not False
            or own.get("capabilities", {}).get("add")
        ):
            found.append("security context")
        found += ["host port" for port in container.get("ports", ()) if port.get("hostPort")]
    return found


def test_no_combination_of_fragments_gets_around_the_policy(restricted: Jobs) -> None:
    """A random template is refused, or the pods that the operator creates from it have no privileges."""
    choice = random.Random(1)
    templates = [template for template, _ in refused_templates()] + ACCEPTED * 16
    specs = [template["spec"] for template in templates if template.get("spec")]
    outcomes: Counter[tuple[bool, bool]] = Counter()
    for number in range(150):
        spec: dict[str, Any] = {}
        for field, value in (item for part in choice.sample(specs, 2) for item in part.items()):
            are_lists = isinstance(spec.get(field), list) and isinstance(value, list)
            spec[field] = [*spec[field], *value] if are_lists else value
        manifest = job(restricted, f"random-{number}", {"spec": spec}, *OWN_CONTAINERS)
        is_refused = bool(restricted.rejection(manifest))
        manifest["metadata"]["name"] = "math"
        context = JobContext(parse_job(manifest), "uid", {}, "image")
        try:
            pods = [
                head_pod(context),
                worker_pod(context, 0, replacement=False),
                prefetch_pod(context),
                cleanup_pod(context, delete_messages=True, reason=""),
            ]
            has_privileges = any(privileges(pod) for pod in pods)
        except PatchError:
            continue
        assert is_refused or not has_privileges, spec
        outcomes[is_refused, has_privileges] += 1
    assert min(outcomes[True, True], outcomes[False, False]) > 10, outcomes
