"""The sections of a report: which plots it has, and how each is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import plotly.graph_objects as go

from rollout_worker.report.analysis.acceptance import by_age, by_position
from rollout_worker.report.analysis.engine_time import engine_times
from rollout_worker.report.analysis.governor import engine_histories
from rollout_worker.report.analysis.rewards import rewards_of
from rollout_worker.report.analysis.steps import Comparison, Step, compare, steps_of
from rollout_worker.report.analysis.without_drafts import slowdowns
from rollout_worker.report.plots.acceptance import (
    acceptance_by_age,
    acceptance_by_position,
    accepted_by_source,
    accepted_by_step,
)
from rollout_worker.report.plots.engines import cost_over_time, saved_over_time, time_by_engine, trials_over_time
from rollout_worker.report.plots.gantt import drawn_note, gantt
from rollout_worker.report.plots.lengths import calibration_plot, lengths_by_step, lengths_of_problem
from rollout_worker.report.plots.makespan import makespans
from rollout_worker.report.plots.rewards import rewards_by_step, staleness_by_step
from rollout_worker.report.plots.running import running_in_job, running_in_step
from rollout_worker.report.plots.style import Plot, Variant
from rollout_worker.report.recording import JobRecording
from rollout_worker.report.viewed_problems import choose_problems

_Item = TypeVar("_Item")

_MAX_STEPS = 24
"""Number of steps of which plots of single steps can be shown; of more steps, these are spread evenly."""
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
            Section("acceptance", "Accepted draft tokens", self._acceptance()),
            Section("lengths", "Lengths", self._lengths()),
            Section("training", "Rewards and staleness", self._training()),
            Section("engines", "Engines", self._engines()),
        ]
        return [section for section in sections if section.plots]

    def _makespans(self) -> Plot:
        return Plot(
            "makespans",
            f"Makespan of each {self._unit}",
            "Shorter is better. The red part of a bar is the tail, in which at most a quarter of the rollouts were "
            "still running. Hatched bars are estimates by the engines' cost models; all other bars were measured.",
            [Variant("", makespans(self._comparisons, self._slowdowns, self._unit))],
        )

    def _running(self) -> Plot:
        variants = [
            Variant(self._label(one.step), running_in_step(one, self._slowdowns)) for one in _spread(self._comparisons)
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
        )

    def _gantt(self) -> Plot:
        steps = _spread(self._steps)
        return Plot(
            "gantt",
            "Rollouts on the engines",
            "Each bar is a rollout, in rows per engine. White space is idle capacity; the shaded time is the tail."
            + drawn_note(steps),
            [Variant(self._label(step), gantt(step)) for step in steps],
            choice=self._unit,
        )

    def _acceptance(self) -> list[Plot]:
        plots = [
            self._single(
                "accepted-by-step",
                f"By {self._unit}",
                f"Each decoding step yields one token plus this number of accepted draft tokens. It usually rises as "
                f"the history grows from {self._unit} to {self._unit}.",
                lambda: accepted_by_step(self._comparisons, self._unit),
                shown=True,
            ),
            self._single(
                "accepted-by-source",
                "By source",
                "Where the accepted draft tokens came from: the problem's history, the rollout's own text, its "
                "siblings, or the cross-problem pool.",
                lambda: accepted_by_source(self._steps, self._unit),
                shown=any(one.rollout.draft_tokens_by_source for step in self._steps for one in step.scored),
            ),
            self._single(
                "acceptance-by-position",
                "By position in the draft",
                "Later positions are reached less often; the draft policy ends a draft where the next token no longer "
                "pays. Counted since the engines started, over all draft modes.",
                lambda: acceptance_by_position(by_position(self._recording.positions)),
                shown=bool(self._recording.positions),
            ),
            self._single(
                "acceptance-by-age",
                "By age of the history",
                "Drafts from rollouts of older policies are accepted less often if the policy changes quickly. Counted "
                "for all jobs that share the history; older counts have less weight.",
                lambda: acceptance_by_age(by_age(self._recording.acceptance_by_age)),
                shown=bool(self._recording.acceptance_by_age),
            ),
        ]
        return [plot for plot in plots if plot is not None]

    def _lengths(self) -> list[Plot]:
        lengths = self._recording.lengths
        problems = choose_problems(lengths, _MAX_PROBLEMS)
        plots = [
            self._single(
                "lengths-by-step",
                f"By {self._unit}",
                f"Quantiles of the lengths of each {self._unit}'s rollouts. The longest rollouts decide the makespan.",
                lambda: lengths_by_step(self._steps, self._unit),
                shown=True,
            ),
            self._single(
                "calibration",
                "Calibration of predicted lengths",
                "Quantiles predicted from earlier generations of a problem, compared with the share of its rollouts "
                "that stayed below. Points above the diagonal mean that rollouts were shorter than predicted.",
                lambda: calibration_plot(lengths),
                shown=any(len({entry.generation for entry in entries}) > 1 for entries in lengths.values()),
            ),
        ]
        found = [plot for plot in plots if plot is not None]
        if problems:
            found.append(
                Plot(
                    "lengths-of-problem",
                    "By problem",
                    "Each point is a rollout. The orange lines are quantiles that the earlier generations of the same "
                    "problem had predicted; a missing line is beyond all observed lengths.",
                    [Variant(problem, lengths_of_problem(lengths[problem])) for problem in problems],
                    choice="problem",
                )
            )
        return found

    def _training(self) -> list[Plot]:
        rewards = [(step.number, of_step) for step in self._steps if (of_step := rewards_of(step)) is not None]
        plots = [
            self._single(
                "rewards",
                "Rewards",
                "Mean reward with its standard error. Groups whose rewards are all equal have no gradient in GRPO.",
                lambda: rewards_by_step(rewards, self._unit),
                shown=bool(rewards),
            ),
            self._single(
                "staleness",
                "Staleness",
                "How many weight versions the oldest token of a rollout was behind the newest published version when "
                "the rollout ended. 0 is on-policy.",
                lambda: staleness_by_step(self._steps, self._recording.measurements, self._unit),
                shown=bool(self._recording.measurements),
            ),
        ]
        return [plot for plot in plots if plot is not None]

    def _engines(self) -> list[Plot]:
        times = engine_times(self._recording.measurements)
        histories = engine_histories(self._recording.measurements)
        drafting = {engine: history for engine, history in histories.items() if any(history.base_ms)}
        plots = [
            self._single(
                "engine-time",
                "Where the time went",
                "Time of each engine from its first measurement to its last one, baselines included. Red is capacity "
                "that was lost although rollouts were waiting.",
                lambda: time_by_engine(times),
                shown=any(time.total for time in times.values()),
                wide=True,
            ),
            self._single(
                "saved",
                "What drafting saved over time",
                "Share of the decoding time that drafting saved since the point before, by the cost model; below zero "
                "it cost time. In shaded times, the governor had disabled drafting.",
                lambda: saved_over_time(drafting, self._start),
                shown=any(history.saved for history in drafting.values()),
                wide=True,
            ),
            self._single(
                "trials",
                "The governor's stops and trials",
                "How often drafting was disabled, and how many tokens were drafted only to measure whether it would "
                "pay again.",
                lambda: trials_over_time(drafting, self._start),
                shown=bool(drafting),
            ),
            self._single(
                "cost-model",
                "The cost model",
                "Predicted duration of a decoding step without its tokens, and the time of each further token that is "
                "verified. Drafts are worth verifying if a token is cheap in comparison with a step.",
                lambda: cost_over_time(drafting, self._start),
                shown=bool(drafting),
            ),
        ]
        return [plot for plot in plots if plot is not None]

    def _label(self, step: Step) -> str:
        return f"{self._unit} {step.number}"

    @staticmethod
    def _single(
        name: str, title: str, explanation: str, build: Callable[[], go.Figure], *, shown: bool, wide: bool = False
    ) -> Plot | None:
        return Plot(name, title, explanation, [Variant("", build())], wide=wide) if shown else None


def _spread(items: Sequence[_Item]) -> list[_Item]:
    """Return at most a limited number of items, among them the first and the last one."""
    if len(items) <= _MAX_STEPS:
        return list(items)
    return [items[round(index * (len(items) - 1) / (_MAX_STEPS - 1))] for index in range(_MAX_STEPS)]
