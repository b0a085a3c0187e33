"""A cluster whose pods run containers, with the chart installed: a cluster of our own, or that of KUBECONFIG."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import yaml
from kubernetes import client, config

from rollout_api.manifest.rollout_job import GROUP, PLURAL
from rollout_api.manifest.rollout_job import VERSION as API_VERSION
from rollout_api.manifest.runtime import RUNTIME_PLURALS
from rollout_api.ports import free_port
from rollout_api.protocol.keys import HistoryKeys
from tests.support.cluster.chart import CHART, HELM
from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.node import ADDRESS, Node, create_bridge
from tests.support.cluster.raw_api import RawApi
from tests.support.history_contents import rollout_ids_in
from tests.support.ports import accepts
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# On somebody else's cluster, namespace and release have random names.
_IS_SHARED = "KUBECONFIG" in os.environ
NAMESPACE = f"das-test-{secrets.token_hex(4)}" if _IS_SHARED else "rollouts"
RELEASE = f"t{secrets.token_hex(4)}" if _IS_SHARED else "das"
_PATHS = {
    "rolloutjob": f"/apis/{GROUP}/{API_VERSION}/namespaces/{NAMESPACE}/{PLURAL}",
    "deployment": f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments",
    "statefulset": f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets",
    "pod": f"/api/v1/namespaces/{NAMESPACE}/pods",
    "service": f"/api/v1/namespaces/{NAMESPACE}/services",
    "secret": f"/api/v1/namespaces/{NAMESPACE}/secrets",
    "event": f"/api/v1/namespaces/{NAMESPACE}/events",
}


def example(name: str) -> list[dict[str, Any]]:
    """Return the manifests of an example."""
    return list(yaml.safe_load_all((ROOT / "examples" / name).read_text()))


def job_manifest(name: str, **spec: Any) -> dict[str, Any]:
    """Return the manifest of a job."""
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }


def is_ready(manifest: dict[str, Any]) -> bool:
    """Return whether a pod is ready and not being deleted."""
    conditions = manifest.get("status", {}).get("conditions", ())
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and "deletionTimestamp" not in manifest["metadata"]


class RealCluster:
    """The cluster of a kubeconfig."""

    def __init__(self, kubeconfig: Path, kubectl: Path, values: dict[str, str]) -> None:
        """Use a cluster.

        Args:
            kubeconfig: how to access it as an administrator.
            kubectl: the program.
            values: values for the chart.
        """
        self.kubeconfig = kubeconfig
        self.kubectl_program, self._values = kubectl, values
        self._installed_crd = False
        self._api: RawApi | None = None

    # Installation

    def install(self) -> None:
        """Install the chart with a Redis that needs no storage class, and the CRD unless it is installed already."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}  # Kubernetes 1.20 ignores it
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
        crd_is_missing = not self._serves_jobs()
        values = {"redis.storage": "", "crds.install": str(crd_is_missing).lower(), **self._values}
        settings = [f"--set={name}={value}" for name, value in values.items()]
        self.helm(
            "upgrade",
            "--install",
            RELEASE,
            str(self.chart()),
            "--wait",
            "--timeout=5m",
            *settings,
        )
        self._installed_crd = crd_is_missing

    def chart(self) -> Path:
        """Return the directory of the chart."""
        return CHART

    def _serves_jobs(self) -> bool:
        # Unlike "kubectl get rolloutjobs", this does not use kubectl's cache of the discovery.
        return bool(self.kubectl("get", "--raw", f"/apis/{GROUP}/{API_VERSION}", check=False))

    def refuse_another_operator(self) -> None:
        """Raise RuntimeError if the cluster has an operator, which would also reconcile the tests' jobs."""
        operators = self.kubectl(
            "get", "deployments", "--all-namespaces", "-l", "app.kubernetes.io/name=das-rollout-operator", "-o", "name"
        )
        if operators:
            raise RuntimeError(f"The cluster of KUBECONFIG already has an operator: {operators.strip()}. Use another.")

    def uninstall(self) -> None:
        """Remove everything that the tests have created, and the CRD if it was installed by them and is unused."""
        self.kubectl("delete", "rolloutjobs,jobs", "--all", "--timeout=120s", check=False)
        self.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)
        self.helm("uninstall", RELEASE, "--wait")
        if self._installed_crd and not self.kubectl("get", "rolloutjobs", "--all-namespaces", "-o", "name"):
            for plural in ("rolloutjobs", *RUNTIME_PLURALS.values()):
                self.kubectl("delete", "crd", f"{plural}.{GROUP}", "--ignore-not-found")

    # Commands

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Run kubectl in the namespace of the tests, and return its output."""
        process = subprocess.run(self._command(*arguments), capture_output=True, text=True, input=stdin)
        if check and process.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {process.stderr}")
        return process.stdout

    def _command(self, *arguments: str) -> list[str]:
        return [str(self.kubectl_program), "--kubeconfig", str(self.kubeconfig), "--namespace", NAMESPACE, *arguments]

    def helm(self, *arguments: str) -> str:
        """Run helm in the namespace of the tests, and return its output."""
        options = ["--kubeconfig", str(self.kubeconfig), "--namespace", NAMESPACE]
        process = subprocess.run([str(HELM), *arguments, *options], capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f"helm {' '.join(arguments)}: {process.stderr}{process.stdout}")
        return process.stdout

    def apply(self, *manifests: dict[str, Any]) -> None:
        """Apply manifests; containers use the worker image of this cluster."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        image = self._values.get("image.worker")
        if image is not None:
            text = text.replace(f"das-rollout-worker:{VERSION}", image)
        self.kubectl("apply", "-f", "-", stdin=text)

    def delete(self, kind: str, *names: str) -> None:
        """Request the deletion of objects, which may be missing, without waiting until it is complete."""
        self.kubectl("delete", kind, *names, "--ignore-not-found", "--wait=false")

    def wait_until_deleted(self, job: str, timeout_s: float) -> None:
        """Wait until a job of this name can be created: until none exists, not even one that is being deleted."""
        wait_for(lambda: not self.get("rolloutjob", job), timeout_s, lambda: self.describe(job))

    @contextmanager
    def watch_jobs(self, log: Path) -> Iterator[None]:
        """Write the output of ``kubectl get rj -w`` to *log* meanwhile."""
        with log.open("w") as file:
            process = subprocess.Popen(self._command("get", "rj", "-w"), stdout=file, stderr=subprocess.DEVNULL)
            try:
                yield
            finally:
                process.terminate()
                process.wait()

    # Objects

    def _request(self, path: str, query: dict[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON response to a GET request. Unlike kubectl, this takes no process and little time."""
        if self._api is None:
            self._api = RawApi(config.new_client_from_config(str(self.kubeconfig)))
        return self._api.request("GET", path, query=query)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object, or an empty dict if it does not exist."""
        try:
            return self._request(f"{_PATHS[kind]}/{name}")
        except client.ApiException as error:
            if error.status == 404:
                return {}
            raise

    def list_objects(self, kind: str, *, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """Return all objects of a kind that match the selectors."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        items: list[dict[str, Any]] = self._request(_PATHS[kind], query)["items"]
        return items

    def status(self, job: str) -> dict[str, Any]:
        """Return a job's status, which may be empty."""
        found: dict[str, Any] = self.get("rolloutjob", job).get("status") or {}
        return found

    def pods(self, job: str) -> list[dict[str, Any]]:
        """Return the pods of a job."""
        return self.list_objects("pod", labels=f"{GROUP}/job={job}")

    def events(self, job: str) -> list[tuple[str, str]]:
        """Return reason and message of all Events about a job."""
        events = self.list_objects("event", fields=f"involvedObject.name={job},involvedObject.kind=RolloutJob")
        return [(event["reason"], event["message"]) for event in events]

    def wait_for_state(self, job: str, state: str, timeout_s: float) -> dict[str, Any]:
        """Wait until a job is in a state, and return its status.

        Raises:
            AssertionError: if it succeeds or fails instead, or does not reach the state in time. The error describes
                the job and its pods.
        """

        def status_in_state() -> dict[str, Any]:
            status = self.status(job)
            current = status.get("state")
            if current in ("Failed", "Succeeded") and current != state:
                raise AssertionError(f"{job} is {current}\n{self.describe(job)}")
            return status if current == state else {}

        try:
            found: dict[str, Any] = wait_for(status_in_state, timeout_s)
        except TimeoutError:
            raise AssertionError(f"{job} is not {state} after {timeout_s} s\n{self.describe(job)}") from None
        return found

    def describe(self, job: str) -> str:
        """Return pods, Events, status and logs, for the message of a failed test."""
        pods = self.kubectl("get", "pods", "-o", "wide", check=False)
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:]
        status = self.kubectl("get", "rolloutjob", job, "-o", "jsonpath={.status}", check=False)
        logs = [
            f"== {name}\n{self.kubectl('logs', name, '--tail=40', check=False)}"
            for name in re.findall(rf"^({job}-\S+)", pods, re.MULTILINE)
        ]
        operator = self.kubectl("logs", f"deployment/{RELEASE}-operator", "--tail=30", check=False)
        return "\n".join([pods, events, status, *logs, f"== operator\n{operator}"])

    def secret(self, name: str, key: str) -> str:
        """Return a value of a Secret."""
        return base64.b64decode(self.get("secret", name)["data"][key]).decode()

    # Redis

    @contextmanager
    def redis_address(self) -> Iterator[str]:
        """Host and port at which the chart's Redis server can be reached from outside the cluster."""
        port = free_port()
        command = self._command("port-forward", f"service/{RELEASE}-redis", f"{port}:6379")
        closed = threading.Event()

        def forward() -> None:
            # kubectl ends when the pod that it forwards to does.
            while not closed.is_set():
                with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    while process.poll() is None and not closed.wait(0.2):
                        pass
                    process.terminate()

        thread = threading.Thread(target=forward)
        thread.start()
        try:
            wait_for(lambda: accepts(port), 60, f"{' '.join(command)} does not forward.")
            yield f"127.0.0.1:{port}"
        finally:
            closed.set()
            thread.join()

    def redis_url(self, address: str) -> str:
        """Return the URL of the chart's Redis server with the administrator's password."""
        return f"redis://:{self.secret(f'{RELEASE}-redis-admin', 'password')}@{address}/0"

    @contextmanager
    def redis(self) -> Iterator[redis.Redis]:
        """A client of the chart's Redis server."""
        with self.redis_address() as address, redis.Redis.from_url(self.redis_url(address)) as server:
            yield server

    def rollouts_in_history(self, name: str) -> list[str]:
        """Return the ids of all rollouts in a history; an id that is stored twice occurs twice."""
        with self.redis() as server:
            return list(rollout_ids_in(server, HistoryKeys(NAMESPACE, name)).elements())

    # Failures

    def kill(self, pod: str) -> str:
        """Kill a pod, and return its uid."""
        uid: str = self.get("pod", pod)["metadata"]["uid"]
        self.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")
        return uid

    def kill_redis(self) -> None:
        """Kill the chart's Redis server, which keeps its data as long as its pod exists."""
        with self.redis() as server:
            server.shutdown(nosave=True)


class OwnCluster(RealCluster):
    """A cluster that was created for the tests, so that they may kill its parts."""

    def __init__(self, control_plane: CompleteControlPlane, node: Node) -> None:
        # Kubernetes 1.20 does not serve policy/v1, which the chart's PodDisruptionBudget needs.
        values = {"redis.image": f"das-rollout-base:{VERSION}", "operator.podDisruptionBudget": "false"}
        super().__init__(control_plane.kubeconfig, control_plane.binaries / "bin/kubectl", values)
        self.control_plane, self.node = control_plane, node

    def chart(self) -> Path:
        """Return a copy of the chart for this cluster, on which a current server checks the rules of the CRD."""
        copy = self.control_plane.directory / CHART.name
        shutil.copytree(CHART, copy, dirs_exist_ok=True)
        description = yaml.safe_load((CHART / "Chart.yaml").read_text())
        del description["kubeVersion"]
        (copy / "Chart.yaml").write_text(yaml.safe_dump(description))
        return copy

    @contextmanager
    def redis_address(self) -> Iterator[str]:
        """Address of the Service, which can be reached because this machine is the cluster's node."""
        yield f"{self.get('service', f'{RELEASE}-redis')['spec']['clusterIP']}:6379"

    def kill(self, pod: str) -> str:
        """Kill a pod's container as the kernel does when memory is exhausted, and return the pod's uid."""
        found = self.get("pod", pod)
        container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        self.node.ctr("tasks", "kill", "-s", "KILL", "-a", container)
        return str(found["metadata"]["uid"])

    def kill_redis(self) -> None:
        """Kill the container of the chart's Redis server."""
        self.kill(f"{RELEASE}-redis-0")


@contextmanager
def real_cluster(directory: Path) -> Iterator[RealCluster]:
    """A cluster with the chart installed; what was created is removed at the end."""
    with cluster_without_chart(directory) as cluster:
        cluster.install()
        yield cluster


@contextmanager
def cluster_without_chart(directory: Path) -> Iterator[RealCluster]:
    """A cluster for installing the chart; what was created is removed at the end."""
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig is None:
        with _own_cluster(directory) as own_cluster:
            yield own_cluster
        return
    cluster = _cluster_of_kubeconfig(Path(kubeconfig))
    cluster.refuse_another_operator()
    try:
        yield cluster
    finally:
        cluster.uninstall()


def _cluster_of_kubeconfig(kubeconfig: Path) -> RealCluster:
    settings = {"OPERATOR_IMAGE": "image.operator", "WORKER_IMAGE": "image.worker", "REDIS_IMAGE": "redis.image"}
    if missing := [name for name in ("OPERATOR_IMAGE", "WORKER_IMAGE") if name not in os.environ]:
        raise RuntimeError(f"KUBECONFIG is set, so {' and '.join(missing)} must name images that its nodes can pull.")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise RuntimeError("KUBECONFIG is set, but kubectl is not installed.")
    values = {value: os.environ[name] for name, value in settings.items() if name in os.environ}
    return RealCluster(kubeconfig, Path(kubectl), {**values, "operator.namespaces": f"{{{NAMESPACE}}}"})


@contextmanager
def _own_cluster(directory: Path) -> Iterator[OwnCluster]:
    create_bridge()
    control_plane = CompleteControlPlane(directory, host=ADDRESS)
    images = control_plane.binaries.parent / "images"
    build = Path(__file__).with_name("build-images")
    subprocess.run([str(build), str(images), str(control_plane.binaries)], check=True)
    node = Node(control_plane, images / "archives")
    try:
        # Importing the images takes longest, and needs no control plane.
        with ThreadPoolExecutor(1) as pool:
            imported = pool.submit(node.start_containerd)
            control_plane.start()
            imported.result()
        node.start()
        yield OwnCluster(control_plane, node)
    finally:
        node.stop()
        control_plane.stop()
