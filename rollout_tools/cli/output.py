"""Output of commands: errors with exit codes, the progress of a job, and the table of a finished one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from redis.exceptions import RedisError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout_api.errors import RolloutClientError
from rollout_api.manifest.rollout_job import ManifestError
from rollout_api.protocol.status import (
    EXIT_DEADLINE,
    EXIT_ENGINE,
    EXIT_INTERRUPTED,
    EXIT_MANIFEST,
    EXIT_MODEL,
    EXIT_REDIS,
    EXIT_STATE,
)
from rollout_api.redis_client.connection import RedisUnusableError, explain_error
from rollout_api.status_token import StatusTokenError
from rollout_head.dataset.report import EpochMode, EpochRun, JobReport
from rollout_head.dataset.trainer import DatasetProgress, DatasetTrainer
from rollout_store.history.metadata import HistoryMismatchError
from rollout_store.job.admission_rules import AdmissionError
from rollout_store.job.engines import EngineError
from rollout_store.models.model_source import ModelError
from rollout_store.runtime.output import exit_with_error
from rollout_tools.cli.job_address import JobAddressError
from rollout_tools.launch.job_state import DeadlineError, StateError

error_console = Console(stderr=True)


@contextmanager
def exit_with_message(
    file: Path | None = None,
    redis: str = "",
    *,
    interrupted: str = "finished rollouts are kept, and the same command continues from there",
) -> Iterator[None]:
    """Turn expected errors into a message and an exit code; unexpected errors keep their traceback.

    Messages name the manifest *file*, and say what an interruption by the user means. Errors of Redis may come from the
    server at the URL *redis*.
    """
    prefix = f"{file}: " if file is not None else ""
    try:
        yield
    except ManifestError as error:
        _fail_manifest(file, error)
    except ModelError as error:
        exit_with_error(EXIT_MODEL, f"{prefix}{error}")
    except (RedisUnusableError, HistoryMismatchError) as error:
        exit_with_error(EXIT_REDIS, str(error))
    except RedisError as error:
        if not redis:
            raise
        exit_with_error(EXIT_REDIS, str(explain_error(error, redis)))
    except (EngineError, AdmissionError, RolloutClientError) as error:
        exit_with_error(EXIT_ENGINE, str(error))
    except (StateError, JobAddressError, StatusTokenError) as error:
        exit_with_error(EXIT_STATE, str(error))
    except DeadlineError as error:
        exit_with_error(EXIT_DEADLINE, str(error))
    except (KeyboardInterrupt, asyncio.CancelledError):
        exit_with_error(EXIT_INTERRUPTED, f"interrupted; {interrupted}")


def _fail_manifest(file: Path | None, error: ManifestError) -> NoReturn:
    count = len(error.errors)
    error_console.print(
        f"[bold red]error:[/] {escape(str(file))} has {count} error{'s' if count > 1 else ''}:", highlight=False
    )
    for field in error.errors:
        error_console.print(f"  {field.path}: {field.message}", markup=False, soft_wrap=True, highlight=False)
    sys.exit(EXIT_MANIFEST)


_LIVE_INTERVAL_S = 0.25
"""Seconds between two updates of a job's progress on a terminal."""
_LOG_INTERVAL_S = 10.0
"""Seconds between two lines about a job's progress elsewhere."""

_MODE_NAMES = {
    EpochMode.DAS: "history",
    EpochMode.NON_SPECULATIVE: "plain vLLM",
}


async def show_progress(trainer: DatasetTrainer, console: Console) -> None:
    """Show the progress of *trainer* until cancelled: live on a terminal, otherwise as a line every few seconds."""
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            console.print(_progress_line(trainer.progress), soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_progress_panel(trainer.progress), refresh=True)
            await asyncio.sleep(_LIVE_INTERVAL_S)


def _progress_line(progress: DatasetProgress) -> Text:
    left, status = progress.remaining_seconds, progress.status
    text = (
        f"epoch {progress.epoch}/{progress.epochs} · {_MODE_NAMES[progress.mode]}: {progress.done}/{progress.total} "
        f"rollouts, {status.get('assigned', 0)} running, {status.get('tokens_per_second', 0.0):,.0f} tokens/s, "
        f"{progress.accepted_per_step:.2f} accepted per step"
    )
    return Text(text + (f", about {left:.0f} s left" if left is not None else ""))


def _progress_panel(progress: DatasetProgress) -> RenderableType:
    bar = ProgressBar(total=max(progress.total, 1), completed=progress.done, width=60)
    return Group(bar, _progress_line(progress))


def report_table(report: JobReport) -> Table:
    """Build a table with a row for each epoch and mode, which fits into 80 columns."""
    epochs = max((run.epoch for run in report.epoch_runs), default=0)
    compared = len(report.epoch_runs) > epochs
    table = Table(title=f"RolloutJob {report.name}, {epochs} epochs", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    table.add_column("drafts\nfrom", no_wrap=True)
    for name in ("makespan", "tokens\n/s", "drafted\n/step", "accepted\n/step", "longest", "reward"):
        table.add_column(name, justify="right", no_wrap=True)
    if compared:
        table.add_column("speed", justify="right", no_wrap=True)
    for run in report.epoch_runs:
        if run.mode is EpochMode.DAS and run.epoch > 1 and compared:
            table.add_row()
        speed_up = report.speed_up(run.epoch) if run.mode is EpochMode.DAS else None
        table.add_row(*_cells(run), *([f"{speed_up:.2f}×"] if speed_up else []))
    return table


def _cells(run: EpochRun) -> list[str]:
    first = run.mode is EpochMode.DAS
    speculative = run.mode is not EpochMode.NON_SPECULATIVE
    return [
        str(run.epoch) if first else "",
        run.checkpoint if first else "",
        _MODE_NAMES[run.mode],
        f"{run.makespan:.1f} s" if run.makespan else "–",
        f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else "–",
        f"{run.drafted_per_step:.2f}" if speculative else "–",
        f"{run.accepted_per_step:.2f}" if speculative else "–",
        f"{run.longest:,}",
        f"{run.mean_reward:.3f}" if run.mean_reward is not None else "–",
    ]


def report_lines(report: JobReport) -> list[str]:
    """Build the lines below the table: what a reader has to know about it, and warnings."""
    lines = []
    if any(report.speed_up(run.epoch) for run in report.epoch_runs):
        lines.append("speed: makespan of plain vLLM / makespan with drafts from the history")
    if report.rollouts_from_earlier_runs:
        lines.append(
            f"{report.rollouts_from_earlier_runs} rollouts were finished by an earlier run. Makespan and tokens/s "
            "count only this run."
        )
    for kind, errors in report.environment_errors.items():
        lines.append(
            f"[yellow]{errors['count']} rollouts got no reward from the environment ({kind}). The first one is of the "
            f"problem {escape(errors['problem'])}: {escape(errors['message'])}[/]"
        )
    if report.environment_restarts:
        lines.append(f"[yellow]The environment's process was restarted {report.environment_restarts} times.[/]")
    if report.dead_letters:
        lines.append(
            f"[yellow]{report.dead_letters} finished rollouts could not be read. They are kept as dead letters.[/]"
        )
    if report.corrupt_records:
        lines.append(
            f"[yellow]{report.corrupt_records} history records could not be read and were skipped. "
            "The log above names them.[/]"
        )
    return lines
