"""A real Kubernetes control plane on this machine: etcd, API server, CRD server, controller manager and scheduler.

The API server is Kubernetes 1.20, the newest version that can be built from Debian's packages. It does not support CEL
rules, so its aggregation layer forwards requests for RolloutJobs to the CRD server of Kubernetes 1.36.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from rollout_api.manifest.rollout_job import GROUP, VERSION
from tests.support.ports import free_port
from tests.support.waiting import wait_for

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "das-rollout" / "kubernetes"
CRD = HERE.parents[2] / "crds" / f"rolloutjobs.{GROUP}.yaml"
START_TIMEOUT_S = 180.0
"""Seconds until a part of the control plane must be ready. A loaded machine needs most of a minute for some."""
GARBAGE_COLLECTION_TIMEOUT_S = 120.0
"""Seconds until the dependents of a deleted object are gone.

The garbage collector discovers a new kind of owner only after half a minute. The rest is an allowance for slow machines
and no requirement on the operator.
"""


def build_kubernetes() -> Path:
    """Return the directory with the binaries of Kubernetes; they are built first if they are missing, in minutes."""
    subprocess.run([str(HERE / "build-kubernetes"), str(CACHE)], check=True)
    return CACHE


class ControlPlane:
    """The processes of a control plane, each of which can be killed and started again."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        """Prepare a control plane.

        Args:
            directory: where its data, keys and logs are stored.
            host: the address at which nodes and pods reach it.
        """
        self.directory, self.host = directory, host
        self.binaries = build_kubernetes()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._api_service = ""
        self._commands: dict[str, tuple[list[str], dict[str, str] | None]] = {}
        (directory / "pki").mkdir(parents=True)
        (directory / "log").mkdir()
        self.port, self.crd_port, self.etcd_port = free_port(), free_port(), free_port()
        self.kubeconfig = directory / "admin.kubeconfig"

    # Certificates

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, cwd=self.directory / "pki", capture_output=True)

    def create_certificate(self, name: str, subject: str, alternative_names: str = "") -> None:
        """Create a key and a certificate that the cluster's authority has signed."""
        extensions = "basicConstraints=CA:FALSE\nkeyUsage=digitalSignature,keyEncipherment\n"
        extensions += "extendedKeyUsage=serverAuth,clientAuth\n" + (
            f"subjectAltName={alternative_names}\n" if alternative_names else ""
        )
        (self.directory / "pki" / f"{name}.ext").write_text(extensions)
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")
        self._openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
        signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", f"{name}.ext"]
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.crt")

    def pki_file(self, name: str) -> str:
        """Return the path of a key or certificate."""
        return str(self.directory / "pki" / name)

    def _create_certificates(self) -> None:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "ca.key")
        self._openssl("req", "-x509", "-new", "-key", "ca.key", "-days", "30", "-subj", "/CN=test-ca", "-out", "ca.crt")
        self._openssl("genrsa", "-out", "sa.key", "2048")
        self._openssl("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
        served = [f"IP:{self.host}", "IP:127.0.0.1", "IP:10.96.0.1", "DNS:localhost", "DNS:kubernetes.default.svc"]
        served += ["DNS:kubernetes.default", "DNS:crds.kube-system.svc"]
        self.create_certificate("apiserver", "/CN=kube-apiserver", ",".join(dict.fromkeys(served)))
        for name, subject in (
            ("admin", "/O=system:masters/CN=admin"),
            ("controller-manager", "/CN=system:kube-controller-manager"),
            ("scheduler", "/CN=system:kube-scheduler"),
            ("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
            ("front-proxy", "/CN=front-proxy"),
        ):
            self.create_certificate(name, subject)
            self.write_kubeconfig(name)

    def write_kubeconfig(self, name: str, *, port: int | None = None, file: str | None = None) -> Path:
        """Write a kubeconfig that authenticates with a certificate, and return its path."""
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
                        "certificate-authority": self.pki_file("ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": "u",
                    "user": {
                        "client-certificate": self.pki_file(f"{name}.crt"),
                        "client-key": self.pki_file(f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        }
        path.write_text(json.dumps(access))
        return path

    # Processes

    def start_process(self, name: str, *command: str, environment: dict[str, str] | None = None) -> None:
        """Start a process, or without a command, start it again with the command from before."""
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

    def kill_process(self, name: str) -> None:
        """Send SIGKILL to a process, and wait for its end."""
        self._processes[name].kill()
        self._processes[name].wait()

    def signal_process(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._processes[name].send_signal(number)

    def terminate_process(self, name: str) -> None:
        """Send SIGTERM to a process, and SIGKILL if it does not end within five seconds."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def is_running(self, name: str) -> bool:
        """Return whether a process is running."""
        return self._processes[name].poll() is None

    def start(self) -> None:
        """Start everything, and wait until objects can be created."""
        self._create_certificates()
        etcd = f"http://127.0.0.1:{self.etcd_port}"
        peers = f"http://127.0.0.1:{free_port()}"
        self.start_process(
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
            str(self.binaries / "bin/apiextensions-apiserver"),
            f"--etcd-servers={etcd}",
            "--etcd-prefix=/registry/crds",
            f"--bind-address={self.host}",
            f"--secure-port={self.crd_port}",
            f"--tls-cert-file={self.pki_file('apiserver.crt')}",
            f"--tls-private-key-file={self.pki_file('apiserver.key')}",
            f"--client-ca-file={self.pki_file('ca.crt')}",
            f"--kubeconfig={admin}",
            f"--authentication-kubeconfig={admin}",
            f"--authorization-kubeconfig={admin}",
            "--disable-admission-plugins=ValidatingAdmissionPolicy,MutatingAdmissionPolicy",
            "--enable-priority-and-fairness=false",
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

    def restart_api_server(self) -> None:
        """Start the API server again after it was killed, and wait until it is ready."""
        self.start_process("apiserver")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the API server is ready."""
        self.write_kubeconfig("admin")

        def is_ready() -> bool:
            if not self.is_running("apiserver"):
                raise RuntimeError((self.directory / "log/apiserver.log").read_text()[-2000:])
            return self.kubectl("get", "--raw", "/readyz", check=False).returncode == 0

        wait_for(is_ready, START_TIMEOUT_S, "The API server does not become ready.")

    def _serve_crds(self) -> None:
        """Install the CRD in the CRD server, and let the API server forward requests for its API group."""
        direct = self.write_kubeconfig("admin", port=self.crd_port, file="crds.kubeconfig")
        wait_for(
            lambda: self.kubectl("get", "--raw", "/readyz", kubeconfig=direct, check=False).returncode == 0,
            START_TIMEOUT_S,
        )
        # kubectl 1.20 does not understand the discovery of this server, so it cannot apply the CRD.
        crd = self.directory / "crd.json"
        crd.write_text(json.dumps(yaml.safe_load(CRD.read_text())))
        definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.kubectl("create", "--raw", definitions, "-f", str(crd), kubeconfig=direct)
        authority = base64.b64encode(Path(self.pki_file("ca.crt")).read_bytes()).decode()
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
        self._api_service = json.dumps(group)
        self.register_api_group()

    def register_api_group(self) -> None:
        """Let the API server serve RolloutJobs, and wait until it does."""
        self.kubectl("apply", "-f", "-", stdin=self._api_service)
        self.wait_until_jobs_are_served()

    def wait_until_jobs_are_served(self) -> None:
        """Wait until the API server serves RolloutJobs."""
        wait_for(self.serves_jobs, START_TIMEOUT_S, "The API server does not serve RolloutJobs.")

    def serves_jobs(self) -> bool:
        """Return whether the API server serves RolloutJobs."""
        return self.kubectl("get", "rolloutjobs", check=False).returncode == 0

    def unregister_api_group(self) -> None:
        """Let the API server answer 404 for RolloutJobs, as it does for a moment after a restart."""
        self.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}")
        wait_for(lambda: not self.serves_jobs(), START_TIMEOUT_S, "The API server still serves RolloutJobs.")
        # Watches that the API server forwards would otherwise continue.
        self.kill_process("crds")
        self.start_process("crds")

    def stop(self) -> None:
        """Kill all processes. Nobody needs their data any more, so they need not end in order."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

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

    # Clients

    def client(self) -> client.ApiClient:
        """Return a client with the rights of a cluster administrator."""
        return config.new_client_from_config(str(self.kubeconfig))

    def kubectl(
        self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as administrator.

        Args:
            arguments: its arguments.
            stdin: its input.
            kubeconfig: replaces the administrator's kubeconfig.
            check: raise RuntimeError if it fails.
        """
        command = [str(self.binaries / "bin/kubectl"), "--kubeconfig", str(kubeconfig or self.kubeconfig), *arguments]
        process = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=self.directory)
        if check and process.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {process.stderr}")
        return process


def _none_if_missing(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise
