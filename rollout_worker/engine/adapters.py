"""The LoRA adapters of an engine, and which responses are generated with them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker.engine.vllm_client import ignore_failure


@dataclass(eq=False)
class Adapter:
    """An adapter that vLLM has loaded."""

    lora_request: Any
    """vLLM's ``LoRARequest``."""
    version: int
    """The weight version of the full weights together with this adapter."""
    num_users: int = 0
    """Number of responses that are being generated with it."""


class Adapters:
    """The adapters of one ``AsyncLLM``. An adapter is removed when no response uses it any more."""

    def __init__(self, llm: Any) -> None:
        self.current: Adapter | None = None
        """The adapter with which new responses are generated; None for the full weights alone."""
        self._llm = llm
        self._ids = itertools.count(1)
        self._loaded: list[Adapter] = []
        self._unused = asyncio.Event()
        self._unused.set()
        self._removals: set[asyncio.Task[Any]] = set()

    async def load(self, directory: Path, version: int) -> None:
        """Generate new responses with the adapter in *directory*. If vLLM fails to load it, nothing changes."""
        from vllm.lora.request import LoRARequest

        number = next(self._ids)
        adapter = Adapter(LoRARequest(f"{version}-{number}", number, str(directory)), version)
        await self._llm.add_lora(adapter.lora_request)
        self._loaded.append(adapter)
        self.current = adapter
        self._remove_unused()

    @contextmanager
    def use(self) -> Iterator[Adapter | None]:
        """Keep the current adapter, if there is one, while a response is generated with it."""
        adapter = self.current
        if adapter is None:
            yield None
            return
        adapter.num_users += 1
        self._unused.clear()
        try:
            yield adapter
        finally:
            adapter.num_users -= 1
            if not any(adapter.num_users for adapter in self._loaded):
                self._unused.set()
            self._remove_unused()

    async def wait_unused(self) -> None:
        """Wait until no response is generated with any adapter."""
        await self._unused.wait()

    def deactivate(self) -> None:
        """Generate new responses with the full weights alone."""
        self.current = None
        self._remove_unused()

    def _remove_unused(self) -> None:
        for adapter in [loaded for loaded in self._loaded if not loaded.num_users and loaded is not self.current]:
            self._loaded.remove(adapter)
            removal = asyncio.ensure_future(self._llm.remove_lora(adapter.lora_request.lora_int_id))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            removal.add_done_callback(ignore_failure)
