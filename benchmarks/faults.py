"""Measures what faults cost a job, for each fault and for each way in which Redis keeps its data.

    python -m benchmarks.faults --json FILE

The coordinator, the relay and Redis run as in a job, with stub engines and with trainers that make steps, report
rewards and keep a journal of what they have received. Each fault strikes a job of its own, some times. Then, what the
trainers have received is compared with the history.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, report
from tests.support.message_path import CELLS, Result, Setting, as_table, run_cell


def figures_of(results: Sequence[Result]) -> list[Figure]:
    """Return the figures of all cells together, and of each one."""
    figures = [Figure("rollouts", sum(one.rollouts for one in results), "rollouts", "", ">=", None)]
    figures.append(Figure("faults", sum(len(one.seconds) for one in results), "faults", "", ">=", None))
    for one in [None, *results]:
        where = "" if one is None else f", {one.fault}, {one.setting}"
        found = results if one is None else [one]
        figures += [
            Figure(f"received twice{where}", sum(one.twice for one in found), "rollouts", "", "<=", 0.0),
            Figure(f"lost{where}", sum(one.lost for one in found), "rollouts", "", "<=", 0.0),
            Figure(f"wrong in the history{where}", sum(one.wrong for one in found), "rollouts", "", "<=", 0.0),
        ]
        if one is not None:
            figures += [
                Figure(f"received{where}", one.rollouts, "rollouts", "", ">=", None),
                Figure(f"sampled again{where}", one.sampled_again, "rollouts", "", "<=", None),
                Figure(f"other tokens in the history{where}", one.other_tokens, "rollouts", "", "<=", None),
                Figure(f"not in the history, because Redis lost it{where}", one.gone, "rollouts", "", "<=", None),
                Figure(f"conflicts counted{where}", one.conflicts, "rewards", "", ">=", None),
            ]
        seconds = Result(seconds=[second for one in found for second in one.seconds])
        figures += [
            Figure(f"time to the next step, median{where}", seconds.median_s, "s", "", "<=", None),
            Figure(f"time to the next step, maximum{where}", seconds.max_s, "s", "", "<=", None),
        ]
    return figures


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2, help="how often a fault strikes its job [%(default)s]")
    parser.add_argument("--crashes", type=int, default=16, help="how often the end of a file is lost [%(default)s]")
    parser.add_argument("--only", default="", help="faults whose names contain this [all]")
    parser.add_argument("--seed", type=int, default=1, help="determines when faults begin [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    results = []
    for fault, setting in CELLS:
        if options.only not in f"{fault.name}, {setting}":
            continue
        times = options.crashes if setting is Setting.END_LOST else options.times
        if setting is Setting.REPLICA and fault.name in ("Redis killed", "Redis stopped"):
            times = 1  # there is one replica
        with tempfile.TemporaryDirectory(prefix="benchmark-faults-") as directory:
            results.append(run_cell(fault, setting, Path(directory), times=times, seed=options.seed))
        print(as_table(results[-1:]).splitlines()[-1], flush=True)
    report(options.json, figures_of(results), times=options.times, crashes=options.crashes, seed=options.seed)
    print(as_table(results))


if __name__ == "__main__":
    main()
