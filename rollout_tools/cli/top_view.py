"""Renders what ``rollout top`` shows, on a live screen or once."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from redis.exceptions import RedisError
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from rollout_api.length_stats import LengthClass
from rollout_api.protocol.status import CoordinatorStatus, EngineEntry
from rollout_store.history.engine_reports import OwnEngineReport
from rollout_tools.cli.job_status import duration, engine_state, engines_with_newest_weights, problems, unread_results
from rollout_tools.cli.top import LiveJob, RunningRollout, acceptance_of

_DISABLED = "disabled: it did not pay"
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 30
_SPARK_WIDTH = 60
_RATE_WIDTH = 20
SOURCE_NAMES = {
    "history": "history",
    "self": "own text",
    "siblings": "siblings",
    "cross_problem": "other problems",
}
"""Source of drafts in counters → its name for people."""


def header(job: LiveJob, now: float) -> RenderableType:
    """Return the summary of a job."""
    status = job.status
    facts = [
        _fact("rollouts", f"{status['assigned']:,} running, {status['waiting']:,} waiting"),
        _fact("speed", f"{status['tokens_per_second']:,.0f} tokens/s"),
        _fact("left", _left(status)),
        _fact("requests", f"{status['requests']:,} open"),
        _fact("drafts", f"{status['accepted_per_step']:.2f} accepted per step"),
        _fact("saved", _saved(job)),
        _fact("weights", f"version {status['weight_version']}, on {engines_with_newest_weights(status)}"),
        _fact("staleness", _staleness(job, now)),
    ]
    parts: list[RenderableType] = [_title(status)]
    if status["total"]:
        filled = round(_SPARK_WIDTH * min(1.0, status["done"] / status["total"]))
        parts.append(Text.assemble(("━" * filled, "green"), ("━" * (_SPARK_WIDTH - filled), "dim")))
    parts.append(Columns(facts, padding=(0, 3)))
    if unread := unread_results(status):
        parts.append(_fact("unread", unread))
    parts += [Text(f"! {problem.what}. {problem.remedy}", "yellow") for problem in problems(status)]
    return Group(*parts)


def engines_table(job: LiveJob) -> Table:
    """Return a table with a row for each engine."""
    table = _engines_table("rollouts")
    newest = job.status["weight_version"]
    for engine in sorted(job.status["engines"], key=lambda one: one["name"]):
        behind = newest - engine["version"]
        table.add_row(
            engine["name"],
            Text(str(engine["version"]) + (f" (−{behind})" if behind > 0 else ""), "yellow" if behind > 0 else ""),
            f"{engine['assigned']}/{engine['max_running']}",
            f"{engine['tokens_per_second']:,.0f}",
            f"{engine['counters'].get('kv_cache_usage', 0.0):.0%}",
            *_savings(engine["counters"]),
            _drafting(engine),
        )
    return table


def own_engines_view(history: str, engines: Sequence[OwnEngineReport]) -> RenderableType:
    """Return what is known of the engines that use a history without a job."""
    if not engines:
        return Text(f"No engine without a job has used the history {history} in the last seconds.")
    table = _engines_table("requests", has_kv_cache=False)
    for engine in engines:
        disabled = engine.counters.get("drafting_disabled")
        table.add_row(
            engine.name,
            str(engine.version),
            str(engine.running),
            f"{engine.tokens_per_second:,.0f}",
            *_savings(engine.counters),
            Text(_DISABLED, "yellow") if disabled else Text("enabled", "green"),
        )
    recorded, lost = (
        sum(engine.counters[name] for engine in engines) for name in ("recorded_rollouts", "lost_rollouts")
    )
    parts: list[RenderableType] = [
        Text.assemble((history, "bold"), f": {recorded:,.0f} rollouts recorded, {lost:,.0f} lost"),
        table,
        _acceptance([engine.labeled_counters for engine in engines]),
    ]
    if classes := _classes_table((engine.name, engine.labeled_counters) for engine in engines):
        parts.append(classes)
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def _engines_table(running: str, *, has_kv_cache: bool = True) -> Table:
    kv_cache = ("KV cache",) if has_kv_cache else ()
    right = ("version", running, "tokens/s", *kv_cache, "accepted/step", "acceptance", "saved")
    table = _table("engine", right=right)
    table.add_column("drafting")
    return table


def _savings(counters: Mapping[str, float]) -> tuple[str, str, str]:
    """Return an engine's accepted tokens per step, its acceptance, and the share of time that drafting saves."""
    drafted, accepted = counters.get("draft_tokens", 0.0), counters.get("accepted_tokens", 0.0)
    # Each decoding step of a rollout samples one token that was not drafted.
    steps = counters.get("tokens", 0.0) - accepted
    without = counters.get("timed_seconds_without_drafts", 0.0)
    return (
        f"{accepted / steps:.2f}" if steps > 0 else "–",
        f"{accepted / drafted:.0%}" if drafted else "–",
        f"{1 - counters['timed_seconds'] / without:.0%}" if without else "–",
    )


