"""Loads weights into a running engine, and checks them before."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rollout_api.protocol.messages import UpdateMode
from rollout_store.job.engines import EngineError
from rollout_store.models.model_source import ModelError
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.generation import DecodingPause, ResponseGenerator
from rollout_worker.engine.vllm_client import Adapters, VllmClient, WeightVersionTracker, translate_errors
from rollout_worker.engine.vllm_patches import is_finite

logger = logging.getLogger(__name__)
TRANSFER_CONNECT_TIMEOUT_S = 15.0
"""Seconds that an engine tries to reach a trainer whose group it is to join."""
TRANSFER_RETRY_INTERVAL_S = 0.1
"""Seconds between two attempts to reach it."""
_SAFETENSORS_DTYPES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
}
"""PyTorch's names of data types → those of safetensors."""
_SENT = "what the trainer sends"
_FLOAT_DTYPES = {"BF16", "F16", "F32", "F64"}
"""Data types between which vLLM converts when it loads weights."""
_NOT_FINITE = (
    "has values that are NaN or infinite, so that the model would compute nothing else; the training has diverged, or "
    "the weights were damaged"
)
_OUTPUT_PROJECTION = "lm_head.weight"
"""Some trainers write it although it is tied to the embeddings; vLLM then ignores it."""
_Tensors = dict[str, tuple[list[int], str]]
"""Name → shape and safetensors data type."""
Updates = AsyncIterator[dict[str, Any]]
"""The arguments for vLLM's ``update_weights``, until the trainer has sent all weights. Raises EngineError if the
trainer ends before. Asking for the next element means that the previous one was received."""


