"""The processes of a Kubernetes control plane on this machine, with their certificates and clients."""

from __future__ import annotations

import json
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

from kubernetes import client, config

from rollout_api.ports import free_port
from tests.support.waiting import wait_for

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "das-rollout" / "kubernetes"
CRDS = HERE.parents[2] / "crds"
START_TIMEOUT_S = 180.0
"""Seconds until a part of the control plane must be ready. A loaded machine needs most of a minute for some."""


def build_kubernetes() -> Path:
    """Return the directory with the binaries of Kubernetes; they are built first if they are missing, in minutes."""
    subprocess.run([str(HERE / "build-kubernetes"), str(CACHE)], check=True)
    return CACHE


class ControlPlane(ABC):
    """The processes of a control plane. Each can be killed and started again."""

    kubectl_name = "kubectl"
    """File name of the kubectl that belongs to the API server's version."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        """Prepare a control plane.

        Args:
            directory: where its data, keys and logs are stored.
            host: the address at which nodes and pods reach it.
        """
        self.directory, self.host = directory, host
        self.binaries = build_kubernetes()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[list[str], dict[str, str] | None]] = {}
        (directory / "pki").mkdir(parents=True)
        (directory / "log").mkdir()
        self.port, self.etcd_port = free_port(), free_port()
        self.kubeconfig = directory / "admin.kubeconfig"

    @abstractmethod
    def start(self) -> None:
        """Start everything, and wait until objects can be created."""

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

    def create_certificates(self) -> None:
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

    def start_etcd(self) -> str:
        """Start etcd and return its URL."""
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
        return etcd

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

    def wait_until_jobs_are_served(self) -> None:
        """Wait until the API server serves RolloutJobs."""
        wait_for(self.serves_jobs, START_TIMEOUT_S, "The API server does not serve RolloutJobs.")

    def serves_jobs(self) -> bool:
        """Return whether the API server serves RolloutJobs."""
        return self.kubectl("get", "rolloutjobs", check=False).returncode == 0

    def stop(self) -> None:
        """Kill all processes. Nobody needs their data any more, so they need not end in order."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

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
        command = [
            str(self.binaries / "bin" / self.kubectl_name),
            "--kubeconfig",
            str(kubeconfig or self.kubeconfig),
            *arguments,
        ]
        process = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=self.directory)
        if check and process.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {process.stderr}")
        return process
