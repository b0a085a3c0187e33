"""Checkpoint engines for verl 0.9, which send a trainer's weights to a rollout job. Tested with 0.9.1.

``das`` sends the weights from memory if possible, and ``das-files`` only writes files.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

# First, because with another version of verl, the following imports fail with an unclear error.
import rollout_api.integrations.verl_version  # noqa: F401

# isort: split
import torch
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.errors import WeightsError
from rollout_api.integrations.verl_settings import FILES_NAME, NAME, redis_url
from rollout_api.integrations.weight_routes import Route, VersionDirectories, WeightRoutes, why_not_from_memory
from rollout_api.weights.in_memory import TensorsInMemory

NamedTensors = Iterable[tuple[str, Any]]
"""Names and whole tensors, as verl's engines yield them one after the other."""


class PublishingEngine(CheckpointEngine):
    """What the checkpoint engines have in common: only the trainer's first rank sends weights, and no process receives.

    The job's weight version is verl's ``global_steps`` + 1, because version 0 is the model that the job was started
    with. When a trainer returns to an earlier checkpoint, or weights have to be sent once more, the difference becomes
    larger and then stays constant, because versions only increase.

    Args:
        is_master: whether this is the trainer's first rank.
        job: ``namespace/name`` of the job.
        publish_timeout: seconds that the job may be without a coordinator or an engine when weights are published, and
            seconds that its engines may take to load them.
    """

    def __init__(self, is_master: bool, job: str, publish_timeout: float) -> None:
        self._is_master, self._job, self._timeout = is_master, job, publish_timeout
        self._version_offset = 0

    def prepare(self) -> dict[str, Any]:
        """Return no metadata: the other processes need none."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return an empty topology: verl's processes need no process group among themselves."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Do nothing."""

    def finalize(self) -> None:
        """Do nothing."""

    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> None:
        """Publish the weights, and return when every engine of the job serves them.

        Raises:
            RolloutClientError: an engine could not load the weights, or the job had no coordinator for too long.
        """
        if not self._is_master:
            for _name, _tensor in weights:
                pass  # the generator gathers shards, so it must run on all ranks
            return
        # Read all weights before connecting, because the other ranks are waiting in the generator.
        await asyncio.to_thread(self._read, weights)
        async with AsyncRolloutClient.connect(redis_url(), self._job, name="verl-weights") as client:
            expected = (global_steps or 0) + 1 + self._version_offset
            version = max(expected, 1 + await client.weight_version(timeout=self._timeout))
            self._version_offset += await self._publish(client, version) - expected

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yield nothing: the engines of the job receive the weights."""
        nothing: tuple[tuple[str, Any], ...] = ()
        for weight in nothing:
            yield weight

    @abstractmethod
    def _read(self, weights: NamedTensors) -> None:
        """Read weights from a generator that gathers each of them on all ranks."""

    @abstractmethod
    async def _publish(self, client: AsyncRolloutClient, version: int) -> int:
        """Publish the weights that were read under *version* or a later one, and return that."""


@CheckpointEngineRegistry.register(NAME)
class JobCheckpointEngine(PublishingEngine):
    """Sends weights to a job from the memory of the trainer's first rank.

    The first rank collects the weights in main memory, so that neither the other ranks wait for the job, nor the
    engines for the ranks to gather the weights. It then sends them through vLLM's weight transfer (NCCL on GPUs, gloo
    on CPUs). If that is not possible, and a directory is set, it writes them there, and a line in the log says why.

    Args:
        bucket_size: approximate size of a safetensors file in bytes.
        is_master: see :class:`PublishingEngine`.
        job: see :class:`PublishingEngine`.
        weights: directory for weights that cannot be sent, which the job sees under the same path; None if there
            is none.
        model: directory of the model that training started with, whose configuration is written too; only with
            *weights*.
        kept_versions: number of versions to keep on disk, at least 1.
        publish_timeout: see :class:`PublishingEngine`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        job: str,
        weights: str | None = None,
        model: str | None = None,
        kept_versions: int = 2,
        publish_timeout: float = 600.0,
    ) -> None:
        super().__init__(is_master, job, publish_timeout)
        setting = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{NAME}"
        if (weights is None) != (model is None):
            raise ValueError(f"{setting}: set both weights and model, or neither")
        self._files = (
            None if weights is None or model is None else CheckpointFiles(weights, model, kept_versions, bucket_size)
        )
        self._routes = WeightRoutes(weights, f"{setting}.weights")
        self._collected: list[tuple[str, torch.Tensor]] = []
        self._tensors: TensorsInMemory | None = None

    def _read(self, weights: NamedTensors) -> None:
        # Copy each tensor, because the generator may reuse its memory.
        self._collected = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights]

    async def _publish(self, client: AsyncRolloutClient, version: int) -> int:
        try:
            backend = await client.transfer_backend(timeout=self._timeout)
            route = self._routes.first(why_not_from_memory(backend, has_gpu=torch.cuda.is_available()))
            if route is Route.MEMORY:
                try:
                    await self._send(client, version, backend)
                    return version
                except WeightsError as error:
                    route, version = self._routes.after_failure(error), version + 1
            if route is Route.MEMORY:
                await self._send(client, version, backend)
            else:
                await self._write_files(client, version)
            return version
        finally:
            self._collected = []

    async def _send(self, client: AsyncRolloutClient, version: int, backend: str) -> None:
        if self._tensors is None:
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
            self._tensors = TensorsInMemory(lambda: self._collected, device=device)
        (await client.publish_weights(version, self._tensors, timeout=self._timeout)).raise_if_failed()
        self._routes.succeeded()

    async def _write_files(self, client: AsyncRolloutClient, version: int) -> None:
        if self._files is None:
            raise ValueError("weights cannot be published through files without a directory")
        await asyncio.to_thread(self._files.write, self._collected)
        await self._files.publish(client, version, self._timeout)


