"""Renders a recording as one HTML page, which works without a network: its sections, and how each plot is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from rollout_api.protocol.history_encoding import DRAFT_SOURCES
from rollout_tools.report.engines import (
    cost_over_time,
    engine_histories,
    engine_times,
    saved_over_time,
    time_by_engine,
    trials_over_time,
)
from rollout_tools.report.recording import JobRecording, choose_problems
from rollout_tools.report.rollout_plots import (
    acceptance_by_position,
    accepted_by_source,
    accepted_by_step,
    by_position,
    calibration_plot,
    drafts_by_class,
    lengths_by_step,
    lengths_of_problem,
)
from rollout_tools.report.step_plots import (
    MAX_BARS,
    drawn_note,
    gantt,
    makespans,
    rewards_by_step,
    running_in_job,
    running_in_step,
    staleness_by_step,
)
from rollout_tools.report.steps import Comparison, compare, rewards_of, slowdowns, steps_of
from rollout_tools.report.style import SOURCE_NAMES, Plot, Variant
from rollout_tools.report.summary import Summary, findings, summarize

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
        figures={
            plot.name: [variant.figure.to_plotly_json() for variant in plot.variants]
            for section in sections
            for plot in section.plots
        },
        problems=[asdict(problem) for problem in recording.problems],
        plotly=get_plotlyjs(),
    )


def _tiles(recording: JobRecording, summary: Summary) -> list[dict[str, str]]:
    """Return the figures at the top: value, label, and what it means."""
    unit = "epochs" if recording.is_dataset else "steps"
    tiles = [
        (
            _duration(summary.seconds),
            "makespan",
            f"all {summary.num_steps:,} {unit}, {summary.num_rollouts:,} rollouts",
        ),
        (f"{summary.tokens_per_second:,.0f}", "tokens/s", f"{summary.num_tokens:,} response tokens"),
        (
            f"{summary.accepted_per_step:.2f}",
            "accepted per step",
            f"so rollouts take {1 / (1 + summary.accepted_per_step):.0%} of the decoding steps",
        ),
    ]
    for share, how, text in (
        (summary.measured_saving, "measured", "against the same rollouts without drafts"),
        (summary.estimated_saving, "estimated", "by the engines' cost models"),
    ):
        if share is not None:
            change = "saved" if round(share, 2) >= 0 else "lost"
            tiles.append((f"{abs(share):.0%}", f"{change}, {how}", text))
    text = "share of the makespan, at its end, in which fewer than half as many rollouts ran as at the peak"
    tiles.append((f"{summary.tail:.0%}", "tail", text))
    return [dict(zip(("value", "label", "text"), tile, strict=True)) for tile in tiles]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_Item = TypeVar("_Item")

_MAX_STEPS = 24
"""Maximum number of plots of single steps; of more steps, these are spread evenly."""
_MAX_ALL_BARS = 16_000
"""Number of rollouts in the Gantt charts of all steps together."""
_MAX_PROBLEMS = 24
"""Number of problems whose lengths can be shown."""


@dataclass(frozen=True)
class Section:
    """A part of the page with some plots."""

    name: str
    title: str
    plots: list[Plot]


class ReportSections:
    """Builds the sections of the report about one recording."""

    def __init__(self, recording: JobRecording) -> None:
        self._recording = recording
        self._unit = "epoch" if recording.is_dataset else "step"
        self._all_steps = steps_of(recording)
        comparisons = compare(self._all_steps)
        if not comparisons:  # only evaluation
            comparisons = [Comparison(step, {}) for step in sorted(self._all_steps, key=lambda step: step.number)]
        self._comparisons = comparisons
        self._steps = [one.step for one in comparisons]
        self._slowdowns = slowdowns(recording.measurements)
        self._start = min(step.start for step in self._all_steps)

    def build(self) -> list[Section]:
        """Return all sections that have something to show."""
        sections = [
            Section("time", "Makespan and tail", [self._makespans(), self._running(), self._gantt()]),
            Section("acceptance", "Accepted draft tokens", list(self._acceptance())),
            Section("lengths", "Lengths", list(self._lengths())),
            Section("training", "Rewards and staleness", list(self._training())),
            Section("engines", "Engines", list(self._engines())),
        ]
        return [section for section in sections if section.plots]

    def _makespans(self) -> Plot:
        return Plot(
            "makespans",
            f"Makespan of each {self._unit}",
            "Shorter is better. The red part of a bar is the tail, in which fewer than half as many rollouts were "
            "running as at the peak. Hatched bars are estimates by the engines' cost models; all other bars were "
            "measured.",
            [Variant("", makespans(self._comparisons, self._slowdowns, self._unit))],
        )

    def _running(self) -> Plot:
        variants = [
            Variant(str(one.step.number), running_in_step(one, self._slowdowns)) for one in _spread(self._comparisons)
        ]
        whole = Variant("whole job", running_in_job(self._all_steps, self._recording.measurements))
        return Plot(
            "running",
            "Running rollouts over time",
            "The earlier a line falls to zero, the shorter the makespan; a long flat end is a tail. The dotted line is "
            "an estimate: the time of each engine is stretched by how much longer its cost model expects the same "
            "tokens to take without drafts.",
            [*variants, whole],
            choice=self._unit,
            initial=len(variants) - 1,
        )

    def _gantt(self) -> Plot:
        largest = max(min(len(step.sampled), MAX_BARS) for step in self._steps)
        steps = _spread(self._steps, max(2, min(_MAX_STEPS, _MAX_ALL_BARS // max(1, largest))))
        return Plot(
            "gantt",
            "Rollouts on the engines",
            "Each bar is a rollout, in rows per engine. Gaps are idle capacity; the shaded time is the tail."
            + drawn_note(steps),
            [Variant(str(step.number), gantt(step)) for step in steps],
            choice=self._unit,
            initial=len(steps) - 1,
        )

    def _acceptance(self) -> Iterator[Plot]:
        yield _single(
            "accepted-by-step",
            f"By {self._unit}",
            f"Each decoding step yields one token plus this number of accepted draft tokens. It usually rises as the "
            f"history grows from {self._unit} to {self._unit}.",
            accepted_by_step(self._comparisons, self._unit),
        )
        if any(one.rollout.draft_tokens_by_source for step in self._steps for one in step.scored):
            yield _single(
                "accepted-by-source",
                "By source",
                "Where the accepted draft tokens came from: the problem's history, the rollout's own text, its "
                "siblings, or the cross-problem pool.",
                accepted_by_source(self._steps, self._unit),
            )
        if self._recording.positions:
            yield _single(
                "acceptance-by-position",
                "By position in the draft",
                "Later positions are reached less often; the draft policy ends a draft where the next token no longer "
                "pays. Counted since the engines started, over all draft modes.",
                acceptance_by_position(by_position(self._recording.positions)),
            )
        classes = self._recording.classes
        if any(one.steps for one in classes):
            engines = list(dict.fromkeys(one.engine for one in classes))
            variants = [
                Variant(name, drafts_by_class([one for one in classes if one.engine == name])) for name in engines
            ]
            if len(engines) > 1:
                variants.insert(0, Variant("all engines", drafts_by_class(classes)))
            yield Plot(
                "drafts-by-class",
                "By length class",
                "Draft tokens that the policy permitted, that were verified, and that were accepted, per step of a "
                "rollout in each length class. A rollout may change its class while it runs. Counted since the engines "
                "started, over all draft modes.",
                variants,
                choice="engine",
                wide=False,
            )

    def _lengths(self) -> Iterator[Plot]:
        lengths = self._recording.lengths
        yield _single(
            "lengths-by-step",
            f"By {self._unit}",
            f"Quantiles of the lengths of each {self._unit}'s rollouts. The longest rollouts decide the makespan.",
            lengths_by_step(self._steps, self._unit),
        )
        if any(len({entry.generation for entry in entries}) > 1 for entries in lengths.values()):
            yield _single(
                "calibration",
                "Calibration of predicted lengths",
                "Quantiles predicted from earlier generations of a problem, compared with the share of its rollouts "
                "that stayed below. Points above the diagonal mean that rollouts were shorter than predicted.",
                calibration_plot(lengths),
            )
        if problems := choose_problems(lengths, _MAX_PROBLEMS):
            yield Plot(
                "lengths-of-problem",
                "By problem",
                "Each point is a rollout. The orange lines are quantiles that the earlier generations of the same "
                "problem had predicted; a missing line is beyond all observed lengths.",
                [Variant(problem, lengths_of_problem(lengths[problem])) for problem in problems],
                choice="problem",
            )

    def _training(self) -> Iterator[Plot]:
        if rewards := [(step.number, of_step) for step in self._steps if (of_step := rewards_of(step)) is not None]:
            yield _single(
                "rewards",
                "Rewards",
                "Mean reward with its standard error. Groups whose rewards are all equal have no gradient in GRPO.",
                rewards_by_step(rewards, self._unit),
            )
        if self._recording.measurements:
            yield _single(
                "staleness",
                "Staleness",
                "How many weight versions the oldest token of a rollout was behind the newest published version when "
                "the rollout ended. 0 is on-policy.",
                staleness_by_step(self._steps, self._recording.measurements, self._unit),
            )

    def _engines(self) -> Iterator[Plot]:
        times = engine_times(self._recording.measurements, self._recording.ended)
        histories = engine_histories(self._recording.measurements)
        drafting = {
            engine: history
            for engine, history in histories.items()
            if any(one.cost_base_seconds for _, one in history.measured)
        }
        if any(time.total for time in times.values()):
            yield _single(
                "engine-time",
                "Where the time went",
                "Time of each engine from its first measurement to its last one, baselines included. Red is capacity "
                "that was lost although rollouts were waiting for it.",
                time_by_engine(times),
                wide=True,
            )
        if any(history.saved for history in drafting.values()):
            yield _single(
                "saved",
                "What drafting saved over time",
                "Share of the decoding time that drafting saved since the point before, by the cost model; below zero "
                "it cost time. In shaded times, the governor had disabled drafting.",
                saved_over_time(drafting, self._start),
                wide=True,
            )
        if drafting:
            yield _single(
                "trials",
                "The governor's stops and trials",
                "How often drafting was disabled, and how many tokens were drafted only to measure whether it would "
                "pay again.",
                trials_over_time(drafting, self._start),
            )
            yield _single(
                "cost-model",
                "The cost model",
                "Predicted duration of a decoding step without its tokens, and the time of each further token that is "
                "verified. Drafts are worth verifying if a token is cheap in comparison with a step.",
                cost_over_time(drafting, self._start),
            )


def _single(name: str, title: str, explanation: str, figure: go.Figure, *, wide: bool = False) -> Plot:
    return Plot(name, title, explanation, [Variant("", figure)], wide=wide)


def _spread(items: Sequence[_Item], most: int = _MAX_STEPS) -> list[_Item]:
    """Return at most *most* items, spread evenly, among them the first and the last one."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
