"""Loads weights into a running engine."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rollout_api.protocol.messages import UpdateMode
from rollout_store.job.engine_errors import EngineError, translate_errors
from rollout_store.models.model_source import ModelError
from rollout_worker.engine.adapters import Adapters
from rollout_worker.engine.checkpoint_check import CheckpointCheck, check_checkpoint
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.generation import DecodingPause, ResponseGenerator
from rollout_worker.engine.limits import TRANSFER_CONNECT_TIMEOUT_S, TRANSFER_RETRY_INTERVAL_S
from rollout_worker.engine.vllm_client import VllmClient, WeightVersionTracker

Updates = AsyncIterator[dict[str, Any]]
"""The arguments for vLLM's ``update_weights``, until the trainer has sent all weights. Raises EngineError if the
trainer ends before. Asking for the next element means that the previous one was received."""


class WeightLoader:
    """Loads full weights and adapters into an engine. If loading fails, the previous weights stay in use."""

    def __init__(
        self,
        client: VllmClient,
        config: EngineConfig,
        generator: ResponseGenerator,
        weight_versions: WeightVersionTracker,
        adapters: Adapters,
        pause: DecodingPause,
    ) -> None:
        self._client, self._config, self._generator, self._pause = client, config, generator, pause
        self._weight_versions, self._adapters = weight_versions, adapters
        self._loading = asyncio.Lock()
        self._directory: Path | None = config.model
        """Directory of the current weights; None if they came from a trainer's memory."""

    @property
    def weight_version(self) -> int:
        """The version that samples new responses."""
        adapter = self._adapters.current
        return self._weight_versions.version if adapter is None else adapter.version

    async def load_checkpoint(self, directory: Path, version: int, mode: UpdateMode) -> float:
        """See :meth:`Engine.load_weights`."""
        try:
            await asyncio.to_thread(check_checkpoint, directory, self._config.model)
        except ModelError as error:
            raise EngineError(self._still_serving(error)) from None
        return await asyncio.shield(self._load_checkpoint(directory, version, mode))

    async def _load_checkpoint(self, directory: Path, version: int, mode: UpdateMode) -> float:
        async def load() -> None:
            try:
                await self._call("das_load_weights", str(directory), action=f"loading weights from {directory}")
            except EngineError as error:
                await self._restore(error)
                raise EngineError(self._still_serving(error)) from error
            self._directory = directory

        async with self._unused_adapters(mode):
            return await self._load_paused(load, version, mode)

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """See :meth:`Engine.init_weight_transfer`."""
        host, port = init_info.get("master_address"), init_info.get("master_port")
        async with self._loading:
            if host is not None and port is not None:
                await asyncio.to_thread(_await_listener, host, port)  # vLLM would wait for minutes
            try:
                await self._call("das_init_weight_transfer", init_info, action="joining the trainer's group")
            except EngineError:
                with suppress(EngineError):  # ranks that have joined would keep its resources
                    await self._client.collective_rpc("shutdown_weight_transfer_engine", action="leaving the group")
                raise

    async def load_transferred(
        self, updates: Updates, version: int, mode: UpdateMode, update_info: dict[str, Any] | None
    ) -> float:
        """See :meth:`Engine.load_transferred`."""
        return await asyncio.shield(self._load_transferred(updates, version, mode, update_info))

    async def _load_transferred(
        self, updates: Updates, version: int, mode: UpdateMode, update_info: dict[str, Any] | None
    ) -> float:
        is_partial = self._config.sends_differences
        try:
            check = await asyncio.to_thread(CheckpointCheck, self._config.model, is_partial=is_partial)
            if update_info is not None:
                check.add(update_info)
                check.finish()
                check.clear()
        except ModelError as error:
            raise EngineError(self._still_serving(error)) from None
        async with self._unused_adapters(mode):
            try:
                first = await anext(updates)
            except StopAsyncIteration:
                raise EngineError(self._still_serving("the trainer has sent no weights")) from None
            except EngineError as error:
                raise EngineError(self._still_serving(error)) from error

            async def load() -> None:
                await self._receive(first, updates, check)

            return await self._load_paused(load, version, mode)

    async def _receive(self, first: dict[str, Any], updates: Updates, check: CheckpointCheck) -> None:
        is_changed = False
        try:
            check.add(first)
            await self._call("das_start_weight_update", action="starting a weight update")
            is_changed = True
            await self._call("das_update_weights", first, action="receiving weights")
            async for update in updates:
                check.add(update)
                await self._call("das_update_weights", update, action="receiving weights")
            check.finish()
            await self._call("das_finish_weight_update", action="finishing a weight update")
        except (EngineError, ModelError) as error:
            if self._client.stopped:
                raise
            await self._client.collective_rpc("das_abort_weight_update", action="aborting a weight update")
            failure = EngineError(str(error))
            if is_changed:
                await self._restore(failure)
            raise EngineError(self._still_serving(failure)) from error
        self._directory = None

    async def load_adapter(self, directory: Path, version: int) -> float:
        """See :meth:`Engine.load_adapter`."""
        if not self._config.spec.max_lora_rank:
            raise EngineError("the engine serves no adapters, because engine.maxLoraRank is 0")
        async with self._loading:
            started = time.monotonic()
            try:
                with translate_errors(f"loading the adapter {directory}"):
                    await self._client.call(self._adapters.load(directory, version))
            except EngineError as error:
                raise EngineError(self._still_serving(error)) from error
            return time.monotonic() - started

    def _still_serving(self, error: Exception | str) -> str:
        return f"{error}; the engine continues with weight version {self.weight_version}"

    async def _call(self, method: str, *arguments: Any, action: str) -> None:
        """Call a method of :class:`EngineExtension` on all ranks; a reply says why it has failed.

        Raises:
            EngineError: if the method has failed on any rank.
        """
        for reply in await self._client.collective_rpc(method, *arguments, action=action):
            if reply is not None:
                raise EngineError(f"failed while {action}: {reply}")

    @asynccontextmanager
    async def _unused_adapters(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Wait for the responses that must end before weights are loaded; load no others within this context."""
        async with self._loading:
            if self._adapters.current is None and mode is not UpdateMode.DRAIN:
                yield
                return
            self._generator.pause_admission()
            try:
                # Responses with an adapter must end first, because the adapter does not fit other full weights.
                await self._adapters.wait_unused()
                if mode is UpdateMode.DRAIN:
                    # vLLM's own "wait" mode does not wait for preempted requests.
                    await self._generator.wait_idle()
                yield
            finally:
                self._generator.resume_admission()

    async def _load_paused(self, load: Callable[[], Awaitable[None]], version: int, mode: UpdateMode) -> float:
        """Load weights while nothing is decoded, and return for how many seconds that was."""
        is_drained = mode is UpdateMode.DRAIN
        requested = time.monotonic()
        with translate_errors("loading weights"):
            clear_cache = mode is not UpdateMode.KEEP
            async with self._pause.while_loading(is_drained=is_drained, clear_cache=clear_cache):
                await load()
                await self._weight_versions.change(version)
                self._adapters.deactivate()
                if not clear_cache:
                    self._generator.ignore_cached_prompts()
        # With DRAIN, nothing was decoded since the last response ended.
        return time.monotonic() - (max(requested, self._generator.last_finished) if is_drained else requested)

    async def _restore(self, error: EngineError) -> None:
        """Load the previous weights again; stop the engine if that is impossible."""
        try:
            if self._directory is None:
                raise EngineError("the previous weights came from a trainer's memory and are in no directory")
            directory = str(self._directory)
            await self._call("das_load_weights", directory, action=f"loading weights from {directory}")
        except EngineError as restore_error:
            self._client.close()
            raise EngineError(
                f"{error}; the engine is stopped, because it cannot restore the previous weights: {restore_error}"
            ) from restore_error


def _await_listener(host: str, port: int) -> None:
    """Wait until a trainer listens.

    Raises:
        EngineError: it does not, for too long.
    """
    deadline = time.monotonic() + TRANSFER_CONNECT_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host, port), TRANSFER_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineError(f"cannot reach the trainer at {host}:{port}: {error}") from error
            time.sleep(TRANSFER_RETRY_INTERVAL_S)
        else:
            return
