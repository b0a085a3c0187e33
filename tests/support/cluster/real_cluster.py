"""A cluster whose pods really run, with the operator installed by its chart: one of our own, or that of KUBECONFIG."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from rollout_api.manifest.rollout_job import GROUP
from rollout_api.manifest.rollout_job import VERSION as API_VERSION
from rollout_api.protocol.keys import HistoryKeys
from tests.support.cluster.chart import CHART, HELM
from tests.support.cluster.control_plane import ControlPlane, wait_for
from tests.support.cluster.node import ADDRESS, Node, make_bridge
from tests.support.history_contents import ids_in
from tests.support.ports import accepts, free_port

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
# on a cluster of somebody's, names that nobody has
_OTHERS = "KUBECONFIG" in os.environ
NAMESPACE = f"das-test-{secrets.token_hex(4)}" if _OTHERS else "rollouts"
RELEASE = f"t{secrets.token_hex(4)}" if _OTHERS else "das"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


class RealCluster:
    """The cluster of a kubeconfig."""

    def __init__(self, kubeconfig: Path, kubectl: Path, values: dict[str, str]) -> None:
        """Use a cluster with *kubectl*; *values* are the chart's."""
        self.kubeconfig = kubeconfig
        self._kubectl, self._values = kubectl, values
        self._crd_is_ours = False

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """What kubectl says, within the namespace of the tests."""
        done = subprocess.run(self._command(*arguments), capture_output=True, text=True, input=stdin)
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._kubectl), "--kubeconfig", str(self.kubeconfig), "--namespace", NAMESPACE, *arguments]

    def helm(self, *arguments: str) -> str:
        options = ["--kubeconfig", str(self.kubeconfig), "--namespace", NAMESPACE]
        done = subprocess.run([str(HELM), *arguments, *options], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"helm {' '.join(arguments)}: {done.stderr}{done.stdout}")
        return done.stdout

    def install(self) -> None:
        """As a user does, with a Redis that needs no storage class; a CRD that is there already is used as it is."""
        missing = not self._serves_jobs()
        values = {"redis.storage": "", "crds.install": str(missing).lower(), **self._values}
        settings = [f"--set={name}={value}" for name, value in values.items()]
        self.helm(
            "upgrade", "--install", RELEASE, str(CHART), "--create-namespace", "--wait", "--timeout=5m", *settings
        )
        self._crd_is_ours = missing  # and not before it was installed: nobody else's is ever removed

    def _serves_jobs(self) -> bool:
        # not by a discovery, which kubectl keeps for a while
        return bool(self.kubectl("get", "--raw", f"/apis/{GROUP}/{API_VERSION}", check=False))

    def refuse_another_operator(self) -> None:
        """It would take the tests' jobs, too."""
        there = self.kubectl(
            "get", "deployments", "--all-namespaces", "-l", "app.kubernetes.io/name=das-rollout-operator", "-o", "name"
        )
        if there:
            raise RuntimeError(f"the cluster of KUBECONFIG has an operator already: {there.strip()}; use another")

    def uninstall(self) -> None:
        """Remove what the tests have made; also the CRD, which the chart keeps, unless it was there or is in use."""
        self.kubectl("delete", "rolloutjobs,jobs", "--all", "--timeout=120s", check=False)
        self.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)
        self.helm("uninstall", RELEASE, "--wait")
        if self._crd_is_ours and not self.kubectl("get", "rolloutjobs", "--all-namespaces", "-o", "name"):
            self.kubectl("delete", "crd", f"rolloutjobs.{GROUP}", "--ignore-not-found")

    def apply_example(self, name: str) -> None:
        """An example as a user applies it, with the worker's image of this cluster."""
        text = (EXAMPLES / name).read_text()
        image = self._values.get("image.worker")
        if image is not None:
            text = text.replace(f"das-rollout-worker:{VERSION}", image)
        self.kubectl("apply", "-f", "-", stdin=text)

    # what there is

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object; empty if there is none."""
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def status(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get("rolloutjob", job).get("status") or {}
        return found

    def wait_for_state(self, job: str, state: str, seconds: float) -> dict[str, Any]:
        """Wait until a job is in a state; what it and its pods say if it does not come to it."""

        def reached() -> dict[str, Any]:
            status = self.status(job)
            now = status.get("state")
            if now in ("Failed", "Succeeded") and now != state:
                raise AssertionError(f"{job} is {now}\n{self.about(job)}")
            return status if now == state else {}

        try:
            found: dict[str, Any] = wait_for(reached, seconds)
        except TimeoutError:
            raise AssertionError(f"{job} is not {state} after {seconds} s\n{self.about(job)}") from None
        return found

    def about(self, job: str) -> str:
        """All that helps to see what is the matter."""
        pods = self.kubectl("get", "pods", "-o", "wide")
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp")[-3000:]
        status = json.dumps(self.status(job), indent=1)
        logs = [
            f"== {name}\n{self.kubectl('logs', name, '--tail=40', check=False)}"
            for name in re.findall(rf"^({job}-\S+)", pods, re.MULTILINE)
        ]
        operator = self.kubectl("logs", f"deployment/{RELEASE}-operator", "--tail=30", check=False)
        return "\n".join([pods, events, status, *logs, f"== operator\n{operator}"])

    @contextmanager
    def watching(self, log: Path) -> Iterator[None]:
        """Have ``kubectl get rj -w`` write to *log*."""
        with log.open("w") as file:
            process = subprocess.Popen(self._command("get", "rj", "-w"), stdout=file, stderr=subprocess.DEVNULL)
            try:
                yield
            finally:
                process.terminate()
                process.wait()

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.get("secret", name)["data"][key]).decode()

    @contextmanager
    def redis_address(self) -> Iterator[str]:
        """Host and port of the bundled server for somebody outside the cluster."""
        port = free_port()
        command = self._command("port-forward", f"service/{RELEASE}-redis", f"{port}:6379")
        ended = threading.Event()

        def forward() -> None:  # again when it ends, as it may with its pod
            while not ended.is_set():
                with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    while process.poll() is None and not ended.wait(0.2):
                        pass
                    process.terminate()

        thread = threading.Thread(target=forward)
        thread.start()
        try:
            wait_for(lambda: accepts(port), 30, f"{' '.join(command)} does not forward")
            yield f"127.0.0.1:{port}"
        finally:
            ended.set()
            thread.join()

    def redis_url(self, address: str) -> str:
        """The bundled server, as its administrator."""
        return f"redis://:{self.secret(f'{RELEASE}-redis-admin', 'password')}@{address}/0"

    @contextmanager
    def redis(self) -> Iterator[redis.Redis]:
        """A client of the bundled server."""
        with self.redis_address() as address, redis.Redis.from_url(self.redis_url(address)) as server:
            yield server

    # what dies

    def kill(self, pod: str) -> str:
        """End a pod at once; its uid."""
        uid: str = self.get("pod", pod)["metadata"]["uid"]
        self.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")
        return uid

    def kill_redis(self) -> None:
        """End the bundled server, which keeps its data as long as it keeps its pod."""
        with self.redis() as server:
            server.shutdown(nosave=True)

    def in_history(self, server: redis.Redis, name: str) -> list[str]:
        """Ids of the rollouts in a history."""
        return list(ids_in(server, HistoryKeys(NAMESPACE, name)).elements())


class OwnCluster(RealCluster):
    """One that was made for the tests, and whose parts they may kill."""

    def __init__(self, plane: ControlPlane, node: Node) -> None:
        values = {"redis.image": f"das-rollout-base:{VERSION}"}
        super().__init__(plane.kubeconfig, plane.binaries / "bin/kubectl", values)
        self.plane, self.node = plane, node

    @contextmanager
    def redis_address(self) -> Iterator[str]:
        """The service itself: this machine is the cluster's node."""
        yield f"{self.get('service', f'{RELEASE}-redis')['spec']['clusterIP']}:6379"

    def kill(self, pod: str) -> str:
        """Kill a pod's container, as the kernel would for want of memory; the pod's uid."""
        found = self.get("pod", pod)
        container = found["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        self.node.ctr("tasks", "kill", "-s", "KILL", "-a", container)
        return str(found["metadata"]["uid"])

    def kill_redis(self) -> None:
        self.kill(f"{RELEASE}-redis-0")


@contextmanager
def real_cluster(directory: Path) -> Iterator[RealCluster]:
    """With the operator installed; everything that was made is removed again."""
    named = os.environ.get("KUBECONFIG")
    made = _of_kubeconfig(Path(named)) if named else _own(directory)
    with made as cluster:
        if isinstance(cluster, OwnCluster):
            cluster.install()
            yield cluster
            return
        cluster.refuse_another_operator()
        try:
            cluster.install()
            yield cluster
        finally:
            cluster.uninstall()


@contextmanager
def _of_kubeconfig(kubeconfig: Path) -> Iterator[RealCluster]:
    settings = {"OPERATOR_IMAGE": "image.operator", "WORKER_IMAGE": "image.worker", "REDIS_IMAGE": "redis.image"}
    if missing := [name for name in ("OPERATOR_IMAGE", "WORKER_IMAGE") if name not in os.environ]:
        raise RuntimeError(f"KUBECONFIG is set: {' and '.join(missing)} must name images that its nodes can pull")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise RuntimeError("KUBECONFIG is set, and there is no kubectl")
    values = {value: os.environ[name] for name, value in settings.items() if name in os.environ}
    yield RealCluster(kubeconfig, Path(kubectl), {**values, "operator.namespaces": f"{{{NAMESPACE}}}"})


@contextmanager
def _own(directory: Path) -> Iterator[OwnCluster]:
    make_bridge()
    plane = ControlPlane(directory, host=ADDRESS)
    archives = plane.binaries.parent / "images"
    build = Path(__file__).with_name("build-images")
    subprocess.run([str(build), str(archives), str(plane.binaries)], check=True)
    try:
        plane.start()
        node = Node(plane, archives / "archives")
        try:
            node.start()
            yield OwnCluster(plane, node)
        finally:
            node.stop()
    finally:
        plane.stop()
