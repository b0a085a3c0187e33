"""A real Kubernetes control plane on this machine: etcd, API server (RBAC), CRD server, controller-manager, scheduler.

The API server is Kubernetes 1.20, the newest that Debian's stable release can build; RolloutJobs are served by the CRD
server of 1.36 behind its aggregator, since 1.20 knows no CEL rules.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from rollout_api.manifest.rollout_job import GROUP, VERSION
from tests.support.ports import free_port

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "das-rollout" / "kubernetes"
CRD = HERE.parents[2] / "crds" / f"rolloutjobs.{GROUP}.yaml"


def build() -> Path:
    """What a cluster is made of; built once, in some minutes."""
    subprocess.run([str(HERE / "build-kubernetes"), str(CACHE)], check=True)
    return CACHE


def wait_for(condition: Callable[[], Any], seconds: float = 60.0, what: str = "") -> Any:
    deadline = time.monotonic() + seconds
    while True:
        if found := condition():
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(what or f"not within {seconds} s")
        time.sleep(0.1)


class ControlPlane:
    """Started in *directory*, where its data, keys and logs are. *host* is where nodes and pods reach it."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        self.directory, self.host = directory, host
        self.binaries = build()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._group = ""
        self._commands: dict[str, tuple[list[str], dict[str, str] | None]] = {}
        (directory / "pki").mkdir(parents=True)
        (directory / "log").mkdir()
        self.port, self.crd_port, self.etcd_port = free_port(), free_port(), free_port()
        self.kubeconfig = directory / "admin.kubeconfig"

    # keys

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=self.directory / "pki", capture_output=True)

    def certify(self, name: str, subject: str, names: str = "") -> None:
        """A key and a certificate by the cluster's authority."""
        extensions = "basicConstraints=CA:FALSE\nkeyUsage=digitalSignature,keyEncipherment\n"
        extensions += "extendedKeyUsage=serverAuth,clientAuth\n" + (f"subjectAltName={names}\n" if names else "")
        (self.directory / "pki" / f"{name}.ext").write_text(extensions)
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", f"{name}.ext"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.crt")

    def pki(self, name: str) -> str:
        return str(self.directory / "pki" / name)

    def _make_keys(self) -> None:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "ca.key")
        self._openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "30", "-subj", "/CN=test-ca", "-out", "ca.crt")
        self._openssl("genrsa", "-out", "sa.key", "2048")
        self._openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        served = [f"IP:{self.host}", "IP:127.0.0.1", "IP:10.96.0.1", "DNS:localhost", "DNS:kubernetes.default.svc"]
        served += ["DNS:kubernetes.default", "DNS:crds.kube-system.svc"]
        self.certify("apiserver", "/CN=kube-apiserver", ",".join(dict.fromkeys(served)))
        for name, subject in (
            ("admin", "/O=system:masters/CN=admin"),
            ("controller-manager", "/CN=system:kube-controller-manager"),
            ("scheduler", "/CN=system:kube-scheduler"),
            ("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
            ("front-proxy", "/CN=front-proxy"),
        ):
            self.certify(name, subject)
            self.write_kubeconfig(name)

    def write_kubeconfig(self, name: str, *, port: int | None = None, file: str | None = None) -> Path:
        """Access as the holder of a certificate."""
        path = self.directory / (file or f"{name}.kubeconfig")
        access = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [
                {
                    "name": "c",
                    "cluster": {
                        "server": f"https://{self.host}:{port or self.port}",
                        "certificate-authority": self.pki("ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": "u",
                    "user": {
                        "client-certificate": self.pki(f"{name}.crt"),
                        "client-key": self.pki(f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        }
        path.write_text(json.dumps(access))
        return path

    # processes

    def spawn(self, name: str, *command: str, environment: dict[str, str] | None = None) -> None:
        """Start a part, or start it again as it was."""
        if command:
            self._commands[name] = (list(command), environment)
        line, variables = self._commands[name]
        with (self.directory / "log" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                line,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                process_group=0,
                cwd=self.directory,
                env=variables,
            )

    def kill(self, name: str) -> None:
        """As kill -9."""
        self._processes[name].kill()
        self._processes[name].wait()

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def end(self, name: str) -> None:
        """Tell a part to end; kill it if it does not."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def alive(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def start(self) -> None:
        """Start everything; return when objects can be made."""
        self._make_keys()
        etcd = f"http://127.0.0.1:{self.etcd_port}"
        peers = f"http://127.0.0.1:{free_port()}"
        self.spawn(
            "etcd",
            str(self.binaries / "root/usr/bin/etcd"),
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync",
        )
        self.spawn(
            "apiserver",
            str(self.binaries / "bin/kube-apiserver"),
            f"--etcd-servers={etcd}",
            f"--bind-address={self.host}",
            f"--advertise-address={self.host}",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            f"--tls-cert-file={self.pki('apiserver.crt')}",
            f"--tls-private-key-file={self.pki('apiserver.key')}",
            f"--client-ca-file={self.pki('ca.crt')}",
            f"--service-account-key-file={self.pki('sa.pub')}",
            f"--service-account-signing-key-file={self.pki('sa.key')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-cluster-ip-range=10.96.0.0/16",
            f"--kubelet-client-certificate={self.pki('kubelet-client.crt')}",
            f"--kubelet-client-key={self.pki('kubelet-client.key')}",
            f"--kubelet-certificate-authority={self.pki('ca.crt')}",
            f"--requestheader-client-ca-file={self.pki('ca.crt')}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={self.pki('front-proxy.crt')}",
            f"--proxy-client-key-file={self.pki('front-proxy.key')}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            f"--audit-policy-file={self._audit_policy()}",
            f"--audit-log-path={self.directory / 'log' / 'audit.log'}",
            f"--endpoint-reconciler-type={'none' if self.host == '127.0.0.1' else 'lease'}",
        )
        self.wait_until_ready()
        admin = str(self.write_kubeconfig("admin"))
        self.spawn(
            "crds",
            str(self.binaries / "bin/apiextensions-apiserver"),
            f"--etcd-servers={etcd}",
            "--etcd-prefix=/registry/crds",
            f"--bind-address={self.host}",
            f"--secure-port={self.crd_port}",
            f"--tls-cert-file={self.pki('apiserver.crt')}",
            f"--tls-private-key-file={self.pki('apiserver.key')}",
            f"--client-ca-file={self.pki('ca.crt')}",
            f"--kubeconfig={admin}",
            f"--authentication-kubeconfig={admin}",
            f"--authorization-kubeconfig={admin}",
            "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
            "--enable-priority-and-fairness=false",
        )
        self._spawn_with_access(
            "controller-manager",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.pki('sa.key')}",
            f"--root-ca-file={self.pki('ca.crt')}",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=12s",
            "--node-eviction-rate=10",
            "--controllers=*,-ttl",
            "--allocate-node-cidrs=false",
        )
        self._spawn_with_access("scheduler")
        self._serve_crds()
        core = client.CoreV1Api(self.client())
        wait_for(lambda: _there(lambda: core.read_namespaced_service_account("default", "default")), 60)

    def _spawn_with_access(self, name: str, *options: str) -> None:
        """Start one of Kubernetes' own clients of the API server."""
        kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        self.spawn(
            name,
            str(self.binaries / f"bin/kube-{name}"),
            *(f"--{kind}={self.directory}/{name}.kubeconfig" for kind in kinds),
            "--bind-address=127.0.0.1",
            "--port=0",
            f"--secure-port={free_port()}",
            "--leader-elect=false",
            *options,
        )

    def wait_until_ready(self) -> None:
        self.write_kubeconfig("admin")

        def ready() -> bool:
            if not self.alive("apiserver"):
                raise RuntimeError((self.directory / "log/apiserver.log").read_text()[-2000:])
            return self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0

        wait_for(ready, 60, "the API server does not get ready")

    def _serve_crds(self) -> None:
        """Install the CRD in its server, and have the API server pass its group on to it."""
        direct = self.write_kubeconfig("admin", port=self.crd_port, file="crds.kubeconfig")
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", access=direct, check=False).returncode == 0, 60)
        # it has no discovery that kubectl of 1.20 understands
        crd = self.directory / "crd.json"
        crd.write_text(json.dumps(yaml.safe_load(CRD.read_text())))
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.kubectl("create", "--raw", definitions, "-f", str(crd), access=direct)
        authority = base64.b64encode(Path(self.pki("ca.crt")).read_bytes()).decode()
        outside = "localhost" if self.host == "127.0.0.1" else self.host
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "crds", "namespace": "kube-system"},
            "spec": {"type": "ExternalName", "externalName": outside},
        }
        group = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 1000,
                "versionPriority": 15,
                "caBundle": authority,
                "service": {"name": "crds", "namespace": "kube-system", "port": self.crd_port},
            },
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(service))
        self._group = json.dumps(group)
        self.serve_group()

    def serve_group(self) -> None:
        """Have the API server pass RolloutJobs on to their server; return when it does."""
        self.kubectl("apply", "-f", "-", stdin=self._group)
        wait_for(lambda: self.kubectl("get", "rolloutjobs", check=False).returncode == 0, 60)

    def withdraw_group(self) -> None:
        """The API server knows no RolloutJobs any more (404), as for a while after it has started."""
        self.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}")
        wait_for(lambda: self.kubectl("get", "rolloutjobs", check=False).returncode != 0, 60)
        # watches that it passed on would go on
        self.kill("crds")
        self.spawn("crds")

    def stop(self) -> None:
        """End everything, in reverse."""
        for name in reversed(list(self._processes)):
            self.end(name)

    def _audit_policy(self) -> Path:
        """Who asked for what, of service accounts: so that their rights can be compared with what they do."""
        path = self.directory / "audit.yaml"
        rules = [
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"], "omitStages": ["RequestReceived"]},
            {"level": "None"},
        ]
        path.write_text(json.dumps({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules}))
        return path

    def asked_by(self, user: str) -> list[dict[str, Any]]:
        """The audit log's entries of a user."""
        lines = (self.directory / "log" / "audit.log").read_text().splitlines()
        return [entry for line in lines if (entry := json.loads(line))["user"]["username"] == user]

    def access_of(self, namespace: str, account: str) -> Path:
        """A kubeconfig for a service account."""
        core = client.CoreV1Api(self.client())
        found = wait_for(lambda: core.read_namespaced_service_account(account, namespace).secrets, 30)
        data = core.read_namespaced_secret(found[0].name, namespace).data
        access = json.loads(self.kubeconfig.read_text())
        access["users"][0]["user"] = {"token": base64.b64decode(data["token"]).decode()}
        path = self.directory / f"{namespace}-{account}.kubeconfig"
        path.write_text(json.dumps(access))
        return path

    # access

    def client(self) -> client.ApiClient:
        """As the cluster's administrator."""
        return config.new_client_from_config(str(self.kubeconfig))

    def kubectl(
        self, *arguments: str, stdin: str | None = None, access: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [str(self.binaries / "bin/kubectl"), "--kubeconfig", str(access or self.kubeconfig), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=self.directory)
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done


def _there(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise
