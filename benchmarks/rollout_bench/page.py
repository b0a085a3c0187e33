"""One self-contained HTML page with the comparison's tables and plots.

    python -m benchmarks.rollout_bench.page RESULTS.json … --output FILE.html [--plots DIRECTORY]

writes the page of several result files, and each of its plots as an SVG file.
"""

from __future__ import annotations

import argparse
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import compact_svg
from benchmarks.rollout_bench.accelerators import ACCELERATORS
from benchmarks.rollout_bench.comparison import (
    BOUND,
    KNOWN_LENGTHS,
    OURS,
    OWN_METHODS,
    Row,
    SettingKey,
    block_seconds,
    by_setting,
    compare,
    name_of,
)
from benchmarks.rollout_bench.methods import RIVALS

_END_SHARES = (*range(0, 95, 5), *range(95, 101))
"""The shares of rollouts, in percent; each has a row with times."""
_PLOTTED = 5
"""Number of rivals in the plot of the tail, the fastest ones."""
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, td:last-child, th:last-child { text-align: left; }
tr.ours { font-weight: 600; }
figure { margin: 1rem 0; background: white; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
"""
_INTRODUCTION = """
<p>Every figure on this page is <strong>simulated</strong>: recorded rollouts are verified against the drafts of each
method, and a model of the GPU gives the duration of each step. Each method was tuned on one half of the problems and
is reported on the other. Ratios are relative to plain decoding; brackets contain bootstrap intervals (95 %) over blocks
of problems.</p>
"""


def write_page(file: Path, rows: Sequence[Row]) -> None:
    """Write the page.

    Args:
        file: the HTML file.
        rows: the results of all methods, as in the results file.
    """
    sections = [_section(setting, methods) for setting, methods in by_setting(rows).items()]
    models = "".join(
        f"<li><code>{one.name}</code>: {html.escape(one.description)}; {1e3 * one.forward_s(1, 0):.1f} ms for one "
        f"token, {1e3 * one.forward_s(512, 0):.1f} ms for 512</li>"
        for one in ACCELERATORS.values()
        if any(row["accelerator"] == one.name for row in rows)
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Rollout benchmark</title>\n<style>{_STYLE}</style>\n<h1>Rollout benchmark</h1>\n"
        f"{_INTRODUCTION}<ul>{models}</ul>\n{''.join(sections)}</html>\n"
    )


def _section(setting: SettingKey, methods: Mapping[str, Row]) -> str:
    return (
        f"<h2>{html.escape(name_of(setting))}</h2>\n"
        f'<div class="scroll">{_table(methods)}</div>\n<figure>{_plot(methods)}</figure>\n'
    )


def _table(methods: Mapping[str, Row]) -> str:
    plain = methods.get("none")
    lines = [
        "<table><tr><th>Method</th><th>Seconds</th><th>Job</th><th>Epoch without history</th><th>Later epochs</th>"
        "<th>Accepted per step</th><th>Drafted per step</th><th>Tuned values</th><th>Origin</th></tr>"
    ]
    for name, row in sorted(methods.items(), key=lambda item: float(sum(item[1]["seconds"]))):
        cells = [html.escape(name), f"{sum(row['seconds']):.1f}"]
        cells += [_ratio(row, plain, None), _ratio(row, plain, 0), _later(row, plain)]
        cells += [f"{row['accepted_per_step']:.2f}", f"{row['drafted_per_step']:.2f}"]
        cells += [html.escape(_values(row["values"])), html.escape(RIVALS[name].origin)]
        style = ' class="ours"' if name == OURS else ""
        lines.append(f"<tr{style}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _ratio(row: Row, plain: Row | None, epoch: int | None) -> str:
    if plain is None or row is plain:
        return "–"
    interval = compare(row, plain, epoch)
    return f"{interval.ratio:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _later(row: Row, plain: Row | None) -> str:
    if plain is None or row is plain or max(row["epochs"]) == 0:
        return "–"
    ours, theirs = (block_seconds(one) - block_seconds(one, 0) for one in (row, plain))
    return f"{ours.sum() / theirs.sum():.3f}"


def _values(values: Mapping[str, Any]) -> str:
    named = {name: value for name, value in values.items() if name != "longest_first"}
    order = ["arrival order"] if values.get("longest_first") is False else []
    return ", ".join([*(f"{name.replace('_', ' ')} {value}" for name, value in named.items()), *order])


def _plot(methods: Mapping[str, Row]) -> str:
    """Plot the unfinished rollouts over time, in the first and the last training step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "rollout_bench", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    fastest = sorted(methods, key=lambda name: float(sum(methods[name]["seconds"])))
    shown = [name for name in fastest if name not in ("none", BOUND, KNOWN_LENGTHS, *OWN_METHODS)][:_PLOTTED]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    shares = 1 - np.array(_END_SHARES) / 100
    for axis, step, title in zip(axes, (0, -1), ("first training step", "last training step"), strict=True):
        for name in ["none", *shown, OURS, BOUND]:
            if name in methods:
                axis.step(methods[name]["ends"][step], shares, where="post", label=name, lw=2.5 if name == OURS else 1)
        axis.set(title=f"{title} (simulated)", xlabel="seconds", ylabel="unfinished rollouts (share)")
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = drawing.getvalue()
    return compact_svg(text[text.index("<svg") :])


def main() -> None:
    """Write the page of several result files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_bench.page", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="files that benchmarks.rollout_bench has written")
    parser.add_argument("--output", type=Path, required=True, help="HTML file")
    parser.add_argument("--plots", type=Path, help="directory for SVG files of the plots, named after their settings")
    options = parser.parse_args()
    try:
        rows = [row for file in options.results for row in json.loads(file.read_text())["rows"]]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    write_page(options.output, rows)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for setting, methods in by_setting(rows).items():
            name = name_of(setting).replace(",", "").replace(" ", "-")
            (options.plots / f"{name}.svg").write_text(_plot(methods))


if __name__ == "__main__":
    main()
