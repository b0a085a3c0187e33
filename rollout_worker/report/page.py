"""Renders a recording as one HTML page, which works without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from rollout_api.protocol.draft_sources import DRAFT_SOURCES
from rollout_worker.report.analysis.summary import Summary, findings, summarize
from rollout_worker.report.plots.style import SOURCE_NAMES
from rollout_worker.report.recording import JobRecording, ViewedProblem, ViewedRollout
from rollout_worker.report.sections import ReportSections, Section

_ASSETS = Path(__file__).parent / "assets"


def render_page(recording: JobRecording) -> str:
    """Return the page about a recording as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    # The filter tojson also escapes what could end the script element around it.
    environment.policies["json.dumps_function"] = partial(json.dumps, cls=PlotlyJSONEncoder)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    summary = summarize(recording)
    sections = ReportSections(recording).build()
    sources = [{"name": SOURCE_NAMES[source], "code": code} for code, source in enumerate(DRAFT_SOURCES, 1)]
    return environment.get_template("page.html").render(
        recording=recording,
        recorded_at=datetime.fromtimestamp(recording.recorded_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        tiles=_tiles(recording, summary),
        findings=findings(recording, summary),
        sections=sections,
        sources=sources,
        figures=_figures(sections),
        problems=[_problem(problem) for problem in recording.problems],
        plotly=get_plotlyjs(),
    )


def _figures(sections: Sequence[Section]) -> dict[str, list[Any]]:
    return {
        plot.name: [variant.figure.to_plotly_json() for variant in plot.variants]
        for section in sections
        for plot in section.plots
    }


def _problem(problem: ViewedProblem) -> dict[str, Any]:
    return {
        "id": problem.problem_id,
        "prompt": problem.prompt,
        "omitted": problem.num_omitted,
        "rollouts": [_rollout(rollout) for rollout in problem.rollouts],
    }


def _rollout(rollout: ViewedRollout) -> dict[str, Any]:
    return {
        "id": rollout.rollout_id,
        "version": rollout.weight_version,
        "generation": rollout.generation,
        "reason": rollout.finish_reason,
        "reward": rollout.reward,
        "length": rollout.num_tokens,
        "tokens": rollout.tokens,
        "sources": rollout.sources,
    }


def _tiles(recording: JobRecording, summary: Summary) -> list[dict[str, str]]:
    """Return the figures at the top: value, label, and what it means."""
    unit = "epochs" if recording.is_dataset else "steps"
    tiles = [
        {
            "value": _duration(summary.seconds),
            "label": "makespan",
            "text": f"all {summary.num_steps:,} {unit}, {summary.num_rollouts:,} rollouts",
        },
        {
            "value": f"{summary.tokens_per_second:,.0f}",
            "label": "tokens/s",
            "text": f"{summary.num_tokens:,} response tokens",
        },
        {
            "value": f"{summary.accepted_per_step:.2f}",
            "label": "accepted per step",
            "text": f"so rollouts take {1 / (1 + summary.accepted_per_step):.0%} of the decoding steps",
        },
    ]
    if summary.measured_saving is not None:
        tiles.append(_saving(summary.measured_saving, "measured", "against the same rollouts without drafts"))
    if summary.estimated_saving is not None:
        tiles.append(_saving(summary.estimated_saving, "estimated", "by the engines' cost models"))
    tiles.append(
        {
            "value": f"{summary.tail:.0%}",
            "label": "tail",
            "text": "share of the makespan, at its end, in which fewer than half as many rollouts ran as at the peak",
        }
    )
    return tiles


def _saving(share: float, how: str, text: str) -> dict[str, str]:
    change = "saved" if round(share, 2) >= 0 else "lost"
    return {"value": f"{abs(share):.0%}", "label": f"{change}, {how}", "text": text}


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
