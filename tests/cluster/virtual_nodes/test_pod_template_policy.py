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
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
PERMITTED = "judge"
SECRETS = [PERMITTED, "agents-tokens"]
"""Secrets that jobs may use; an example uses the second."""


def secret(name: Any) -> dict[str, Any]:
    """Return the value of an environment variable from a Secret."""
    return {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}}}


REFUSED_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"serviceAccountName": "admin"}, "remove serviceAccountName"),
    ({"serviceAccount": "admin"}, "remove serviceAccountName"),
    ({"serviceAccountName": None}, "remove serviceAccountName"),
    ({"automountServiceAccountToken": True}, "the pods need no token"),
    ({"automountServiceAccountToken": None}, "the pods need no token"),
    ({"volumes": [{"name": "token", "projected": {"sources": [{"configMap": {"name": "x"}}, TOKEN]}}]}, "no token"),
    ({"$patch": "replace", "containers": []}, "remove $patch"),
    ({"nodeName": "node-1"}, "nodeName: use nodeSelector"),
    ({"priorityClassName": "system-node-critical"}, "priorities of the system"),
    ({"tolerations": [{"key": "a", "operator": "Exists"}, {"operator": "Exists"}]}, "must name the key"),
    ({"tolerations": [{"key": "", "operator": "Exists", "effect": "NoExecute"}]}, "must name the key"),
    ({"tolerations": [{"key": None, "operator": "Exists"}]}, "must name the key"),
    ({"volumes": [{"name": "disk", "csi": {"driver": "secrets-store.csi.k8s.io"}}]}, "instead of csi for disk"),
    ({"volumes": [{"name": "x", "secret": {"secretName": "admin"}}]}, "used by the volume x"),
    ({"volumes": [{"name": "x", "secret": {}}]}, "used by the volume x"),
    ({"volumes": [{"name": "x", "projected": {"sources": [{"secret": {"name": "admin"}}]}}]}, "used by the volume x"),
    ({"containers": "none"}, "no such overload"),
    ({"tolerations": "all"}, "no such overload"),
]
REFUSED_CONTAINERS: list[tuple[dict[str, Any], str]] = [
    ({"env": [secret(PERMITTED), secret("admin")]}, "used by the environment of the container"),
    (
        {"env": [{"name": "ROLLOUT_REDIS_URL", "valueFrom": {"secretKeyRef": {"key": "admin"}}}]},
        "admissionPolicy.secrets of the chart): judge",
    ),
    (
        {"envFrom": [{"configMapRef": {"name": "x"}}, {"secretRef": {"name": "admin"}}]},
        "used by the environment of the container",
    ),
]
REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": {"id": "m", "tokenSecretRef": {"name": "admin", "key": "key"}}}, "the Secret admin is not permitted"),
    ({"redis": {"urlFrom": {"secretKeyRef": {"name": "admin", "key": "key"}}}}, "the Secret admin is not permitted"),
    (
        {"history": {"redis": {"urlFrom": {"secretKeyRef": {"name": "admin", "key": "key"}}}}},
        "the Secret admin is not permitted",
    ),
    ({"server": {"tokensSecretName": "admin"}}, "the Secret admin is not permitted"),
    ({"server": {"tlsSecretName": "admin"}}, "the Secret admin is not permitted"),
    ({"priorityClassName": "system-cluster-critical"}, "priorities of the system"),
    ({"workers": {"tolerations": [{"operator": "Exists"}]}}, "spec.workers: tolerations must name the key"),
    ({"head": {"tolerations": [{"operator": "Exists"}]}}, "spec.head: tolerations must name the key"),
]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"metadata": {"annotations": {"note": "x"}}},
    {
        "spec": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "a"},
            "affinity": None,
            "priorityClassName": "training",
        }
    },
    {"spec": {"securityContext": {"supplementalGroups": [44], "runAsUser": 2000, "runAsNonRoot": True}}},
    {"spec": {"automountServiceAccountToken": False, "tolerations": None, "volumes": None, "priorityClassName": None}},
    {
        "spec": {
            "volumes": [
                {"name": "ca", "configMap": {"name": "ca"}},
                {"name": "key", "secret": {"secretName": PERMITTED}},
                {
                    "name": "both",
                    "projected": {"sources": [{"secret": {"name": PERMITTED}}, {"configMap": {"name": "ca"}}]},
                },
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
                {"name": "tmp", "$patch": "replace", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
            "containers": [
                {
                    "name": "OWN",
                    "env": [
                        {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"},
                        {"name": "USER", "$patch": "delete"},
                        secret(PERMITTED),
                    ],
                    "envFrom": [{"configMapRef": {"name": "x"}}, {"secretRef": {"name": PERMITTED}}],
                    "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                    "readinessProbe": {"$patch": "replace", "tcpSocket": {"port": "http"}},
                },
                {"name": "further", "image": "x", "env": None},
            ],
            "initContainers": [{"name": "further", "image": "x", "envFrom": None}],
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
        found.append(({"spec": {"containers": [{"name": "OWN"}, {"name": "further", **container}]}}, message))
        found.append(({"spec": {"initContainers": [{"name": "further", **container}]}}, message))
    return [*found, ({"spec": None}, "spec: null"), ({"$patch": "replace", "spec": {}}, "remove $patch")]


def policy_objects(**values: Any) -> list[dict[str, Any]]:
    restricted = {"restrictPodTemplates": True, "secrets": SECRETS}
    objects = render_chart("rl", admissionPolicy=restricted, **values)
    return [made for made in objects if made["kind"].startswith("ValidatingAdmissionPolicy")]


def create(cluster: ControlPlane, manifest: dict[str, Any]) -> str:
    """Create a job without storing it, and return why the API server refuses it, or an empty string."""
    process = cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
    return process.stderr


@pytest.fixture(scope="module")
def restricted(cluster: ControlPlane) -> Iterator[Jobs]:
    """A namespace with the policy, without an operator, and with a job that is older and that it would refuse."""
    jobs = Jobs(cluster, "restricted")
    # Kubernetes itself sets the first label, by which the policy is limited to the namespaces of an operator.
    label = f"kubernetes.io/metadata.name={jobs.namespace}"
    cluster.kubectl("label", "--overwrite", "namespace", jobs.namespace, label, RESTRICTED)
    jobs.create("older", head={"podTemplate": {"spec": {"nodeName": "node-1"}}})
    policy = policy_objects(operator={"namespaces": [jobs.namespace]})
    assert 2 == len(policy)
    cluster.apply(*policy)
    bad = jobs.manifest("bad", head={"podTemplate": {"spec": {"nodeName": "node-1"}}})
    jobs.wait(lambda: create(cluster, bad))
    yield jobs
    for made in policy:
        cluster.kubectl("delete", made["kind"], made["metadata"]["name"])
    jobs.close()


@pytest.mark.parametrize("section", OWN_CONTAINERS)
def test_templates_that_ask_for_privileges_are_refused(restricted: Jobs, section: str) -> None:
    for number, (template, message) in enumerate(refused_templates()):
        refusal = restricted.rejection(job(restricted, f"refused-{number}", template, section))
        assert message in refusal, template
        assert f"spec.{section}" in refusal or "expression" in refusal


def test_fields_that_ask_for_privileges_are_refused(restricted: Jobs) -> None:
    for number, (spec, message) in enumerate(REFUSED_FIELDS):
        assert message in restricted.rejection(restricted.manifest(f"fields-{number}", **spec)), spec
    permitted = {"tokenSecretRef": {"name": PERMITTED, "key": "key"}}
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    manifest = restricted.manifest("fields", model={"id": "m", **permitted}, workers={"tolerations": tolerations})
    assert "" == restricted.rejection(manifest)


def test_templates_need_a_namespace_that_enforces_pod_security(restricted: Jobs) -> None:
    """Pod Security refuses what these templates ask for besides: the host's network, root, added capabilities."""
    manifest = job(restricted, "plain", {"metadata": {"labels": {"a": "b"}}}, "workers")
    try:
        for label in ("pod-security.kubernetes.io/enforce-", RESTRICTED.replace("=restricted", "=baseline")):
            restricted.cluster.kubectl("label", "--overwrite", "namespace", restricted.namespace, label)
            restricted.wait(lambda: create(restricted.cluster, manifest))
            refusal = create(restricted.cluster, manifest)
            assert f"kubectl label namespace {restricted.namespace} {RESTRICTED}" in refusal
            assert "" == create(restricted.cluster, restricted.manifest("without-template"))
    finally:
        restricted.cluster.kubectl("label", "--overwrite", "namespace", restricted.namespace, RESTRICTED)
    restricted.wait(lambda: not create(restricted.cluster, manifest))


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
    runtime["spec"] = {"workers": {"podTemplate": {"spec": {"nodeName": "node-1"}}}}
    assert "spec.workers.podTemplate.spec.nodeName: use" in create(restricted.cluster, runtime)


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
            head={"podTemplate": {"spec": {"nodeName": "node-1", "serviceAccountName": "admin"}}},
            workers={"podTemplate": {"spec": {"containers": [{"name": "worker", "env": [secret("admin")]}]}}},
        )
    )
    for part in ("nodeName", "serviceAccountName", "spec.workers.podTemplate.spec: Secrets"):
        assert part in refusal


def test_a_job_that_is_older_than_the_policy_can_be_scaled_and_deleted(restricted: Jobs) -> None:
    restricted.patch("older", workers={"replicas": 3}, lifecycle={"suspend": True})
    restricted.cluster.kubectl(
        "patch", "-n", restricted.namespace, "rj/older", "--type=merge", "-p", '{"metadata": {"finalizers": ["a.b/c"]}}'
    )
    with pytest.raises(ApiException, match="nodeName: use nodeSelector"):
        restricted.patch("older", head={"podTemplate": {"spec": {"nodeName": "node-2"}}})
    with pytest.raises(ApiException, match="nodeName: use nodeSelector"):
        restricted.patch("older", workers={"podTemplate": {"metadata": {}}})
    with pytest.raises(ApiException, match="the Secret admin is not permitted"):
        restricted.patch("older", server={"tokensSecretName": "admin"})
    restricted.patch("older", head={"podTemplate": {"spec": {"nodeName": None}}})


def test_the_policy_can_be_applied_without_the_chart(restricted: Jobs) -> None:
    file = CHART / "files" / "pod-template-policy.yaml"
    restricted.cluster.kubectl("apply", "--dry-run=server", "-f", str(file))
    policy, binding = yaml.safe_load_all(file.read_text())
    assert policy["metadata"]["name"] == binding["spec"]["policyName"]
    rendered = policy_objects()[0]["spec"]
    permitted = next(one for one in rendered["variables"] if "secrets" == one["name"])
    assert json.dumps(SECRETS, separators=(",", ":")) == permitted["expression"]
    assert policy["spec"] == {
        **rendered,
        "variables": [
            {"name": "secrets", "expression": "[]"} if one is permitted else one for one in rendered["variables"]
        ],
    }


def privileges(pod: dict[str, Any]) -> set[str]:
    """Return what a pod may do that Pod Security would admit, and the Secrets that it uses."""
    spec = pod["spec"]
    found = [field for field in ("nodeName", "serviceAccount") if spec.get(field)]
    if spec.get("serviceAccountName") != "math-rollout":
        found.append("service account")
    if spec.get("automountServiceAccountToken") is not False:
        found.append("token")
    if (spec.get("priorityClassName") or "").startswith("system-"):
        found.append("priority")
    found += ["tolerations" for toleration in spec.get("tolerations") or () if not toleration.get("key")]
    secrets = []
    for volume in spec.get("volumes") or ():
        sources = volume.get("projected", {}).get("sources", ())
        found += ["volume"] * ("csi" in volume or any("serviceAccountToken" in source for source in sources))
        secrets += [source["secret"].get("name") for source in sources if "secret" in source]
        secrets += [volume["secret"].get("secretName")] if "secret" in volume else []
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        for variable in container.get("env") or ():
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            secrets += [(reference.get("name"), reference["key"])] if reference else []
        for source in container.get("envFrom") or ():
            secrets += [source["secretRef"]["name"]] if "secretRef" in source else []
    return {*found, *(f"Secret {name}" for name in secrets if name not in (PERMITTED, (PERMITTED, "key")))}


def pods_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods that the operator creates for a job."""
    context = JobContext(parse_job({**manifest, "metadata": {**manifest["metadata"], "name": "math"}}), "uid", {}, "x")
    return [
        head_pod(context),
        worker_pod(context, 0, replacement=False),
        prefetch_pod(context),
        cleanup_pod(context, delete_messages=True, reason=""),
    ]


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
        try:
            has_privileges = any(
                privileges(pod) - privileges(plain)
                for pod, plain in zip(pods_of(manifest), pods_of(restricted.manifest("plain")), strict=True)
            )
        except PatchError:
            continue
        assert is_refused or not has_privileges, spec
        outcomes[is_refused, has_privileges] += 1
    assert min(outcomes[True, True], outcomes[False, False]) > 10, outcomes
