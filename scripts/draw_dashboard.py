"""Draw a dashboard of the chart from the data of a Prometheus server, for the documentation.

    python scripts/draw_dashboard.py http://localhost:9090 job.json FILE.png --minutes 10

The panels have the titles, queries, units and places that Grafana reads, but they are drawn by Matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter, date2num
from matplotlib.ticker import EngFormatter, FuncFormatter, PercentFormatter

DASHBOARDS = Path(__file__).parents[1] / "charts" / "das-rollout" / "files" / "dashboards"
_COLUMNS, _POINTS, _MAX_LEGEND = 24, 240, 6
_FORMATS = {
    "percentunit": PercentFormatter(1.0),
    "bytes": EngFormatter("B"),
    "s": EngFormatter("s"),
    "short": FuncFormatter(lambda value, _: f"{value:,.4g}"),
}


def read_series(url: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """Return the result of a range query: a list of ``metric`` and ``values``."""
    step = max(1.0, (end - start) / _POINTS)
    arguments = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{arguments}", timeout=30) as reply:  # noqa: S310
        result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
    return result


def legend_of(template: str, metric: dict[str, str]) -> str:
    """Return a legend with the values of its labels."""
    for label, value in metric.items():
        template = template.replace(f"{{{{{label}}}}}", value)
    return template


def draw_panel(axes: Axes, panel: dict[str, Any], url: str, start: float, end: float) -> None:
    """Draw the series of a panel."""
    lines = 0
    for target in panel["targets"]:
        query = target["expr"]
        for variable, value in {"$namespace": ".*", "$job": ".*", "$__rate_interval": "30s"}.items():
            query = query.replace(variable, value)
        for series in read_series(url, query, start, end):
            times, values = zip(*series["values"], strict=True)
            numbers = [math.nan if value == "NaN" else float(value) for value in values]
            label = legend_of(target["legendFormat"], series["metric"]) if lines < _MAX_LEGEND else None
            axes.plot(date2num([time_of(one) for one in times]), numbers, linewidth=1.4, label=label)
            lines += 1
    axes.set_title("\n".join(textwrap.wrap(panel["title"], 52)), loc="left", fontsize=10, fontweight="bold")
    axes.yaxis.set_major_formatter(_FORMATS[panel["fieldConfig"]["defaults"]["unit"]])
    axes.xaxis.set_major_locator(AutoDateLocator(maxticks=5))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
    axes.set_xlim(*date2num([time_of(start), time_of(end)]))
    axes.grid(alpha=0.2)
    axes.tick_params(labelsize=8)
    if lines:
        axes.legend(fontsize=7, loc="upper left", framealpha=0.5)
    else:
        axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", color="gray")


def time_of(seconds: float) -> Any:
    """Return a Unix time in a form that Matplotlib reads."""
    return matplotlib.dates.num2date(seconds / 86400)


def draw(dashboard: dict[str, Any], url: str, file: Path, start: float, end: float) -> None:
    """Draw a dashboard to an image file."""
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    per_row = _COLUMNS // panels[0]["gridPos"]["w"]
    height = len({panel["gridPos"]["y"] for panel in panels})
    with pyplot.style.context("dark_background"):
        figure, grid = pyplot.subplots(height, per_row, figsize=(5.2 * per_row, 2.6 * height), squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        rows = sorted({panel["gridPos"]["y"] for panel in panels})
        for panel in panels:
            place = panel["gridPos"]
            axes = grid[rows.index(place["y"])][place["x"] // place["w"]]
            axes.set_visible(True)
            draw_panel(axes, panel, url, start, end)
        figure.suptitle(dashboard["title"], x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.tight_layout(rect=(0, 0, 1, 0.985))
        figure.savefig(file, dpi=70)


def main() -> None:
    """Draw the dashboard that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of Prometheus")
    parser.add_argument("dashboard", help="file name of the dashboard, such as job.json")
    parser.add_argument("file", type=Path, help="image to write")
    parser.add_argument("--minutes", type=float, default=10.0, help="time to show, up to now")
    arguments = parser.parse_args()
    now = time.time()
    content = json.loads((DASHBOARDS / arguments.dashboard).read_text())
    draw(content, arguments.url, arguments.file, now - 60 * arguments.minutes, now)


if __name__ == "__main__":
    main()
