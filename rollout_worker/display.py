"""What the command line shows: live progress and the table of a finished job."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout_worker.job.dataset import DatasetTrainer, Progress
from rollout_worker.job.report import JobReport, Mode, Pass

_REFRESH_S = 0.25
_QUIET_REFRESH_S = 10.0

MODE_NAMES = {
    Mode.DAS: "history",
    Mode.SELF: "own text",
    Mode.PLAIN: "plain vLLM",
}


async def show_progress(trainer: DatasetTrainer, console: Console) -> None:
    """Show where *trainer* stands until cancelled: live on a terminal, else a line now and then."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_QUIET_REFRESH_S)
            console.print(_line(trainer.progress), soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_panel(trainer.progress), refresh=True)
            await asyncio.sleep(_REFRESH_S)


def _line(progress: Progress) -> Text:
    left, status = progress.seconds_left, progress.status
    text = (
        f"epoch {progress.epoch}/{progress.epochs} · {MODE_NAMES[progress.mode]}: {progress.done}/{progress.total} "
        f"rollouts, {status.get('assigned', 0)} running, {status.get('tokens_per_second', 0.0):,.0f} tokens/s, "
        f"{progress.accepted_per_step:.2f} accepted per step"
    )
    return Text(text + (f", {left:.0f} s left" if left is not None else ""))


def _panel(progress: Progress) -> RenderableType:
    return Group(ProgressBar(total=max(progress.total, 1), completed=progress.done, width=60), _line(progress))


def report_table(report: JobReport) -> Table:
    """A row for each epoch and mode."""
    epochs = max((done.epoch for done in report.passes), default=0)
    # fits in 80 columns
    table = Table(title=f"RolloutJob {report.name}, {epochs} epochs", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("drafts\nfrom", no_wrap=True)
    for name in ("makespan", "tokens\n/s", "drafted\n/step", "accepted\n/step", "longest", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    for done in report.passes:
        if done.mode is Mode.DAS and done.epoch > 1 and len(report.passes) > epochs:
            table.add_row()
        table.add_row(*_row(done))
    return table


def _row(done: Pass) -> list[str]:
    first = done.mode is Mode.DAS
    speculating = done.mode is not Mode.PLAIN
    return [
        str(done.epoch) if first else "",
        done.checkpoint if first else "",
        MODE_NAMES[done.mode],
        f"{done.makespan:.1f} s" if done.makespan else "–",
        f"{done.tokens_per_second:,.0f}" if done.tokens_per_second else "–",
        f"{done.drafted_per_step:.2f}" if speculating else "–",
        f"{done.accepted_per_step:.2f}" if speculating else "–",
        f"{done.longest:,}",
        f"{done.mean_reward:.3f}" if done.mean_reward is not None else "–",
    ]


def report_lines(report: JobReport) -> list[str]:
    """What else there is to say about a finished job."""
    lines = []
    for row in report.figures():
        target = f", target {row['op']} {row['target']}" if row["target"] is not None else ""
        lines.append(f"{row['name']}: {row['value']:.2f}{target}")
    if report.rollouts_done_before:
        lines.append(
            f"{report.rollouts_done_before} rollouts were done by an earlier run; makespan and tokens/s count this "
            "run's part alone."
        )
    if report.dead_letters:
        lines.append(f"[yellow]{report.dead_letters} finished rollouts could not be read; see the dead letters.[/]")
    if report.corrupt_records:
        lines.append(
            f"[yellow]{report.corrupt_records} history records could not be read and were skipped; the log above "
            "names them.[/]"
        )
    return lines


def train_tiny_model(directory: Path, seed: int, console: Console) -> None:
    """Make the examples' model, showing how far it is."""
    from rollout_worker.tiny_model import TrainingProgress, ensure

    shown = 0.0

    def progress(now: TrainingProgress) -> None:
        nonlocal shown
        if now.step == now.steps or time.monotonic() - shown > (1.0 if console.is_terminal else 15.0):
            shown = time.monotonic()
            console.print(
                f"step {now.step}/{now.steps}, loss {now.loss:.3f}", end="\r" if console.is_terminal else "\n"
            )

    started = time.monotonic()
    checkpoints = ensure(directory, seed=seed, progress=progress)
    how = f"trained in {time.monotonic() - started:.0f} s" if shown else "there already"
    names = ", ".join(checkpoint.name for checkpoint in checkpoints)
    console.print(f"{directory}: {len(checkpoints)} checkpoints ({how}): {names}", markup=False, soft_wrap=True)
