"""Pauses the decoding of an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout_worker.engine.generation import ResponseGenerator
from rollout_worker.engine.vllm_client import VllmClient


class DecodingPause:
    """Pauses decoding until a caller resumes it, and while weights are loaded."""

    def __init__(self, client: VllmClient, generator: ResponseGenerator) -> None:
        self._client, self._generator = client, generator
        self._is_held = False
        """Whether a caller has paused decoding."""
        self._is_loading = False

    async def hold(self, *, finish_running: bool) -> None:
        """See :meth:`Engine.pause`."""
        if not finish_running:
            await self._hold()
            return
        self._generator.pause_admission()
        try:
            await self._generator.wait_idle()
            await self._hold()
        finally:
            self._generator.resume_admission()

    async def _hold(self) -> None:
        self._is_held = True
        await self._client.call(self._client.llm.pause_generation(mode="keep", clear_cache=False))

    async def release(self) -> None:
        """See :meth:`Engine.resume`."""
        self._is_held = False
        if not self._is_loading:
            await self._client.call(self._client.llm.resume_generation())

    @asynccontextmanager
    async def while_loading(self, *, is_drained: bool, clear_cache: bool) -> AsyncIterator[None]:
        """Decode nothing within this context, which no two tasks may enter at a time.

        Args:
            is_drained: whether vLLM has no response.
            clear_cache: whether keys and values are computed again, including those of running responses.
        """
        self._is_loading = True
        try:
            # Clearing the cache preempts running requests, so that their keys and values are computed again.
            mode = "wait" if is_drained and not self._is_held else "keep"
            await self._client.call(self._client.llm.pause_generation(mode=mode, clear_cache=clear_cache))
            try:
                yield
            finally:
                if not self._client.stopped and not self._is_held:
                    await self._client.call(self._client.llm.resume_generation())
        finally:
            self._is_loading = False
