"""A stand-in for the API server of a current Kubernetes, with etcd; see current_apiserver/main.go for what it lacks.

It has no controllers; small stand-ins schedule pods and delete the dependents of deleted jobs.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster.control_plane import CRDS, START_TIMEOUT_S, ControlPlane
from tests.support.cluster.controller import Controller
from tests.support.cluster.garbage_collector import GarbageCollector
from tests.support.cluster.scheduler import Scheduler
from tests.support.waiting import wait_for


class CurrentControlPlane(ControlPlane):
    """The types of Kubernetes 1.36, among them scheduling gates, policies and dynamic resource allocation."""

    kubectl_name = "current-kubectl"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._controllers: list[Controller] = []

    def start(self) -> None:
        """Start everything, and wait until RolloutJobs can be created."""
        self.create_certificates()
        self.start_process(
            "apiserver",
            str(self.binaries / "bin/current-apiserver"),
            f"--etcd-servers={self.start_etcd()}",
            f"--bind-address={self.host}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.pki_file('apiserver.crt')}",
            f"--tls-private-key-file={self.pki_file('apiserver.key')}",
            f"--client-ca-file={self.pki_file('ca.crt')}",
        )
        self.wait_until_ready()
        self.kubectl("apply", "--server-side", "-f", str(CRDS))
        self.wait_until_jobs_are_served()
        namespace = "/api/v1/namespaces/kube-node-lease"
        wait_for(lambda: self.kubectl("get", "--raw", namespace, check=False).returncode == 0, START_TIMEOUT_S)
        self._controllers = [Scheduler(self.client()), GarbageCollector(self.client())]
        for controller in self._controllers:
            controller.start()

    def stop(self) -> None:
        """Kill all processes."""
        for controller in self._controllers:
            controller.stop()
        super().stop()
