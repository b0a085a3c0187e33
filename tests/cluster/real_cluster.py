"""A cluster whose pods really run, with the operator installed by its chart: one of our own, or that of KUBECONFIG."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from chart import CHART, HELM
from control_plane import ControlPlane, wait_for
from histories import ids_in
from node import ADDRESS, Node, make_bridge

from rollout_api.keys import HistoryKeys

ROOT = Path(__file__).parents[2]
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
        """As a user does, with a Redis that needs no storage class."""
        settings = [f"--set={name}={value}" for name, value in {"redis.storage": "", **self._values}.items()]
        self.helm(
            "upgrade", "--install", RELEASE, str(CHART), "--create-namespace", "--wait", "--timeout=5m", *settings
        )

    def refuse_another_operator(self) -> None:
        """It would take the tests' jobs, too."""
        there = self.kubectl(
            "get", "deployments", "--all-namespaces", "-l", "app.kubernetes.io/name=das-rollout-operator", "-o", "name"
        )
        if there:
            raise RuntimeError(f"the cluster of KUBECONFIG has an operator already: {there.strip()}; use another")

    def uninstall(self) -> None:
        """Remove what the tests have made; the CRD stays, as the chart has it."""
        self.kubectl("delete", "rolloutjobs,jobs", "--all", "--timeout=120s", check=False)
        self.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)
        self.helm("uninstall", RELEASE, "--wait")

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
    def redis(self) -> Iterator[redis.Redis]:
        """The bundled server, from outside the cluster."""
        command = self._command("port-forward", f"service/{RELEASE}-redis", ":6379")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                found = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert found is not None, line
                yield redis.Redis(port=int(found[1]), password=self.secret(f"{RELEASE}-redis-admin", "password"))
            finally:
                process.terminate()

    def in_history(self, server: redis.Redis, name: str) -> list[str]:
        """Ids of the rollouts in a history."""
        return list(ids_in(server, HistoryKeys(NAMESPACE, name)).elements())


class OwnCluster(RealCluster):
    """One that was made for the tests, and whose parts they may kill."""

    def __init__(self, plane: ControlPlane, node: Node) -> None:
        # its CRD has a server of its own, and may be installed there only
        values = {"redis.image": f"das-rollout-base:{VERSION}", "crds.install": "false"}
        super().__init__(plane.kubeconfig, plane.binaries / "bin/kubectl", values)
        self.plane, self.node = plane, node


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
    wanted = {"OPERATOR_IMAGE": "image.operator", "WORKER_IMAGE": "image.worker"}
    if missing := [name for name in wanted if name not in os.environ]:
        raise RuntimeError(f"KUBECONFIG is set: {' and '.join(missing)} must name images that its nodes can pull")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise RuntimeError("KUBECONFIG is set, and there is no kubectl")
    values = {value: os.environ[name] for name, value in wanted.items()}
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
