"""Measures the operator with many jobs.

    python -m benchmarks.operator --jobs 1000 --json FILE [--running 1000 --engines 64]

The API server, the scheduler and the controller manager are real and run on this machine; the nodes are virtual, and a
server in this process answers the heads' status requests. Of the jobs that do not keep running, half are suspended and
half succeed. One operator process is measured: API calls by its own counter, memory and CPU time by the kernel.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from benchmarks.figures import Figure, quantile, report
from rollout_head.coordinator.metrics import ENGINE_METRICS, LABELED_ENGINE_METRICS
from rollout_head.coordinator.status_server import StatusServer
from rollout_store.job import EngineReport
from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes
from tests.support.job_status import job_status
from tests.support.waiting import wait_for

HEAD_PORT = 8080
"""Port of every head's status."""
MEASURED_S = 60.0
"""Seconds over which CPU time is averaged."""
SETTLE_S = 10.0
"""Seconds between the last job's change of state and the measurement with running jobs."""
LABELS = {"source": ("history", "siblings", "self", "pool"), "position": [*map(str, range(1, 16)), "16+"]}
"""Values of the labels of engines' counters."""
CAPACITY = {"cpu": "4000", "memory": "64Ti", "pods": "4000", "nvidia.com/gpu": "4000"}


class Heads(StatusServer):
    """Serves the status of every head, with the counters and names of real engines."""

    def __init__(self, num_engines: int) -> None:
        reports = {
            f"math-worker-{number // 8}/0/{number % 8}/{number:032x}": EngineReport(
                f"math-worker-{number // 8}/engine-{number % 8}",
                worker=f"math-worker-{number // 8}/0",
                max_running=128,
                counters=dict.fromkeys(ENGINE_METRICS, 123456.789),
                labeled_counters={
                    name: dict.fromkeys(LABELS[label], 123456) for name, (label, _) in LABELED_ENGINE_METRICS.items()
                },
            )
            for number in range(num_engines)
        }
        self._builder = job_status(reports)
        super().__init__(self._builder)
        self.reads = 0
        """Number of requests so far."""
        loop = asyncio.new_event_loop()
        # Every virtual node has an address of its own in 127.0.0.0/8.
        loop.run_until_complete(self.start("0.0.0.0", HEAD_PORT))  # noqa: S104
        threading.Thread(target=loop.run_until_complete, args=(self._update(),), daemon=True).start()

    async def _update(self) -> None:
        while True:
            done = int(time.time())
            self._builder.update({"rollouts": done, "decoding_steps": done, "accepted_tokens": done}, {}, {})
            await asyncio.sleep(1.0)

    async def _status(self, request: web.Request) -> web.Response:
        self.reads += 1
        return await super()._status(request)


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


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs [%(default)s]")
    parser.add_argument("--running", type=int, default=100, help="jobs that keep running [%(default)s]")
    parser.add_argument("--engines", type=int, default=1, help="engines of each job [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        benchmark = OperatorBenchmark(Path(directory), options.jobs, options.running, Heads(options.engines))
        try:
            figures, details = benchmark.run()
        finally:
            benchmark.close()
    report(options.json, figures, **details)


if __name__ == "__main__":
    main()
