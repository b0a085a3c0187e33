"""Replaces the weights of a running engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_api.protocol.messages import UpdateMode
from rollout_worker.engine.adapters import Adapters
from rollout_worker.engine.checkpoint_check import (
    BroadcastWeights,
    check_broadcast,
    check_checkpoint,
    check_tensors,
)
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.errors import EngineError, translate_errors
from rollout_worker.engine.generation import DecodingPause, ResponseGenerator
from rollout_worker.engine.limits import MAX_READING_PAUSE_S
from rollout_worker.engine.model_source import ModelError
from rollout_worker.engine.patched_checkpoint import DeltaVersion, PatchedCheckpoint
from rollout_worker.engine.transfer_group import GroupMembership
from rollout_worker.engine.vllm_client import VllmClient, WeightVersionTracker


@dataclass(frozen=True)
class PassedWeights:
    """Where an engine passes its weights on to another one."""

    version: int
    """Version of the full weights."""
    token: str
    """What the other engine must send."""
    addresses: list[tuple[str, int]]
    """Host and port of each of the engine's worker processes, by rank."""


@dataclass(frozen=True)
class _NewWeights:
    method: str
    """Method of :class:`EngineExtension` that loads them."""
    arguments: tuple[Any, ...]
    """Its arguments."""
    version: int
    mode: UpdateMode
    source: str = "a broadcast"
    """Where they come from, for messages."""
    stored: Path | DeltaVersion | None = None
    """Where they are stored; None if they are in the memory of other processes only."""

    @property
    def action(self) -> str:
        """Describes the loading in messages."""
        return f"loading weights from {self.stored or self.source}"


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
        self._stored: Path | DeltaVersion | None = config.model
        """Where the current weights are stored; None if they were broadcast."""
        self._patched = PatchedCheckpoint()
        self._patching = asyncio.Lock()

    @property
    def weight_version(self) -> int:
        """The version with which new responses are sampled."""
        adapter = self._adapters.current
        return self._weight_versions.version if adapter is None else adapter.version

    async def load_checkpoint(self, directory: Path, version: int, mode: UpdateMode) -> float:
        """See :meth:`Engine.load_weights`."""
        try:
            await asyncio.to_thread(check_checkpoint, directory, self._config.model)
        except ModelError as error:
            raise EngineError(self._still_serving(error)) from None
        new = _NewWeights("das_load_weights", (str(directory),), version, mode, stored=directory)
        return await asyncio.shield(self._replace_without_deltas(new))

    async def load_deltas(self, weights: DeltaVersion, version: int, mode: UpdateMode) -> float:
        """See :meth:`Engine.load_deltas`."""
        return await asyncio.shield(self._load_deltas(weights, version, mode))

    async def _load_deltas(self, weights: DeltaVersion, version: int, mode: UpdateMode) -> float:
        if self._config.node is not None:
            raise EngineError(self._still_serving("an engine on several machines cannot apply differences of weights"))
        async with self._patching:
            try:
                await asyncio.to_thread(self._patched.prepare, weights)
                await asyncio.to_thread(check_tensors, str(weights), self._patched.tensors(), self._config.model)
            except ModelError as error:
                raise EngineError(self._still_serving(error)) from None
            shared = self._patched.shared()
            new = _NewWeights("das_load_from_memory", (shared.path, shared.tensors), version, mode, stored=weights)
            return await self._replace(new)

    def close(self) -> None:
        """Release memory. vLLM's processes must have ended."""
        self._patched.close()

    async def receive(self, weights: BroadcastWeights, version: int, mode: UpdateMode) -> float:
        """See :meth:`Engine.receive_weights`."""
        try:
            await asyncio.to_thread(check_broadcast, weights, self._config.model)
        except ModelError as error:
            raise EngineError(self._still_serving(error)) from None
        if weights.packed_bytes is None:
            prepare, load = "das_join_broadcast", "das_receive_weights"
        else:
            prepare, load = "das_await_transfer", "das_receive_transferred"
        action = f"joining the broadcast from {weights.host}:{weights.port}"
        try:
            await self._call_ranks(prepare, asdict(weights), action=action, failure=f"failed while {action}")
        except EngineError as error:
            raise EngineError(self._still_serving(error)) from error
        return await asyncio.shield(self._replace_without_deltas(_NewWeights(load, (asdict(weights),), version, mode)))

    async def join_group(self, membership: GroupMembership) -> None:
        """See :meth:`Engine.join_transfer_group`."""
        async with self._loading:
            try:
                await self._call_ranks(
                    "das_join_transfer_group",
                    asdict(membership),
                    action="joining a trainer's process group",
                    failure=f"cannot join the process group of the trainer at {membership.host}:{membership.port}",
                )
            except EngineError:
                with suppress(EngineError):  # ranks that have joined would keep its resources
                    await self._client.collective_rpc(
                        "das_leave_transfer_group", action="leaving a trainer's process group"
                    )
                raise

    async def pass_on(self) -> PassedWeights:
        """See :meth:`Engine.pass_weights`."""
        token = secrets.token_hex(16)
        async with self._loading:
            # Nothing is being loaded, so these are the weights of this version. If others are loaded from here on, the
            # worker processes notice.
            version = self._weight_versions.version
            is_complete = await self._read_weights(restart=True)
        while not is_complete:
            is_complete = await self._read_weights(restart=False)
        addresses = []
        for reply in await self._call_for_passing("das_pass_weights", token):
            host, port = reply
            addresses.append((str(host), int(port)))
        return PassedWeights(version, token, addresses)

    async def _read_weights(self, *, restart: bool) -> bool:
        return all(await self._call_for_passing("das_read_weights", restart, MAX_READING_PAUSE_S))

    async def _call_for_passing(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call_ranks(
            method, *arguments, action="passing the weights on", failure="the weights cannot be passed on"
        )

    async def receive_passed(self, weights: PassedWeights, mode: UpdateMode) -> float:
        """See :meth:`Engine.receive_passed_weights`."""
        new = _NewWeights("das_receive_from_engine", (), weights.version, mode, source="another engine")
        if len(weights.addresses) != self._config.ranks:
            error = f"the other engine has {len(weights.addresses)} ranks, and this one has {self._config.ranks}"
            raise EngineError(self._still_serving(error))
        try:
            await self._call_ranks(
                "das_connect_to_engine",
                weights.addresses,
                weights.token,
                self._stored is None,  # the current weights could not be restored
                action="connecting to another engine",
                failure="failed while connecting to another engine",
            )
        except EngineError as error:
            with suppress(EngineError):  # the other ranks may have received a whole copy of their weights
                await self._client.collective_rpc("das_disconnect", action="closing connections to another engine")
            raise EngineError(self._still_serving(error)) from error
        return await asyncio.shield(self._replace_without_deltas(new))

    async def _call_ranks(self, method: str, *arguments: Any, action: str, failure: str) -> list[Any]:
        """Call a method of :class:`EngineExtension` on all ranks; a reply that is text says why it has failed.

        Raises:
            EngineError: if the method has failed on any rank; its message begins with *failure*.
        """
        replies: list[Any] = await self._client.collective_rpc(method, *arguments, action=action)
        for reply in replies:
            if isinstance(reply, str):
                raise EngineError(f"{failure}: {reply}")
        return replies

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

    async def _replace_without_deltas(self, new: _NewWeights) -> float:
        """Load weights that are not stored as differences, and forget those that were."""
        async with self._patching:
            gap = await self._replace(new)
            await asyncio.to_thread(self._patched.close)
            return gap

    async def _replace(self, new: _NewWeights) -> float:
        async with self._loading:
            if self._adapters.current is None and new.mode is not UpdateMode.DRAIN:
                return await self._pause_and_load(new)
            self._generator.pause_admission()
            try:
                # Responses with an adapter must end first, because the adapter does not fit other full weights.
                await self._adapters.wait_unused()
                if new.mode is UpdateMode.DRAIN:
                    # vLLM's own "wait" mode does not wait for preempted requests.
                    await self._generator.wait_idle()
                return await self._pause_and_load(new)
            finally:
                self._generator.resume_admission()

    async def _pause_and_load(self, new: _NewWeights) -> float:
        """Load the weights while nothing is decoded, and return for how many seconds that was."""
        is_drained = new.mode is UpdateMode.DRAIN
        requested = time.monotonic()
        with translate_errors(new.action):
            clear_cache = new.mode is not UpdateMode.KEEP
            async with self._pause.while_loading(is_drained=is_drained, clear_cache=clear_cache):
                await self._load_or_restore(new)
                await self._weight_versions.change(new.version)
                self._adapters.deactivate()
                if not clear_cache:
                    self._generator.ignore_cached_prompts()
        # With DRAIN, nothing was decoded since the last response ended.
        return time.monotonic() - (max(requested, self._generator.last_finished) if is_drained else requested)

    async def _load_or_restore(self, new: _NewWeights) -> None:
        try:
            await self._call_ranks(new.method, *new.arguments, action=new.action, failure=f"failed while {new.action}")
        except EngineError as error:
            await self._restore(error)
            raise EngineError(self._still_serving(error)) from error
        self._stored = new.stored

    async def _restore(self, error: EngineError) -> None:
        """Load the previous weights again; stop the engine if that is impossible."""
        try:
            stored = self._stored
            if stored is None:
                raise EngineError("the previous weights came from a broadcast and are not stored in a directory")
            method: str = "das_load_weights"
            arguments: list[Any] = [str(stored)]
            if isinstance(stored, DeltaVersion):
                await asyncio.to_thread(self._prepare_again, stored)
                shared = self._patched.shared()
                method, arguments = "das_load_from_memory", [shared.path, shared.tensors]
            action = f"loading weights from {stored}"
            await self._call_ranks(method, *arguments, action=action, failure=f"failed while {action}")
        except EngineError as restore_error:
            self._client.close()
            raise EngineError(
                f"{error}; the engine is stopped, because it cannot restore the previous weights: {restore_error}"
            ) from restore_error

    def _prepare_again(self, weights: DeltaVersion) -> None:
        try:
            self._patched.prepare(weights)
        except ModelError as error:
            raise EngineError(str(error)) from None
