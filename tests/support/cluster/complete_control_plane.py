"""A control plane of Kubernetes with all controllers: etcd, API server, controller manager and scheduler.

The API server is Kubernetes 1.20, the newest version that can be built from Debian's packages. It does not support CEL
rules, so its aggregation layer forwards requests for RolloutJobs to the libraries of Kubernetes 1.36, see
current_apiserver/main.go.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client

from rollout_api.manifest.rollout_job import GROUP, VERSION
from rollout_api.ports import free_port
from tests.support.cluster.control_plane import CRDS, START_TIMEOUT_S, ControlPlane
from tests.support.waiting import wait_for

GARBAGE_COLLECTION_TIMEOUT_S = 120.0
"""Seconds until the dependents of a deleted object are gone.

The garbage collector discovers a new kind of owner only after half a minute. The rest is an allowance for slow machines
and no requirement on the operator.
"""


class CompleteControlPlane(ControlPlane):
    """Kubernetes 1.20 with its controllers, and custom resources as in Kubernetes 1.36."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        super().__init__(directory, host=host)
        self.crd_port = free_port()

    def start(self) -> None:
        """Start everything, and wait until objects can be created."""
        self.create_certificates()
        etcd = self.start_etcd()
        self.start_process(
            "apiserver",
            str(self.binaries / "bin/kube-apiserver"),
            f"--etcd-servers={etcd}",
            f"--bind-address={self.host}",
            f"--advertise-address={self.host}",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            f"--tls-cert-file={self.pki_file('apiserver.crt')}",
            f"--tls-private-key-file={self.pki_file('apiserver.key')}",
            f"--client-ca-file={self.pki_file('ca.crt')}",
            f"--service-account-key-file={self.pki_file('sa.pub')}",
            f"--service-account-signing-key-file={self.pki_file('sa.key')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--kubelet-client-certificate={self.pki_file('kubelet-client.crt')}",
            f"--kubelet-client-key={self.pki_file('kubelet-client.key')}",
            f"--kubelet-certificate-authority={self.pki_file('ca.crt')}",
            f"--requestheader-client-ca-file={self.pki_file('ca.crt')}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={self.pki_file('front-proxy.crt')}",
            f"--proxy-client-key-file={self.pki_file('front-proxy.key')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            f"--audit-policy-file={self._audit_policy()}",
            f"--audit-log-path={self.directory / 'log' / 'audit.log'}",
            f"--endpoint-reconciler-type={'none' if self.host == '127.0.0.1' else 'lease'}",
        )
        self.wait_until_ready()
        admin = str(self.write_kubeconfig("admin"))
        self.start_process(
            "crds",
            str(self.binaries / "bin/current-apiserver"),
            f"--etcd-servers={etcd}",
            "--etcd-prefix=/registry/crds",
            f"--bind-address={self.host}",
            f"--secure-port={self.crd_port}",
            f"--tls-cert-file={self.pki_file('apiserver.crt')}",
            f"--tls-private-key-file={self.pki_file('apiserver.key')}",
            f"--client-ca-file={self.pki_file('ca.crt')}",
            f"--authentication-kubeconfig={admin}",
            f"--authorization-kubeconfig={admin}",
            # The namespaces and policies are those of the API server in front.
            "--disable-admission-plugins=NamespaceLifecycle,ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
        )
        self._start_component(
            "controller-manager",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.pki_file('sa.key')}",
            f"--root-ca-file={self.pki_file('ca.crt')}",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=12s",
            "--node-eviction-rate=10",
            "--controllers=*,-ttl",
            "--allocate-node-cidrs=false",
        )
        self._start_component("scheduler")
        self._serve_crds()
        core = client.CoreV1Api(self.client())
        wait_for(
            lambda: _none_if_missing(lambda: core.read_namespaced_service_account("default", "default")),
            START_TIMEOUT_S,
        )

    def _start_component(self, name: str, *options: str) -> None:
        """Start a component of Kubernetes that is a client of the API server."""
        kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        self.start_process(
            name,
            str(self.binaries / f"bin/kube-{name}"),
            *(f"--{kind}={self.directory}/{name}.kubeconfig" for kind in kinds),
            "--bind-address=127.0.0.1",
            "--port=0",
            f"--secure-port={free_port()}",
            "--leader-elect=false",
            *options,
        )

    def _serve_crds(self) -> None:
        """Install the CRD in the CRD server, and let the API server forward requests for its API group."""
        self._crd_kubeconfig = direct = self.write_kubeconfig("admin", port=self.crd_port, file="crds.kubeconfig")
        wait_for(
            lambda: self.kubectl("get", "--raw", "/readyz", kubeconfig=direct, check=False).returncode == 0,
            START_TIMEOUT_S,
        )
        for file in sorted(CRDS.iterdir()):
            self._create_crd(yaml.safe_load(file.read_text()))
        outside = "localhost" if self.host == "127.0.0.1" else self.host
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "crds", "namespace": "kube-system"},
            "spec": {"type": "ExternalName", "externalName": outside},
        }
        self.apply(service)
        self.register_api_group()

    def serve_crd(self, crd: dict[str, Any]) -> None:
        """Install another CRD, and wait until its objects are served."""
        spec = crd["spec"]
        version = spec["versions"][0]["name"]
        self._create_crd(crd)
        self.apply(self._forwarding(spec["group"], version))
        path = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
        wait_for(lambda: self.kubectl("get", "--raw", path, check=False).returncode == 0, START_TIMEOUT_S)

    def _create_crd(self, crd: dict[str, Any]) -> None:
        # kubectl 1.20 does not understand the discovery of this server, so it cannot apply the CRDs.
        file = self.directory / f"{crd['metadata']['name']}.json"
        file.write_text(json.dumps(crd))
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.kubectl("create", "--raw", definitions, "-f", str(file), kubeconfig=self._crd_kubeconfig)

    def _forwarding(self, group: str, version: str) -> dict[str, Any]:
        """Return an APIService by which the API server forwards requests to the CRD server."""
        authority = base64.b64encode(Path(self.pki_file("ca.crt")).read_bytes()).decode()
        return {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{version}.{group}"},
            "spec": {
                "group": group,
                "version": version,
                "groupPriorityMinimum": 1000,
                "versionPriority": 15,
                "caBundle": authority,
                "service": {"name": "crds", "namespace": "kube-system", "port": self.crd_port},
            },
        }

    def register_api_group(self) -> None:
        """Let the API server serve RolloutJobs, and wait until it does."""
        self.apply(self._forwarding(GROUP, VERSION))
        self.wait_until_jobs_are_served()

    def unregister_api_group(self) -> None:
        """Let the API server answer 404 for RolloutJobs, as it does for a moment after a restart."""
        self.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}")
        wait_for(lambda: not self.serves_jobs(), START_TIMEOUT_S, "The API server still serves RolloutJobs.")
        # Watches that the API server forwards would otherwise continue.
        self.kill_process("crds")
        self.start_process("crds")

    def _audit_policy(self) -> Path:
        """Write a policy that records all requests of service accounts, to compare them with the accounts' rights."""
        path = self.directory / "audit.yaml"
        rules = [
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "omitStages": ["RequestReceived"]},
            {"level": "None"},
        ]
        path.write_text(json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
        return path

    def audit_entries(self, user: str) -> list[dict[str, Any]]:
        """Return the audit log's entries about a user's requests."""
        lines = (self.directory / "log" / "audit.log").read_text().splitlines()
        return [entry for line in lines if (entry := json.loads(line))["user"]["username"] == user]

    def service_account_kubeconfig(self, namespace: str, account: str) -> Path:
        """Write a kubeconfig for a service account, and return its path."""
        core = client.CoreV1Api(self.client())
        secrets = wait_for(lambda: core.read_namespaced_service_account(account, namespace).secrets, START_TIMEOUT_S)
        data = core.read_namespaced_secret(secrets[0].name, namespace).data
        access = json.loads(self.kubeconfig.read_text())
        access["users"][0]["user"] = {"token": base64.b64decode(data["token"]).decode()}
        path = self.directory / f"{namespace}-{account}.kubeconfig"
        path.write_text(json.dumps(access))
        return path


def _none_if_missing(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise
