"""What the operator costs: ``python -m benchmarks.operator --jobs 1000 --json FILE``.

A real API server, scheduler and controller-manager on this machine (tests/cluster), nodes without machines; heads
answer /status from a server of this process. One operator process; its API calls are its own count, memory and CPU are
the kernel's.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import Figure, quantile, report
from tests.support.cluster.control_plane import ControlPlane, wait_for
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes

HEAD_PORT = 8080
IDLE_S = 60.0
RUNNING_S = 60.0
CAPACITY = {"cpu": "4000", "memory": "64Ti", "pods": "4000", "nvidia.com/gpu": "4000"}


class Head(BaseHTTPRequestHandler):
    """/status of every head."""

    reads = 0

    def do_GET(self) -> None:
        """A status that is another each time."""
        type(self).reads += 1
        done = int(time.time())
        engine = '{"worker": "w", "slots": 128, "assigned": 100, "idle_seconds": 0}'
        body = f'{{"done": {done}, "steps": {done}, "accepted_per_step": 1.5, "assigned": 100, "engines": [{engine}]}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Bench:
    """A cluster, an operator and many jobs."""

    def __init__(self, directory: Path, count: int) -> None:
        self.names = [f"job-{number:04d}" for number in range(count)]
        self.plane = ControlPlane(directory / "cluster")
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
        """The operator's."""
        if self.operator.process is None:
            raise RuntimeError("the operator was not started")
        return psutil.Process(self.operator.process.pid)

    def calls(self) -> float:
        """Calls to the API server that the operator has made."""
        return self.operator.metric("rollout_operator_api_calls_total")

    def quiet(self, seconds: float = 3.0) -> None:
        """Wait until the operator has looked at nothing for so long."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < seconds:
            looks = self.operator.metric("rollout_operator_reconciles_total")
            if looks != last:
                last, since = looks, time.monotonic()
            time.sleep(0.3)

    def cpu(self, seconds: float) -> float:
        """Share of a core that the operator takes over some time."""
        before = sum(self.process().cpu_times()[:2])
        time.sleep(seconds)
        return float(sum(self.process().cpu_times()[:2]) - before) / seconds

    def all(self, names: list[str], work: Any) -> None:
        """Do something to several jobs, some at a time."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, names))

    def states(self) -> dict[str, int]:
        """Jobs by state, as the operator has them."""
        lines = (line.rpartition(" ") for line in self.operator.get("metrics").splitlines())
        return {
            about.split('"')[1]: int(float(value))
            for about, _, value in lines
            if about.startswith("rollout_operator_jobs{")
        }

    def seconds_to_pods(self) -> list[float]:
        """From the creation of each job to that of its last pod, by the API server's clock (whole seconds)."""
        found = self.jobs.core.list_namespaced_pod("bench").items
        last: dict[str, datetime] = {}
        for pod in found:
            job = pod.metadata.labels["das.rollout.dev/job"]
            last[job] = max(last.get(job, pod.metadata.creation_timestamp), pod.metadata.creation_timestamp)
        return [(last[name] - self.made[name]).total_seconds() for name in last if name in self.made]

    def run(self) -> tuple[list[Figure], dict[str, Any]]:
        """All figures, and more."""
        count = len(self.names)
        self.operator.start()
        self.operator.wait_until_ready()
        # as users make them: some at a time, and the time from each one's apply to its pods
        before, self.made = self.calls(), {}

        def make(name: str) -> None:
            made = self.jobs.make(name, workers={"replicas": 1})
            created = made["metadata"]["creationTimestamp"]
            self.made[name] = datetime.fromisoformat(created.replace("Z", "+00:00"))

        began = time.monotonic()
        self.all(self.names, make)
        applied = time.monotonic() - began
        wait_for(lambda: len(self.jobs.core.list_namespaced_pod("bench").items) >= 2 * count, 600, "pods are missing")
        all_there = time.monotonic() - began
        latencies = self.seconds_to_pods()
        wait_for(lambda: self.states().get("Running", 0) == count, 600, "jobs do not run")
        created_calls = (self.calls() - before) / count

        running = self.names[: min(100, count)]
        idle = self.names[len(running) :]
        self.all(idle[::2], lambda name: self.jobs.patch(name, lifecycle={"suspend": True}))
        self.all(idle[1::2], lambda name: self.nodes.end("bench", f"{name}-head"))
        wait_for(lambda: self.states().get("Running", 0) == len(running), 600, f"{self.states()}")
        time.sleep(10)
        reads, calls = Head.reads, self.calls()
        busy = self.cpu(RUNNING_S)
        busy_reads, busy_calls = (Head.reads - reads) / RUNNING_S, (self.calls() - calls) / RUNNING_S

        self.all(running, lambda name: self.nodes.end("bench", f"{name}-head"))
        wait_for(lambda: not self.states().get("Running", 0), 600, f"{self.states()}")
        self.quiet()
        rss = self.process().memory_info().rss
        resting = self.cpu(IDLE_S)

        self.operator.terminate()
        began = time.monotonic()
        self.operator.start()
        self.operator.wait_until_ready()
        wait_for(lambda: self.operator.metric("rollout_operator_reconciles_total") >= count, 300, "no resync")
        resync = time.monotonic() - began
        self.quiet()
        rss = max(rss, self.process().memory_info().rss)
        figures = [
            Figure("apply to all pods created, p50", quantile(latencies, 0.5), "s", "", "<=", None),
            Figure("apply to all pods created, p99", quantile(latencies, 0.99), "s", "", "<=", None),
            Figure("API calls a job until it runs", created_calls, "calls", "", "<=", None),
            Figure("memory with all jobs", rss / 2**20, "MiB", "", "<=", 200.0),
            Figure("CPU with all jobs suspended or succeeded", 100 * resting, "% of a core", "", "<=", 5.0),
            Figure(f"CPU with {len(running)} jobs running", 100 * busy, "% of a core", "", "<=", None),
            Figure("full resync after a restart", resync, "s", "", "<=", 60.0),
        ]
        details = {
            "jobs": count,
            "seconds to apply": applied,
            "seconds until all pods were created": all_there,
            "status reads a second": busy_reads,
            "API calls a second with running jobs": busy_calls,
            "states": self.states(),
        }
        return figures, details

    def close(self) -> None:
        """End everything."""
        if not self.operator.ended():
            self.operator.terminate()
        self.nodes.stop()
        self.plane.stop()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = ThreadingHTTPServer(("0.0.0.0", HEAD_PORT), Head)  # noqa: S104 – all of 127.0.0.0/8
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), options.jobs)
        try:
            figures, details = bench.run()
        finally:
            bench.close()
    report(options.json, figures, **details)


if __name__ == "__main__":
    main()
