"""Runs the experiments one after the other, each in a process of its own, and keeps every row of their results.

    python -m benchmarks.gpu_proof --out DIRECTORY --trace TRACE [EXPERIMENT …]
    python -m benchmarks.gpu_proof --out DIRECTORY --dry-run [EXPERIMENT …]

DIRECTORY/rows.jsonl gets each row at once, DIRECTORY/EXPERIMENT.log the output of vLLM, and DIRECTORY/figures.json is
made anew after each experiment. An experiment that fails or takes too long does not affect the next ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.exposed_time import V2_ON_CPUS
from benchmarks.figures import report
from benchmarks.gpu_proof.experiments import EXPERIMENTS
from benchmarks.gpu_proof.settings import Row, dry, full

_DRY_MINUTES = 15.0
"""Time limit of an experiment on CPUs, which may be busy with other processes."""
_DRY_TRACE = Path(__file__).parents[1] / "data" / "tiny-grpo.jsonl.gz"


def append(file: Path, row: Row) -> None:
    """Append a row to a file, so that it is there even if the machine is lost."""
    with file.open("ab+") as rows:
        rows.seek(max(0, rows.tell() - 1))
        cut = rows.read() not in (b"", b"\n")  # the last row was not written to its end
        rows.write(b"\n" * cut + json.dumps(row).encode() + b"\n")
        rows.flush()
        os.fsync(rows.fileno())


def read(file: Path) -> list[Row]:
    """Return the rows of a file; a line that was not written to its end is left out."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run_experiment(name: str, options: argparse.Namespace) -> None:
    """Run an experiment in this process."""
    settings = dry(options.trace) if options.dry_run else full(options.trace)
    for row in EXPERIMENTS[name].run(settings):
        append(options.out / "rows.jsonl", {"experiment": name, "dry": options.dry_run, **row})


def run_in_process(name: str, minutes: float, arguments: Sequence[str], out: Path, environment: dict[str, str]) -> bool:
    """Run an experiment in a process of its own for a limited time; return whether it has ended by itself, and well."""
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--here", *arguments, name]
    with (out / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
        )
        try:
            ended = f"exit code {process.wait(60 * minutes)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {minutes:g} minutes"
        finally:
            with contextlib.suppress(ProcessLookupError):  # its engines are left after a crash
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    append(out / "rows.jsonl", {"experiment": name, "ended": ended, "seconds": time.monotonic() - started})
    print(f"{name}: {ended}, {time.monotonic() - started:.0f} s", flush=True)
    return ended == "exit code 0"


def main() -> None:
    """Run the experiments from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiments", nargs="*", default=list(EXPERIMENTS), help=f"of {', '.join(EXPERIMENTS)} [all]")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--trace", type=Path, help="recorded rollouts that consist of token ids")
    parser.add_argument("--dry-run", action="store_true", help="run everything on CPUs in seconds, to test it")
    parser.add_argument("--here", action="store_true", help="run the experiments in this process")
    options = parser.parse_args()
    if unknown := set(options.experiments) - EXPERIMENTS.keys():
        parser.error(f"unknown experiment {', '.join(sorted(unknown))}; choose from {', '.join(EXPERIMENTS)}")
    if options.dry_run:
        options.trace = options.trace or _DRY_TRACE
    if options.trace is None:
        parser.error("--trace is required without --dry-run")
    if options.here:
        for name in options.experiments:
            run_experiment(name, options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = ["--out", str(options.out), "--trace", str(options.trace), *["--dry-run"] * options.dry_run]
    environment = {"HF_HUB_OFFLINE": "1", **(V2_ON_CPUS if options.dry_run else {})}
    succeeded = []
    for name in options.experiments:
        minutes = _DRY_MINUTES if options.dry_run else EXPERIMENTS[name].minutes
        succeeded.append(run_in_process(name, minutes, arguments, options.out, environment))
        rows = [row for row in read(options.out / "rows.jsonl") if "ended" not in row]
        figures = [
            figure
            for name, experiment in EXPERIMENTS.items()
            for figure in experiment.figures_of([row for row in rows if row["experiment"] == name])
        ]
        report(options.out / "figures.json", figures, dry=options.dry_run)
    sys.exit(not all(succeeded))


if __name__ == "__main__":
    main()
