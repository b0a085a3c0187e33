"""The command ``rollout top``."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollout_api.protocol.exit_codes import EXIT_ENGINE
from rollout_worker.cli.exit_errors import exit_with_message
from rollout_worker.cli.job_address import (
    FoundJob,
    JobArgument,
    JobHistoryRedis,
    JobManifest,
    JobRedis,
    JobUid,
    StateDirectory,
    find_job,
)
from rollout_worker.runtime.command_line import exit_with_error

if TYPE_CHECKING:
    from rollout_worker.cli.top.live_job import LiveJob

app = typer.Typer()
_WIDTH = 140
"""Columns of the output if it is no terminal."""
console = Console(width=None if sys.stdout.isatty() else _WIDTH)

_REPORT_WAIT_S = 1.5
"""Seconds within which all engines report their running rollouts after they are observed."""


@app.command()
def top(
    job: JobArgument = None,
    file: JobManifest = None,
    redis: JobRedis = None,
    history_redis: JobHistoryRedis = None,
    uid: JobUid = None,
    state_dir: StateDirectory = Path(".rollout"),
    once: Annotated[bool, typer.Option("--once", help="Print the current state once, and exit.")] = False,
) -> None:
    """Watch a job live: its engines, the running rollouts and their predicted lengths, and what drafting saves.

    If the output is no terminal, the state is printed once.
    """
    from rollout_worker.cli.job_status import read_snapshot
    from rollout_worker.cli.top.view import whole_view

    with exit_with_message(file, redis or "", interrupted="the job continues"):
        found = find_job(job, file=file, redis_url=redis, uid=uid, state=state_dir)
        history = history_redis or found.history_url
        if once or not console.is_terminal:
            live = asyncio.run(_read_once(found, history))
            if live is None:
                with found.connected() as server:
                    state = read_snapshot(server, found).state_text
                exit_with_error(EXIT_ENGINE, f"job {found.name} is {state}; see `rollout status`")
            console.print(whole_view(live, time.time()))
        else:
            asyncio.run(_watch(found, history))


async def _read_once(found: FoundJob, history_url: str) -> LiveJob | None:
    from rollout_worker.cli.top.reader import LiveJobReader

    reader = LiveJobReader(found.redis_url, found.uid, history_url)
    try:
        if await reader.read() is None:
            return None
        await asyncio.sleep(_REPORT_WAIT_S)
        return await reader.read()
    finally:
        await reader.close()


async def _watch(found: FoundJob, history_url: str) -> None:
    from rollout_worker.cli.top.app import TopApp
    from rollout_worker.cli.top.reader import LiveJobReader

    reader = LiveJobReader(found.redis_url, found.uid, history_url)
    try:
        await TopApp(found.name, reader.read).run_async()
    finally:
        await reader.close()