@CheckpointEngineRegistry.register(FILES_NAME)
class FileCheckpointEngine(PublishingEngine):
    """Publishes weights to a job as safetensors files. The trainer's first rank holds one of them in memory at a time.

    Args:
        bucket_size: approximate size of a safetensors file in bytes.
        is_master: see :class:`PublishingEngine`.
        job: see :class:`PublishingEngine`.
        weights: directory for published weights, which the job sees under the same path.
        model: directory of the model that training started with; its configuration is published too.
        kept_versions: number of published versions to keep on disk, at least 1.
        publish_timeout: see :class:`PublishingEngine`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        job: str,
        weights: str,
        model: str,
        kept_versions: int = 2,
        publish_timeout: float = 600.0,
    ) -> None:
        super().__init__(is_master, job, publish_timeout)
        self._files = CheckpointFiles(weights, model, kept_versions, bucket_size)

    def _read(self, weights: NamedTensors) -> None:
        self._files.write(weights)

    async def _publish(self, client: AsyncRolloutClient, version: int) -> int:
        await self._files.publish(client, version, self._timeout)
        return version


class CheckpointFiles:
    """Writes and publishes weights as safetensors files.

    Args:
        weights: directory for published weights.
        model: directory of the model whose configuration is published too.
        kept_versions: number of versions to keep, at least 1.
        bucket_size: approximate size of a file in bytes.
    """

    def __init__(self, weights: str, model: str, kept_versions: int, bucket_size: int) -> None:
        self._directories = VersionDirectories(weights, kept_versions)
        self._model, self._bucket_size = Path(model), bucket_size

    def write(self, weights: NamedTensors) -> None:
        """Write the weights that are published next."""
        directory = self._directories.new()
        directory.mkdir(parents=True)
        file_of_weight: dict[str, str] = {}
        bucket: dict[str, Any] = {}
        bucket_size = total_size = 0

        def flush() -> None:
            file = f"model-{len(set(file_of_weight.values())) + 1:05d}.safetensors"
            save_file(bucket, directory / file, metadata={"format": "pt"})
            file_of_weight.update(dict.fromkeys(bucket, file))
            bucket.clear()

        for name, tensor in weights:
            # Copy the tensor, because the generator may reuse its memory.
            bucket[name] = tensor.detach().cpu().contiguous().clone()
            bucket_size += bucket[name].nbytes
            total_size += bucket[name].nbytes
            if bucket_size >= self._bucket_size:
                flush()
                bucket_size = 0
        if bucket:
            flush()
        index = {"metadata": {"total_size": total_size}, "weight_map": file_of_weight}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(self._model / "config.json", directory)

    async def publish(self, client: AsyncRolloutClient, version: int, timeout: float) -> None:
        """Publish what was written, and delete older versions."""
        directory = self._directories.assign(version)
        (await client.publish_weights(version, directory, timeout=timeout)).raise_if_failed()
        self._directories.delete_before(version)
