"""The planner runs a job's HTTP server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.planned_jobs import running_job, spec, suspend_and_resume
from tests.support.simulated_cluster import SimulatedCluster

KEYS = [("Deployment", "math-server"), ("NetworkPolicy", "math-server"), ("Service", "math-server")]


def server_keys(cluster: SimulatedCluster) -> list[tuple[str, str]]:
    return sorted(
        key
        for key, manifest in cluster.objects.items()
        if manifest["metadata"]["labels"]["app.kubernetes.io/component"] == "server"
    )


def job_with_server(**server: Any) -> SimulatedCluster:
    return running_job(server=server)


def pod_spec(cluster: SimulatedCluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.objects["Deployment", "math-server"]["spec"]["template"]["spec"]
    return found


def test_a_job_has_a_server_only_if_its_manifest_asks_for_one() -> None:
    cluster = running_job()
    assert [] == server_keys(cluster)
    assert "server" not in cluster.status
    cluster.change(server={})
    cluster.reconcile()
    assert KEYS == server_keys(cluster)
    assert {"replicas": 1, "ready": 0} == cluster.status["server"]
    cluster.change(server=None)
    cluster.reconcile()
    assert [] == server_keys(cluster)
    assert "server" not in cluster.status


def test_the_server_listens_on_the_addresses_of_ipv4_and_ipv6() -> None:
    (container,) = pod_spec(job_with_server())["containers"]
    (host,) = (argument for argument in container["args"] if argument.startswith("--host"))
    assert "--host=" == host


def test_the_server_starts_when_the_head_is_ready() -> None:
    cluster = SimulatedCluster(spec(server={}))
    cluster.reconcile()
    assert KEYS[1:] == server_keys(cluster)
    cluster.run("math-head", ready=False)
    cluster.reconcile()
    assert KEYS[1:] == server_keys(cluster)
    cluster.pods["math-head"]["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    cluster.reconcile()
    assert KEYS == server_keys(cluster)
    cluster.terminate("math-head", 1)
    cluster.reconcile()
    assert KEYS == server_keys(cluster)


def test_the_status_has_the_url_and_the_ready_pods() -> None:
    cluster = job_with_server(replicas=2)
    assert "http://math-server.rl.svc:8000" == cluster.status["connection"]["serverUrl"]
    assert "http://math-server.rl.svc:8000" == cluster.objects["ConfigMap", "math-connection"]["data"]["serverUrl"]
    cluster.objects["Deployment", "math-server"]["status"] = {"readyReplicas": 2}
    cluster.reconcile()
    assert {"replicas": 2, "ready": 2} == cluster.status["server"]


def test_the_service_selects_the_pods_of_the_deployment_and_none_else() -> None:
    cluster = job_with_server()
    deployment = cluster.objects["Deployment", "math-server"]["spec"]
    selector = cluster.objects["Service", "math-server"]["spec"]["selector"]
    assert selector == deployment["selector"]["matchLabels"]
    assert selector.items() <= deployment["template"]["metadata"]["labels"].items()
    others = [pod["metadata"]["labels"] for pod in cluster.pods.values()]
    assert others
    assert not any(selector.items() <= labels.items() for labels in others)


def test_tokens_and_certificates_come_from_secrets() -> None:
    limits = {"maxRequestsPerToken": 64, "maxModelTokensPerToken": 10**6}
    cluster = job_with_server(tokensSecretName="clients", tlsSecretName="cert", **limits)
    container = pod_spec(cluster)["containers"][0]
    assert {
        "--tokens=/etc/rollout-tokens",
        "--max-requests-per-token=64",
        "--max-model-tokens-per-token=1000000",
        "--certificate=/etc/rollout-tls/tls.crt",
        "--certificate-key=/etc/rollout-tls/tls.key",
    } <= set(container["args"])
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")}
    assert {"tokens": "/etc/rollout-tokens", "tls": "/etc/rollout-tls"}.items() <= mounted.items()
    secrets = {volume["secret"]["secretName"] for volume in pod_spec(cluster)["volumes"] if "secret" in volume}
    assert {"clients", "cert"} == secrets
    probes = [container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "readiness", "liveness")]
    assert ["HTTPS"] * 3 == probes
    assert cluster.status["connection"]["serverUrl"].startswith("https://")


def test_without_tokens_only_pods_of_the_namespace_may_connect() -> None:
    [rule] = job_with_server().objects["NetworkPolicy", "math-server"]["spec"]["ingress"]
    assert [{"podSelector": {}}] == rule["from"]
    [rule] = job_with_server(tokensSecretName="clients").objects["NetworkPolicy", "math-server"]["spec"]["ingress"]
    assert "from" not in rule
    assert [8000] == [port["port"] for port in rule["ports"]]


def test_arguments_of_vllm_come_last() -> None:
    arguments = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    assert arguments == pod_spec(job_with_server(args=arguments))["containers"][0]["args"][-2:]


def test_a_change_rolls_the_deployment_and_nothing_else() -> None:
    cluster = job_with_server()
    before, pods = pod_spec(cluster), set(cluster.pods)
    uid = cluster.objects["Deployment", "math-server"]["metadata"]["uid"]
    cluster.change(server={"resources": {"cpu": "3000m"}})
    cluster.reconcile()
    assert uid == cluster.objects["Deployment", "math-server"]["metadata"]["uid"]
    assert before != pod_spec(cluster)
    assert pods == set(cluster.pods)
    # The API server writes quantities in their shortest form.
    pod_spec(cluster)["containers"][0]["resources"]["limits"]["cpu"] = "3"
    assert () == cluster.plan().actions


@pytest.mark.parametrize("end", ["suspend", "fail", "delete"])
def test_a_job_that_does_not_run_has_no_server(end: str) -> None:
    cluster = running_job()
    cluster.change(server={})
    cluster.reconcile()
    assert KEYS == server_keys(cluster)
    if end == "suspend":
        cluster.change(lifecycle={"suspend": True})
    elif end == "fail":
        cluster.change(lifecycle={"activeDeadlineSeconds": 1})
        cluster.now += 10
    else:
        cluster.delete_job()
    cluster.reconcile()
    assert [] == server_keys(cluster)
    if end == "suspend":
        suspend_and_resume(cluster)
        cluster.run("math-head")
        cluster.reconcile()
        assert KEYS == server_keys(cluster)


def test_a_template_that_cannot_be_merged_is_reported_with_its_path() -> None:
    cluster = SimulatedCluster(spec(server={"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}))
    cluster.reconcile()
    condition = next(one for one in cluster.status["conditions"] if one["type"] == "Accepted")
    assert "False" == condition["status"]
    assert "spec.server.podTemplate" in condition["message"]


def test_what_clients_send_cannot_take_the_memory_of_the_node() -> None:
    (container,) = pod_spec(job_with_server())["containers"]
    assert {"memory": "8Gi"} == container["resources"]["limits"]
    (container,) = pod_spec(job_with_server(resources={"memory": "3Gi"}))["containers"]
    assert {"memory": "3Gi"} == container["resources"]["limits"]