def tail(job: LiveJob) -> RenderableType:
    """Return the number of running rollouts over time, and how many of them are long."""
    running = [one.assigned for one in job.measurements]
    lines = [Text.assemble(("running  ", "dim"), sparkline(running), f"  {running[-1] if running else 0}")]
    speeds = [one.tokens_per_second for one in job.measurements]
    lines.append(Text.assemble(("tokens/s ", "dim"), sparkline(speeds), f"  {speeds[-1] if speeds else 0:,.0f}"))
    if job.running:
        longest = job.running[0]
        lines.append(
            Text(
                f"{job.num_beyond_median} of {len(job.running)} running rollouts are longer than half of the earlier "
                f"ones of their problems. The one that probably ends last, a rollout of the problem "
                f"{longest.progress.problem_id}, has {longest.progress.tokens:,} tokens, and probably "
                f"{longest.expected_remaining:,.0f} to go."
            )
        )
    return Group(*lines)


def running_table(job: LiveJob, limit: int) -> Table:
    """Return a table of the running rollouts that probably end last.

    It has at most *limit* rows.
    """
    shown = job.running[:limit]
    table = _table("problem", right=("sample", "tokens"))
    table.add_column("length so far, and as predicted", no_wrap=True)
    for name in ("50 %", "90 %", "limit", "running"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    scale = max((_scale(one) for one in shown), default=1.0)
    for one in shown:
        progress = one.progress
        table.add_row(
            Text(progress.problem_id, overflow="ellipsis", no_wrap=True),
            str(progress.sample),
            f"{progress.tokens:,}",
            length_bar(one, scale),
            _tokens(one.median),
            _tokens(one.high),
            f"{progress.max_tokens:,}",
            duration(progress.running_seconds),
            one.engine,
        )
    return table


def acceptance(job: LiveJob) -> RenderableType:
    """Return which share of the draft tokens was accepted, by source and by position of the draft."""
    return _acceptance([engine["labeled_counters"] for engine in job.status["engines"]])


def _acceptance(counters: Sequence[Mapping[str, Mapping[str, int]]]) -> RenderableType:
    sources, positions = acceptance_of(counters, "source"), acceptance_of(counters, "position")
    table = _table("drafts from", right=("verified", "accepted", ""))
    table.add_column("", no_wrap=True)
    for row in sources:
        filled = round(row.rate * _RATE_WIDTH)
        table.add_row(
            SOURCE_NAMES.get(row.label, row.label),
            f"{row.drafted:,}",
            f"{row.accepted:,}",
            f"{row.rate:.0%}",
            Text("█" * filled, "green") + Text("·" * (_RATE_WIDTH - filled), "dim"),
        )
    parts: list[RenderableType] = [table] if sources else []
    if positions:
        first, last = positions[0], positions[-1]
        line = sparkline([row.rate for row in positions], highest=1.0)
        ends = f"position {first.label} {first.rate:.0%} ", f" {last.rate:.0%} position {last.label}"
        parts.append(Text.assemble(("accepted by position of the draft: ", "dim"), ends[0], line, ends[1]))
    return Group(*parts)


def classes_table(job: LiveJob) -> Table | None:
    """Return the running rollouts and their draft budgets by length class; None if no policy determines classes."""
    engines = sorted(job.status["engines"], key=lambda one: one["name"])
    return _classes_table((engine["name"], engine["labeled_counters"]) for engine in engines)


def _classes_table(engines: Iterable[tuple[str, Mapping[str, Mapping[str, int]]]]) -> Table | None:
    table = _table("length classes", right=[name for one in LengthClass for name in (one.value, "budget")])
    for name, counters in engines:
        if running := counters.get("class_rollouts"):
            cells = []
            for one in LengthClass:
                steps, budget = (counters[f"class_{what}"].get(one.value, 0) for what in ("steps", "budget_tokens"))
                cells += [f"{running.get(one.value, 0):,}", f"{budget / steps:.1f}" if steps else "–"]
            table.add_row(name, *cells)
    return table if table.row_count else None


def whole_view(job: LiveJob, now: float, *, rows: int = 15) -> RenderableType:
    """Return everything, one part below the other."""
    parts: list[RenderableType] = [header(job, now), engines_table(job), tail(job), acceptance(job)]
    if classes := classes_table(job):
        parts.append(classes)
    if job.running:
        parts.append(running_table(job, rows))
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH, *, highest: float | None = None) -> Text:
    """Return the last values as blocks whose height is proportional to the value.

    Args:
        values: the values, not negative.
        width: maximum number of values that are shown.
        highest: value of the highest block; None for the highest value that is shown.
    """
    shown = values[-width:]
    highest = max(shown, default=0.0) if highest is None else highest
    if highest <= 0:
        return Text(_BLOCKS[0] * len(shown), "cyan")
    top = len(_BLOCKS) - 1
    return Text("".join(_BLOCKS[min(top, round(value / highest * top))] for value in shown), "cyan")


def length_bar(rollout: RunningRollout, scale: float) -> Text:
    """Return a bar of a rollout's length, with marks for the predicted median and the 90 % quantile.

    *scale* is the number of tokens to which the whole width corresponds.
    """
    filled = min(_BAR_WIDTH, round(rollout.progress.tokens / scale * _BAR_WIDTH))
    cells = ["█"] * filled + ["·"] * (_BAR_WIDTH - filled)
    styles = ["magenta" if (rollout.surprise or 0.0) >= 0.9 else "green"] * filled + ["dim"] * (_BAR_WIDTH - filled)
    for quantile, mark in ((rollout.median, "│"), (rollout.high, "┃")):
        if quantile is not None and quantile <= scale:
            place = min(_BAR_WIDTH - 1, int(quantile / scale * _BAR_WIDTH))
            cells[place], styles[place] = mark, "yellow"
    bar = Text()
    for cell, style in zip(cells, styles, strict=True):
        bar.append(cell, style)
    return bar


def _title(status: CoordinatorStatus) -> Text:
    done = f"{status['done']:,}" + (f" of {status['total']:,}" if status["total"] else "")
    epoch = f", epoch {status['epoch']}" if status["epoch"] else ""
    return Text.assemble(
        (status["job"], "bold"), f" is {status['state']}: {done} rollouts have ended{epoch}", overflow="fold"
    )


def _fact(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value)


def _left(status: CoordinatorStatus) -> str:
    left, tail_left = status["remaining_seconds"], status["tail_seconds"]
    if left is None:
        return "unknown" if status["requests"] else "nothing"
    longest = f", {duration(tail_left)} for the longest rollout" if tail_left else ""
    return f"about {duration(left)} for the open requests{longest}" if left else "nothing"


def _saved(job: LiveJob) -> str:
    saved = job.status["saved"]
    if saved is None:
        return "unknown yet"
    seconds = duration(abs(job.seconds_saved))
    if saved < 0:
        return f"nothing; decoding takes {-saved:.0%} longer ({seconds})"
    return f"{saved:.0%} of the decoding time ({seconds})"


def _staleness(job: LiveJob, now: float) -> str:
    staleness = job.staleness(now)
    return "–" if staleness is None else f"{staleness[0]:.1f} versions, at most {staleness[1]}"


def _drafting(engine: EngineEntry) -> Text:
    state = engine_state(engine)
    if state == "without speculation":
        return Text(state, "yellow" if engine["speculation_disabled"] else "dim")
    if engine["counters"].get("drafting_disabled"):
        return Text(_DISABLED, "yellow")
    return Text("enabled", "green") if state == "running" else Text(state, "dim")


def _scale(one: RunningRollout) -> float:
    return max(one.progress.tokens, one.high or 0.0, one.median or 0.0, 1.0)


def _tokens(count: float | None) -> str:
    return "–" if count is None else f"{count:,.0f}"


def _table(first: str, right: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, max_width=28, overflow="ellipsis", no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


_INTERVAL_S = 1.0
_MAX_ROWS = 200


class TopApp(App[None]):
    """Shows a job until the user quits."""

    CSS = """
    Screen { background: $background; }
    .part { height: auto; margin: 0 1 1 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit"),
        Binding("space", "freeze", "Freeze or continue"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, name: str, read: Callable[[], Awaitable[LiveJob | None]]) -> None:
        """Create the application; ``run`` starts it.

        *read* returns the job's current state; None while no coordinator runs.
        """
        super().__init__()
        self.title = f"rollout top {name}"
        self._read, self._frozen = read, False

    def compose(self) -> ComposeResult:
        """Create the parts of the view."""
        with VerticalScroll():
            yield Static("Waiting for the coordinator's status …", id="header", classes="part")
            yield Static(id="engines", classes="part")
            yield Static(id="tail", classes="part")
            yield Static(id="acceptance", classes="part")
            yield Static(id="classes", classes="part")
            yield Static(id="running", classes="part")
        yield Footer()

    async def on_mount(self) -> None:
        """Begin to update the view."""
        self.set_interval(_INTERVAL_S, self.refresh_view)
        await self.refresh_view()

    async def refresh_view(self) -> None:
        """Read the job's state and show it."""
        if self._frozen:
            return
        try:
            job = await self._read()
        except RedisError as error:
            self._part("header").update(f"[yellow]Redis cannot be reached: {error}[/]")
            return
        if job is None:
            self._part("header").update("No coordinator runs for this job. See `rollout status`.")
            return
        self._part("header").update(header(job, time.time()))
        self._part("engines").update(engines_table(job))
        self._part("tail").update(tail(job))
        self._part("acceptance").update(acceptance(job))
        self._part("classes").update(classes_table(job) or "")
        self._part("running").update(running_table(job, _MAX_ROWS) if job.running else "")

    def action_freeze(self) -> None:
        """Stop to update the view, or continue."""
        self._frozen = not self._frozen
        self.sub_title = "frozen" if self._frozen else ""

    def _part(self, name: str) -> Static:
        return self.query_one(f"#{name}", Static)
