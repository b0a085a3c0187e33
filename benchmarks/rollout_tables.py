"""Tables of the results of :mod:`benchmarks.rollout`, as benchmarks/README.md shows them.

    python -m benchmarks.rollout_tables benchmarks/results/rollout-tiny.json benchmarks/results/rollout-267m.json

A row has the median speed of each mode relative to ``none``, and the ratio of the speeds of ``das`` and ``suffix`` with
its 95 % bootstrap interval, for all epochs and for the first one alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.figures import from_columns
from benchmarks.rollout import figures_of
from benchmarks.rollout_runs import MODELS, MODES, Measurement

OURS, PEER = "das", "suffix"
_LEVEL = 0.95
_MIN_PAIRS = 6
"""The fewest pairs that have an interval. Fewer ones all lie on one side of the median with a probability of more than
5 %, so no interval within them holds with 95 %."""
_RESAMPLES = 4000


class MedianRatio(NamedTuple):
    """The median of ratios with its bootstrap interval."""

    median: float
    low: float
    high: float


def median_ratio(ratios: Sequence[float]) -> MedianRatio:
    """Return the median of the ratios and its bootstrap interval; *ratios* must not be empty."""
    samples = np.random.default_rng(0).choice(np.array(ratios), (_RESAMPLES, len(ratios)))
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(np.median(samples, axis=1), [tail, 1 - tail])
    return MedianRatio(float(np.median(ratios)), float(low), float(high))


def ratios_by_epoch(measurements: Sequence[Measurement], modes: Sequence[str], batch: int) -> dict[int, list[float]]:
    """Return how many times as fast as ``suffix`` ``das`` was with each set that all modes have produced, by epoch."""
    by_key = {measurement.key: measurement for measurement in measurements}
    ratios: dict[int, list[float]] = {}
    for mode, size, epoch, round_ in by_key:
        if (mode, size) == (OURS, batch) and all((other, size, epoch, round_) in by_key for other in modes):
            peer, ours = by_key[PEER, size, epoch, round_], by_key[OURS, size, epoch, round_]
            ratios.setdefault(epoch, []).append(peer.seconds / ours.seconds)
    return ratios


def rows(file: Path) -> Iterator[str]:
    """Yield the table's header and its rows for a result of :mod:`benchmarks.rollout`.

    Raises:
        ValueError: if this is no result of :mod:`benchmarks.rollout`, or lacks ``none``, ``das`` or ``suffix``.
    """
    result = json.loads(file.read_text())
    if "settings" not in result or "measurements" not in result:
        raise ValueError("no result of benchmarks.rollout")
    settings = result["settings"]
    modes = [mode for mode in MODES if mode in settings["modes"]]
    if missing := {"none", OURS, PEER} - set(modes):
        raise ValueError(f"no measurements of {', '.join(sorted(missing))}")
    measurements = [Measurement(**row) for row in from_columns(result["measurements"])]
    values = {
        figure.name: figure.value
        for figure in figures_of(measurements, settings["modes"], settings["batches"], claim_267m=False)
        if figure.peer in ("", "none")
    }
    model = settings["model"]
    others = [mode for mode in modes if mode not in ("none", OURS)]
    head = ["Model, batch", "Pairs", *others, "**das** (lower bound)", "drafter's share", "das / suffix", "interval"]
    yield f"| {' | '.join([*head, 'first epoch'])} |"
    yield "|---" * (len(head) + 1) + "|"
    for batch in settings["batches"]:
        ratios = ratios_by_epoch(measurements, settings["modes"], batch)
        pairs = sum(map(len, ratios.values()))
        speeds = [values[f"speed of {mode}, batch {batch}, median of {pairs} pairs"] for mode in [*others, OURS]]
        bound = values.get(f"speed of das, batch {batch}, lower bound")
        share = values[f"drafter's share of the time, batch {batch}"]
        total = median_ratio([ratio for epoch in ratios.values() for ratio in epoch])
        cells = [
            f"{model.upper() if model in MODELS else model}, {batch}",
            f"{pairs}",
            *(f"{speed:.2f}" for speed in speeds[:-1]),
            f"**{speeds[-1]:.2f}** ({'–' if bound is None else f'{bound:.2f}'})",
            f"{100 * share:.1f} %",
            f"{total.median:.2f}",
            f"{total.low:.2f}–{total.high:.2f}" if pairs >= _MIN_PAIRS else "–",
            f"{np.median(ratios[min(ratios)]):.2f}" if len(ratios) > 1 else "",
        ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables of the given results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="files that benchmarks.rollout has written")
    for file in parser.parse_args().results:
        try:
            print("\n".join(rows(file)), end="\n\n")
        except (OSError, ValueError) as error:
            parser.error(f"{file}: {error}")


if __name__ == "__main__":
    main()
