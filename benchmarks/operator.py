"""Measures the operator with many jobs.

    python -m benchmarks.operator --jobs 1000 --json FILE [--running 1000 --engines 64]
    python -m benchmarks.operator --jobs 1000 --watches

The API server, the scheduler and the controller manager are real and run on this machine; the nodes are virtual, and a
server in this process answers the heads' status requests. Of the jobs that do not keep running, half are suspended and
half succeed. One operator process is measured: API calls by its own counter, memory and CPU time by the kernel.

With ``--watches``, the informer is compared with kopf as the watch of 64 pods of each job. Both fill the operator's
cache. The API server is a stand-in that lists the pods and, once, ends the watch with 410 Gone after deleting some.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kopf
import psutil
from kubernetes.aio.client import ApiClient, Configuration
from rollout_operator.cluster.informer import Informer, WorkQueue
from rollout_operator.cluster.kubernetes_api import KubernetesApi, owned_kinds
from rollout_operator.cluster.object_cache import JobKey, ObjectCache

from benchmarks.figures import Figure, quantile, report
from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.heads import Heads
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes
from tests.support.waiting import wait_for

MEASURED_S = 60.0
"""Seconds over which CPU time is averaged."""
SETTLE_S = 10.0
"""Seconds between the last job's change of state and the measurement with running jobs."""
CAPACITY = {"cpu": "4000", "memory": "64Ti", "pods": "4000", "nvidia.com/gpu": "4000"}


class OperatorBenchmark:
    """A cluster with virtual nodes, one operator, and many jobs."""

    def __init__(self, directory: Path, count: int, num_running: int, heads: Heads) -> None:
        self.num_running, self.heads = num_running, heads
        self.names = [f"job-{number:04d}" for number in range(count)]
        self.created: dict[str, datetime] = {}
        self.plane = CompleteControlPlane(directory / "cluster")
        self.plane.start()
        self.jobs = Jobs(self.plane, "bench")
        self.nodes = VirtualNodes(
            self.plane.client(),
            2,
            labels={"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            capacity=CAPACITY,
            address=lambda number: f"127.1.{number // 250}.{number % 250 + 1}",
        )
        self.nodes.ready_after_s = 0.0
        self.nodes.start()
        self.operator = OperatorProcess(
            self.plane.kubeconfig, directory / "operator.log", "--namespace=bench", "--log-level=error"
        )

    def process(self) -> psutil.Process:
        """Return the operator's process."""
        return psutil.Process(self.operator.pid)

    def api_calls(self) -> float:
        """Return how many calls to the API server the operator has made."""
        return self.operator.metric("rollout_operator_api_requests_total")

    def job_writes(self) -> float:
        """Return how often the operator has written a job's status."""
        lines = self.operator.get("metrics").splitlines()
        prefix = 'rollout_operator_api_requests_total{kind="RolloutJob/status",verb="apply"} '
        return sum(float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix))

    def wait_idle(self, seconds: float = 3.0) -> None:
        """Wait until the operator has reconciled nothing for this many seconds."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < seconds:
            reconciles = self.operator.metric("rollout_operator_reconciles_total")
            if reconciles != last:
                last, since = reconciles, time.monotonic()
            time.sleep(0.3)

    def cpu(self, seconds: float) -> float:
        """Return the share of one core that the operator uses over the next *seconds*."""
        before = sum(self.process().cpu_times()[:2])
        time.sleep(seconds)
        return float(sum(self.process().cpu_times()[:2]) - before) / seconds

    def for_each(self, names: list[str], action: Callable[[str], object]) -> None:
        """Call *action* with each job name, eight at a time."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(action, names))

    def states(self) -> dict[str, int]:
        """Return the number of jobs in each state, by the operator's metrics."""
        lines = (line.rpartition(" ") for line in self.operator.get("metrics").splitlines())
        return {
            series.split('"')[1]: int(float(value))
            for series, _, value in lines
            if series.startswith("rollout_operator_jobs{")
        }

    def seconds_to_pods(self) -> list[float]:
        """Return the time from the creation of each job to that of its last pod, in whole seconds of the API server."""
        last: dict[str, datetime] = {}
        for pod in self.jobs.core.list_namespaced_pod("bench").items:
            job = pod.metadata.labels["das.rollout.dev/job"]
            last[job] = max(last.get(job, pod.metadata.creation_timestamp), pod.metadata.creation_timestamp)
        return [(last[name] - self.created[name]).total_seconds() for name in last if name in self.created]

    def run(self) -> tuple[list[Figure], dict[str, Any]]:
        """Run the benchmark and return its figures and further details."""
        count = len(self.names)
        self.operator.start()
        self.operator.wait_until_ready()
        before = self.api_calls()

        def create(name: str) -> None:
            job = self.jobs.create(name, workers={"replicas": 1})
            timestamp = job["metadata"]["creationTimestamp"]
            self.created[name] = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))

        began = time.monotonic()
        self.for_each(self.names, create)
        apply_s = time.monotonic() - began
        wait_for(lambda: len(self.jobs.core.list_namespaced_pod("bench").items) >= 2 * count, 600, "pods are missing")
        all_created = time.monotonic() - began
        latencies = self.seconds_to_pods()
        wait_for(lambda: self.states().get("Running", 0) == count, 600, "not all jobs are running")
        created_calls = (self.api_calls() - before) / count

        running = self.names[: self.num_running]
        idle = self.names[len(running) :]
        self.for_each(idle[::2], lambda name: self.jobs.patch(name, lifecycle={"suspend": True}))
        self.for_each(idle[1::2], lambda name: self.nodes.terminate_pod("bench", f"{name}-head"))
        wait_for(lambda: self.states().get("Running", 0) == len(running), 600, f"{self.states()}")
        time.sleep(SETTLE_S)
        reads, calls, writes = self.heads.reads, self.api_calls(), self.job_writes()
        busy_cpu = self.cpu(MEASURED_S)
        busy_reads = (self.heads.reads - reads) / MEASURED_S
        busy_calls = (self.api_calls() - calls) / MEASURED_S
        busy_writes = (self.job_writes() - writes) / MEASURED_S
        busy_rss = self.process().memory_info().rss

        self.for_each(running, lambda name: self.nodes.terminate_pod("bench", f"{name}-head"))
        wait_for(lambda: not self.states().get("Running", 0), 600, f"{self.states()}")
        self.wait_idle()
        rss = self.process().memory_info().rss
        idle_cpu = self.cpu(MEASURED_S)

        self.operator.terminate()
        began = time.monotonic()
        self.operator.start()
        self.operator.wait_until_ready()
        wait_for(
            lambda: self.operator.metric("rollout_operator_reconciles_total") >= count, 300, "jobs are not reconciled"
        )
        resync = time.monotonic() - began
        self.wait_idle()
        rss = max(rss, self.process().memory_info().rss)
        figures = [
            Figure("apply to all pods created, p50", quantile(latencies, 0.5), "s", "", "<=", None),
            Figure("apply to all pods created, p99", quantile(latencies, 0.99), "s", "", "<=", None),
            Figure("API calls per job until it runs", created_calls, "calls", "", "<=", None),
            Figure("memory with all jobs", rss / 2**20, "MiB", "", "<=", 200.0),
            Figure("CPU with all jobs suspended or succeeded", 100 * idle_cpu, "% of a core", "", "<=", 5.0),
            Figure(f"CPU with {len(running)} jobs running", 100 * busy_cpu, "% of a core", "", "<=", None),
            Figure(f"memory with {len(running)} jobs running", busy_rss / 2**20, "MiB", "", "<=", None),
            Figure("status writes per running job", 60 * busy_writes / len(running), "per minute", "", "<=", None),
            Figure("full resync after a restart", resync, "s", "", "<=", 60.0),
        ]
        details = {
            "jobs": count,
            "seconds to apply": apply_s,
            "seconds until all pods were created": all_created,
            "status reads per second": busy_reads,
            "API calls per second with running jobs": busy_calls,
            "states": self.states(),
        }
        return figures, details

    def close(self) -> None:
        """Stop the operator and the cluster."""
        if self.operator.is_running():
            self.operator.terminate()
        self.nodes.stop()
        self.plane.stop()


