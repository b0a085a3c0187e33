"""Compares the makespans of methods, with intervals over problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figures import Figure

OURS = "das-rollout"
RUN_AHEAD = "das-rollout-run-ahead"
DEFAULT = "das-rollout-default"
"""With the draft length that the methods that depend on lengths have, too."""
LENGTHS = "with-lengths"
KNOWN_LENGTHS = "known-lengths"
OWN_METHODS = (
    "constant-threshold",
    LENGTHS,
    DEFAULT,
    OURS,
    "das-rollout-drafts-first",
    RUN_AHEAD,
    "das-rollout-live-siblings",
)
"""This project's method and its variants."""
BOUND = "clairvoyant"
LENGTH_METHODS = (
    KNOWN_LENGTHS,
    LENGTHS,
    "das-classes",
    "das-classes-threshold",
    "das-optimal",
    "das-optimal-threshold",
)
"""Methods whose drafts depend on predicted lengths, or on the real ones."""
MIN_SHARE_OF_BOUND = 0.5
"""Share of the gain with known lengths that predicted lengths aim at."""
MAX_LOSS = 1.005
"""The longest that a job may take with predicted lengths, relative to this project's default policy."""
MIN_SAVED, MIN_SAVED_WITHOUT_HISTORY = 0.7, 0.35
"""Shares of the makespan of plain decoding that this project aims to save: with 128 rollouts on eight engines of a 7B
model, and in the epoch without history."""
_RESAMPLES = 10_000
_LEVEL = 0.95

Row = Mapping[str, Any]
SettingKey = tuple[str, bool, str, int, int]


class Interval(NamedTuple):
    """A ratio of makespans with its bootstrap interval."""

    ratio: float
    low: float
    high: float


def setting_of(row: Row) -> SettingKey:
    """Return what rows that are compared have in common."""
    return row["trace"], row["without_loops"], row["accelerator"], row["engines"], row["batch"]


def name_of(setting: SettingKey) -> str:
    """Return a setting in words."""
    trace, without_loops, accelerator, engines, batch = setting
    return f"{trace}{' without loops' if without_loops else ''}, {accelerator}, {batch} over {engines}"


def block_seconds(row: Row, epoch: int | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the sum of the makespans of each block's training steps, shape (blocks,).

    Args:
        row: a method's result.
        epoch: sum over this epoch only; None for all.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for block, step_epoch, seconds in zip(row["blocks"], row["epochs"], row["seconds"], strict=True):
        sums[block] += seconds if epoch in (None, step_epoch) else 0.0
    return np.array([sums[block] for block in sorted(sums)])


def compare(row: Row, other: Row, epoch: int | None = None) -> Interval:
    """Return the ratio of the makespans of two methods, with a bootstrap interval over blocks of problems."""
    ours, theirs = block_seconds(row, epoch), block_seconds(other, epoch)
    chosen = np.random.default_rng(1).integers(0, len(ours), size=(_RESAMPLES, len(ours)))
    ratios = ours[chosen].sum(axis=1) / theirs[chosen].sum(axis=1)
    tail = (1 - _LEVEL) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(ours.sum() / theirs.sum()), float(low), float(high))


def by_setting(rows: Iterable[Row]) -> dict[SettingKey, dict[str, Row]]:
    """Return the rows by setting and method."""
    settings: defaultdict[SettingKey, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        settings[setting_of(row)][row["method"]] = row
    return dict(settings)


def best_rival(methods: Mapping[str, Row]) -> Row | None:
    """Return the fastest method that is not this project's."""
    rivals = [row for name, row in methods.items() if name not in (*OWN_METHODS, BOUND, KNOWN_LENGTHS)]
    return min(rivals, key=lambda row: float(sum(row["seconds"])), default=None)


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    """Return the figures of the comparison; all of them are simulated."""
    figures = []
    for setting, methods in by_setting(rows).items():
        name, plain = name_of(setting), methods.get("none")
        for method, row in methods.items():
            if plain is not None and method != "none":
                interval = compare(row, plain)
                figures.append(
                    Figure(f"makespan of {method} (simulated), {name}", interval.ratio, "x", "none", "<=", None)
                )
        if KNOWN_LENGTHS in methods and DEFAULT in methods:
            figures += _length_figures(name, methods)
        for method in (OURS, RUN_AHEAD):
            if plain is not None and method in methods:
                saved = 1 - compare(methods[method], plain).ratio
                first = 1 - compare(methods[method], plain, epoch=0).ratio
                target = MIN_SAVED if setting[2:] == ("7b-h100", 8, 128) else None
                figures += [
                    Figure(f"makespan saved by {method} (simulated), {name}", saved, "of none's", "none", ">=", target),
                    Figure(
                        f"makespan of the epoch without history saved by {method} (simulated), {name}",
                        first,
                        "of none's",
                        "none",
                        ">=",
                        MIN_SAVED_WITHOUT_HISTORY,
                    ),
                ]
        ours, rival = methods.get(OURS), best_rival(methods)
        if ours is None or rival is None:
            continue
        interval = compare(ours, rival)
        peer = f"{rival['method']}, the fastest rival"
        figures += [
            Figure(f"makespan of {OURS} (simulated), {name}", interval.ratio, "x", peer, "<=", 1.0),
            Figure(f"upper bound of the 95 % interval, {name}", interval.high, "x", peer, "<=", None),
        ]
    return figures


def _length_figures(name: str, methods: Mapping[str, Row]) -> list[Figure]:
    """Return what the policies that depend on lengths gain over the one that does not."""
    figures = []
    for method in LENGTH_METHODS:
        if method not in methods:
            continue
        for epoch in (None, *sorted(set(methods[method]["epochs"]))):
            interval = compare(methods[method], methods[DEFAULT], epoch)
            case = f"{method} (simulated), {name}{'' if epoch is None else f', epoch {epoch}'}"
            target = MAX_LOSS if method == LENGTHS and epoch is None else None
            figures += [
                Figure(f"makespan of {case}", interval.ratio, "x", DEFAULT, "<=", target),
                Figure(f"lower bound of the 95 % interval, {case}", interval.low, "x", DEFAULT, "<=", None),
                Figure(f"upper bound of the 95 % interval, {case}", interval.high, "x", DEFAULT, "<=", None),
            ]
    if LENGTHS in methods:
        gain, bound = (1 / compare(methods[method], methods[DEFAULT]).ratio - 1 for method in (LENGTHS, KNOWN_LENGTHS))
        if bound > 0:
            name = f"gain of {LENGTHS} over {DEFAULT} (simulated), {name}"
            unit = "of that with known lengths"
            figures.append(Figure(name, gain / bound, unit, KNOWN_LENGTHS, ">=", MIN_SHARE_OF_BOUND))
    return figures
