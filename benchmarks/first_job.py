"""Measures the time from an empty cluster to the first finished job.

    python -m benchmarks.first_job --json FILE

The cluster is that of the tests: a real Kubernetes whose one node is this machine and has the images already, or the
cluster of KUBECONFIG. The chart is installed with its own Redis server, and the job is ``examples/quickstart.yaml``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure, report, spread
from tests.support.cluster.real_cluster import cluster_without_chart, example

JOB = "quickstart"
TIMEOUT_S = 1200.0


def measure(directory: Path) -> dict[str, float]:
    """Return how many seconds after the beginning the chart is ready, the job runs, and the job has succeeded."""
    with cluster_without_chart(directory) as cluster:
        started = time.monotonic()
        cluster.install()
        times = {"chart is ready": time.monotonic() - started}
        cluster.apply(*example(f"{JOB}.yaml"))
        for what, state in (("job runs", "Running"), ("job has succeeded", "Succeeded")):
            cluster.wait_for_state(JOB, state, TIMEOUT_S)
            times[what] = time.monotonic() - started
        cluster.delete("rolloutjob", JOB)
        return times


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            rounds.append(measure(Path(directory)))
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    spreads = {what: spread([times[what] for times in rounds]) for what in rounds[0]}
    figures = [
        Figure(f"from an empty cluster until the {what}", values["median"], "s", "", "<=", None)
        for what, values in spreads.items()
    ]
    report(options.json, figures, spread=spreads, rounds=rounds)


if __name__ == "__main__":
    main()