PODS_PER_JOB = 64
DELETED_PODS = 100
"""Number of pods that are deleted while the watch is interrupted."""
_POD = {
    "metadata": {
        "name": "@",
        "namespace": "bench",
        "uid": "@",
        "resourceVersion": "1",
        "labels": {f"das.rollout.dev/label-{number}": "value" for number in range(8)},
        "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:field-{number}": {} for number in range(60)}}],
        "ownerReferences": [
            {
                "apiVersion": "das.rollout.dev/v1alpha1",
                "kind": "RolloutJob",
                "name": "#",
                "uid": "#",
                "controller": True,
            }
        ],
    },
    "spec": {"containers": [{"name": "worker", "env": [{"name": f"NAME_{n}", "value": "value"} for n in range(40)]}]},
    "status": {"phase": "Running", "podIP": "10.0.0.1"},
}


class PodServer(BaseHTTPRequestHandler):
    """Serves as much of the API server as a watch of pods needs."""

    protocol_version = "HTTP/1.1"
    count = 0
    """Number of pods."""
    watches = 0
    """Number of watches that have begun."""
    gone = threading.Event()
    """Set when pods have been deleted and the watch is to end."""
    template = json.dumps(_POD)

    def do_GET(self) -> None:
        """Answer a request for the API's resources, or for pods."""
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/api":
            self._answer('{"versions": ["v1"]}')
        elif url.path == "/apis":
            self._answer('{"groups": []}')
        elif url.path == "/api/v1":
            resources = [
                {"name": plural, "singularName": "", "kind": kind, "namespaced": True, "verbs": ["list", "watch"]}
                # kopf waits until namespaces are served, even if it watches all of them.
                for plural, kind in {"pods": "Pod", "namespaces": "Namespace"}.items()
            ]
            self._answer(json.dumps({"resources": resources}))
        elif "watch" in query:
            self._watch()
        else:
            self._list(int(query.get("continue", 0)), int(query["limit"]))

    def _list(self, first: int, limit: int) -> None:
        end = self.count - (DELETED_PODS if self.gone.is_set() else 0)
        numbers = range(first, min(first + limit, end))
        pods = (self.template.replace("@", f"p{n}").replace("#", f"job-{n // PODS_PER_JOB}") for n in numbers)
        token = str(numbers.stop) if numbers.stop < end else ""
        metadata = json.dumps({"resourceVersion": "1", "continue": token})
        self._answer(f'{{"kind": "PodList", "apiVersion": "v1", "metadata": {metadata}, "items": [{",".join(pods)}]}}')

    def _watch(self) -> None:
        type(self).watches += 1
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.flush()
        if self.watches == 1:
            self.gone.wait()
            error = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            self.wfile.write(json.dumps({"type": "ERROR", "object": error}).encode() + b"\n")
        else:
            threading.Event().wait()

    def _answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


