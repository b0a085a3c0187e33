"""The LoRA adapters of an engine, and which responses are generated with them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH_ADAPTERS = 2
"""Adapters that one batch may hold: that of responses which began before an update, and the newest."""
KEPT_ADAPTERS = 8
"""Adapters in main memory. vLLM reads one that it has dropped again from its directory, and dies if that is gone."""


def unheeded(done: asyncio.Future[Any]) -> None:
    """Let a failure pass that nobody waits for; the engine is dead or stopped then, as others will find."""
    if not done.cancelled():
        done.exception()


@dataclass(eq=False)
class Adapter:
    """An adapter that vLLM has loaded."""

    request: Any
    """vLLM's ``LoRARequest``."""
    version: int
    users: int = 0
    """Responses that are generated with it."""


class Adapters:
    """The adapters of one ``AsyncLLM``."""

    def __init__(self, llm: Any) -> None:
        self.current: Adapter | None = None
        """What new responses are generated with; None: the full weights alone."""
        self._llm = llm
        self._ids = itertools.count(1)
        self._loaded: list[Adapter] = []
        self._unused = asyncio.Event()
        self._unused.set()
        self._removals: set[asyncio.Task[Any]] = set()

    async def load(self, directory: Path, version: int) -> None:
        """Generate new responses with the adapter in *directory* from now on; vLLM's errors leave all as it was."""
        from vllm.lora.request import LoRARequest

        number = next(self._ids)
        adapter = Adapter(LoRARequest(f"{version}-{number}", number, str(directory)), version)
        await self._llm.add_lora(adapter.request)
        self._loaded.append(adapter)
        self.current = adapter
        self._remove_unused()

    @contextmanager
    def use(self) -> Iterator[Adapter | None]:
        """Generate a response with the current adapter, if there is one."""
        adapter = self.current
        if adapter is None:
            yield None
            return
        adapter.users += 1
        self._unused.clear()
        try:
            yield adapter
        finally:
            adapter.users -= 1
            if not any(each.users for each in self._loaded):
                self._unused.set()
            self._remove_unused()

    async def unused(self) -> None:
        """Wait until no response is generated with any."""
        await self._unused.wait()

    def leave(self) -> None:
        """Generate new responses with the full weights alone."""
        self.current = None
        self._remove_unused()

    def _remove_unused(self) -> None:
        for adapter in [each for each in self._loaded if not each.users and each is not self.current]:
            self._loaded.remove(adapter)
            removal = asyncio.ensure_future(self._llm.remove_lora(adapter.request.lora_int_id))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            removal.add_done_callback(unheeded)