class CheckpointCheck:
    """Checks tensors that arrive in several parts as :func:`check_checkpoint` does those of a directory.

    If it *is_partial*, tensors may be missing, because only differences are sent.
    """

    def __init__(self, model: Path, *, is_partial: bool) -> None:
        self._expected, self._is_partial = _read_tensors(model), is_partial
        self._found: _Tensors = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that were described."""
        return frozenset(self._found)

    def add(self, update_info: Mapping[str, Any]) -> None:
        """Check the tensors that a call of vLLM's ``update_weights`` describes.

        Raises:
            ModelError: if they are not described, or the model has no such tensors.
        """
        try:
            described = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
            found = {
                str(name): (list(shape), _SAFETENSORS_DTYPES.get(dtype, str(dtype))) for name, dtype, shape in described
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"update_info needs names, dtype_names and shapes of the same length: {error!r}") from None
        _check_known(_SENT, found, self._expected)
        self._found |= found

    def clear(self) -> None:
        """Forget which tensors were described."""
        self._found = {}

    def finish(self) -> None:
        """Check that all tensors were sent.

        Raises:
            ModelError: if they were not.
        """
        if not self._is_partial:
            _check_complete(_SENT, self._found, self._expected)


def check_finite(directory: Path, paths: Iterable[Path], model: Path) -> None:
    """Check that the tensors in the files of published weights are finite.

    A model with a single value that is not computes nothing else any more, unless it belongs there: some models mask
    with -inf. Therefore tensors that are not finite in the first directory of the *model* are not checked.

    This reads all files once more than loading does, while the engine goes on decoding. If they fit into the machine's
    free memory, vLLM then reads them from the page cache; otherwise it reads them from the disk or the network again.

    Raises:
        ModelError: if a tensor has a value that is NaN or infinite.
    """
    for path in paths:
        with _opened(directory, path, "pt") as file:
            names = file.keys()  # the file itself is not iterable
            for name in names:
                if not is_finite(file.get_tensor(name)) and _is_finite_in(model, name):
                    raise ModelError(f"{directory}: {name} in {path.name} {_NOT_FINITE}")


def _is_finite_in(model: Path, name: str) -> bool:
    """Return whether a tensor of the *model* is finite; true of tensors that it does not have."""
    for path in _weight_files(model):
        with _opened(model, path, "pt") as file:
            if name in set(file.keys()):
                return is_finite(file.get_tensor(name))
    return True


def check_checkpoint(directory: Path, model: Path) -> None:
    """Check that vLLM can load all weights of a checkpoint, and that none of the old ones would remain.

    This reads the headers only, so that it is fast for models of any size. It does detect a truncated file.

    Raises:
        ModelError: if a tensor is missing or unknown, or has another shape or data type than the model's.
    """
    source, tensors, expected = f"checkpoint {directory}", _read_tensors(directory), _read_tensors(model)
    _check_complete(source, tensors, expected)
    _check_known(source, tensors, expected)


def _check_complete(source: str, tensors: _Tensors, expected: _Tensors) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"{source} has no {_list_names(missing)}: it must have all of the model's tensors")


def _check_known(source: str, tensors: _Tensors, expected: _Tensors) -> None:
    if unknown := sorted(tensors.keys() - expected.keys() - {_OUTPUT_PROJECTION}):
        raise ModelError(f"{source} has {_list_names(unknown)}, which the model does not have")
    for name in (name for name in expected if name in tensors):
        (actual_shape, actual_dtype), (shape, dtype) = tensors[name], expected[name]
        if actual_shape != shape:
            raise ModelError(f"{source}: {name} has shape {actual_shape}, but the model has {shape}")
        if actual_dtype != dtype and not {actual_dtype, dtype} <= _FLOAT_DTYPES:
            raise ModelError(f"{source}: {name} is {actual_dtype}, but the model has {dtype}")


def _list_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _read_tensors(directory: Path) -> _Tensors:
    """Read shape and data type of each tensor that vLLM would load from a directory."""
    tensors: _Tensors = {}
    for path in _weight_files(directory):
        with _opened(directory, path, "numpy") as file:
            names = file.keys()  # the file itself is not iterable
            for name in names:
                tensor = file.get_slice(name)
                tensors[name] = (tensor.get_shape(), tensor.get_dtype())
    return tensors


@contextmanager
def _opened(directory: Path, path: Path, framework: str) -> Iterator[Any]:
    """Open a file of *directory* with safetensors.

    Raises:
        ModelError: if it cannot be opened, or, within this context, be read.
    """
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"checkpoint {directory}: {path.name} cannot be read: {error}") from None


def _weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint: those that its index names, if it has one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        contents = json.loads(index.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"checkpoint {directory}: {index.name} cannot be read: {error}") from None
    weight_map = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(weight_map, dict):
        raise ModelError(
            f"checkpoint {directory}: {index.name} has no weight_map, an object that maps each tensor to its file"
        )
    for tensor, name in weight_map.items():
        # vLLM compares these names with those of the files, so that it does not find "./model.safetensors" either.
        if not isinstance(name, str) or name in ("", "..") or name != Path(name).name:
            raise ModelError(
                f"checkpoint {directory}: {index.name} must map {tensor!r} to the name of a file in this directory, "
                f"not to {name!r:.100}"
            )
    return [directory / name for name in sorted(set(weight_map.values()))]


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
        self._not_finite: set[str] = set()
        """Names of the current tensors that are known not to be finite."""
        self._falling_asleep = asyncio.Lock()
        self._sleep_level = 0
        """vLLM's level of sleep, in which nothing can be loaded; 0 if the engine is awake."""

    @property
    def weight_version(self) -> int:
        """The version that samples new responses."""
        adapter = self._adapters.current
        return self._weight_versions.version if adapter is None else adapter.version

    async def sleep(self, level: int) -> None:
        """See :meth:`Engine.sleep`."""
        await asyncio.shield(self._sleep(level))

    async def _sleep(self, level: int) -> None:
        async with self._falling_asleep:
            if self._sleep_level:
                return
            await self._pause.release()  # an update may wait until responses have ended
            await self._loading.acquire()  # until the engine wakes
            try:
                if self._directory is None or self._config.spec.max_lora_rank:
                    level = 1  # weights from a trainer's memory, or adapters, could not be read again
                with translate_errors("falling asleep"):
                    await self._client.call(self._client.llm.sleep(level, mode="keep"))
            except BaseException:
                self._loading.release()
                raise
            self._sleep_level = level

    async def wake(self) -> None:
        """See :meth:`Engine.wake`."""
        await asyncio.shield(self._wake())

    async def _wake(self) -> None:
        async with self._falling_asleep:
            if not self._sleep_level:
                return
            try:
                if self._sleep_level > 1:
                    with translate_errors("waking up"):
                        await self._client.call(self._client.llm.wake_up(["weights"]))
                    await self._restore(EngineError("the engine has slept"))
                with translate_errors("waking up"):
                    await self._client.call(self._client.llm.wake_up())
            finally:
                self._sleep_level = 0
                self._loading.release()

    async def load_checkpoint(self, directory: Path, version: int, mode: UpdateMode) -> float:
        """See :meth:`Engine.load_weights`."""
        try:
            await asyncio.to_thread(check_checkpoint, directory, self._config.model)
            await asyncio.to_thread(check_finite, directory, _weight_files(directory), self._config.model)
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
            self._not_finite = set()
            self._weight_versions.unusable.pop(version, None)  # a version may be loaded again

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
                await self._transfer(first, updates, check, version)

            return await self._load_paused(load, version, mode)

    async def _transfer(self, first: dict[str, Any], updates: Updates, check: CheckpointCheck, version: int) -> None:
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
            await self._check_received(version, check)
        except Exception as error:  # of whatever type: the engine must not keep a part of the weights
            if self._client.stopped:
                raise
            await self._client.collective_rpc("das_abort_weight_update", action="aborting a weight update")
            is_expected = isinstance(error, EngineError | ModelError)
            failure = EngineError(str(error) if is_expected else f"{type(error).__name__}: {error}")
            if is_changed:
                await self._restore(failure)
            raise EngineError(self._still_serving(failure)) from error
        self._directory = None

    async def _check_received(self, version: int, check: CheckpointCheck) -> None:
        """Check that the tensors which a trainer has sent, and those that remain, are finite.

        If they are not, but the previous weights are in no directory, the version is served, and its rollouts fail
        until the trainer has published others: an engine without weights would be worth less.

        Raises:
            ModelError: if they are not.
        """
        ranks = await self._client.collective_rpc("das_not_finite", action="checking the received weights")
        received = {name for rank in ranks for name in rank}
        if received:
            received = await asyncio.to_thread(self._without_intended, received)
        not_finite = (self._not_finite - check.names) | received
        if not not_finite:
            self._not_finite = set()
            self._weight_versions.unusable.pop(version, None)  # a version may be sent again
            return
        names = sorted(not_finite)
        reason = f"{_SENT}: {_list_names(names)} {_NOT_FINITE}"
        if self._directory is not None:
            raise ModelError(reason)
        self._not_finite = not_finite
        self._weight_versions.unusable[version] = f"{reason}; publish other weights as a later version"
        logger.error(
            "%s. The engine serves weight version %d nevertheless, because its previous weights came from a trainer's "
            "memory as well and are overwritten. Its rollouts fail; publish other weights.",
            reason,
            version,
        )

    def _without_intended(self, names: Iterable[str]) -> set[str]:
        """Return those of the tensors that are finite in the model's first directory."""
        return {name for name in names if _is_finite_in(self._config.model, name)}

    async def load_adapter(self, directory: Path, version: int) -> float:
        """See :meth:`Engine.load_adapter`."""
        if not self._config.spec.max_lora_rank:
            raise EngineError("the engine serves no adapters, because engine.maxLoraRank is 0")
        try:
            await asyncio.to_thread(
                check_finite, directory, [directory / "adapter_model.safetensors"], self._config.model
            )
        except ModelError as error:
            raise EngineError(self._still_serving(error)) from None
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