async def watch_pods(watcher: str, url: str) -> None:
    """Watch pods with ``kopf`` or the ``informer``; print how many are known for each line of the standard input."""
    cache = ObjectCache()
    pods = owned_kinds(None)[0]
    if watcher == "kopf":
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=url)

        @kopf.on.startup(registry=registry)
        async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
            settings.posting.enabled = False
            settings.scanning.disabled = True
            settings.watching.chunk_size = 500

        @kopf.on.event("", "v1", "pods", registry=registry)
        async def pod_event(event: kopf.RawEvent, **_: Any) -> None:
            body = event["object"]
            if event["type"] == "DELETED":
                cache.remove(body["metadata"]["uid"])
            else:
                cache.update(body, pods.kind)

        watching = asyncio.ensure_future(kopf.operator(registry=registry, standalone=True, clusterwide=True))
    else:
        api = KubernetesApi(ApiClient(Configuration(host=url)))
        watching = asyncio.ensure_future(Informer(api, cache, WorkQueue[JobKey](), pods, "", selector="").run())
    while await asyncio.to_thread(sys.stdin.readline) and not watching.done():
        print(len(cache.uids(pods.kind, "")), flush=True)


def compare_watches(jobs: int) -> list[Figure]:
    """Return memory, CPU time and lost deletions of the two ways to watch pods."""
    figures = []
    for watcher in ("informer", "kopf"):
        PodServer.count, PodServer.watches, PodServer.gone = jobs * PODS_PER_JOB, 0, threading.Event()
        server = ThreadingHTTPServer(("127.0.0.1", 0), PodServer)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "benchmarks.operator", "--watch-pods", watcher, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            process = psutil.Process(child.pid)
            began = time.monotonic()

            def known(child: subprocess.Popen[str] = child) -> int:
                print(file=child.stdin, flush=True)
                return int(next(child.stdout or iter(())))

            wait_for(lambda: known() == PodServer.count, 300, "pods are missing")
            seconds = time.monotonic() - began
            time.sleep(SETTLE_S)
            rss, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
            peak = _peak_rss(child.pid)
            PodServer.gone.set()
            wait_for(lambda: PodServer.watches > 1, 300, "the watch is not continued")
            before = -1.0
            while before != (before := sum(process.cpu_times()[:2])):
                time.sleep(1)
            lost = known() - (PodServer.count - DELETED_PODS)
            child.kill()
        server.shutdown()
        figures += [
            Figure(f"{watcher}: time until all pods are known", seconds, "s", "", "<=", None),
            Figure(f"{watcher}: CPU time until then", cpu, "s", "", "<=", None),
            Figure(f"{watcher}: memory", rss / 2**20, "MiB", "", "<=", None),
            Figure(f"{watcher}: peak memory", peak / 2**20, "MiB", "", "<=", None),
            Figure(f"{watcher}: deletions lost of {DELETED_PODS}", lost, "pods", "", "<=", None),
        ]
    return figures


def _peak_rss(pid: int) -> int:
    """Return the largest memory that a process has used so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs [%(default)s]")
    parser.add_argument("--running", type=int, default=100, help="jobs that keep running [%(default)s]")
    parser.add_argument("--engines", type=int, default=1, help="engines of each job [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--watches", action="store_true", help="compare ways to watch pods instead")
    parser.add_argument("--watch-pods", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch_pods:
        asyncio.run(watch_pods(*options.watch_pods))
        return
    if options.watches:
        report(options.json, compare_watches(options.jobs), jobs=options.jobs)
        return
    with tempfile.TemporaryDirectory() as directory:
        heads = Heads(options.engines, "0.0.0.0")  # noqa: S104 (pods of virtual nodes have addresses in 127.0.0.0/8)
        benchmark = OperatorBenchmark(Path(directory), options.jobs, options.running, heads)
        try:
            figures, details = benchmark.run()
        finally:
            benchmark.close()
    report(options.json, figures, **details)


if __name__ == "__main__":
    main()
