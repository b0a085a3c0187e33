"""The terminal application of ``rollout top``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import ClassVar

from redis.exceptions import RedisError
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from rollout_worker.cli.top import view
from rollout_worker.cli.top.live_job import LiveJob

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

        Args:
            name: name of the job.
            read: returns the job's current state; None while no coordinator runs.
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
        self._part("header").update(view.header(job, time.time()))
        self._part("engines").update(view.engines_table(job))
        self._part("tail").update(view.tail(job))
        self._part("acceptance").update(view.acceptance(job))
        self._part("running").update(view.running_table(job, _MAX_ROWS) if job.running else "")

    def action_freeze(self) -> None:
        """Stop to update the view, or continue."""
        self._frozen = not self._frozen
        self.sub_title = "frozen" if self._frozen else ""

    def _part(self, name: str) -> Static:
        return self.query_one(f"#{name}", Static)
