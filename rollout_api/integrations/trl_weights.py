"""Publishes the weights of a trainer of TRL, which may have several processes, to a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout_api.client.sync_client import RolloutClient
from rollout_api.errors import RolloutClientError, WeightsError
from rollout_api.integrations.version_directories import VersionDirectories
from rollout_api.integrations.weight_routes import Route, WeightRoutes, why_not_from_memory
from rollout_api.weights.in_memory import ModelInMemory, TensorsInMemory, checkpoint_pieces

_PUBLISHED, _FAILED = "published", "failed"
"""What the main process tells the others at the end; before, it tells them the route of each attempt."""


class TrlWeights:
    """The weights of a trainer, which are published from memory if possible, and otherwise through files.

    Args:
        client: client of this process.
        directory: directory for published weights, which the job sees under the same path; None if there is none.
        kept_versions: number of versions to keep in the directory.
        timeout: seconds for which the job may have no coordinator or no engine, and seconds that its engines may take
            to load the weights.
    """

    def __init__(self, client: RolloutClient, directory: str | Path | None, kept_versions: int, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self._directories = None if directory is None else VersionDirectories(directory, kept_versions)
        self._routes = WeightRoutes(directory, "the argument weights of JobRollouts")
        self._model: ModelInMemory | None = None
        self._gathered: TensorsInMemory | None = None
        self._state: Mapping[str, Any] = {}
        """The gathered weights, while they are being published."""

    def publish(self, trainer: Any, version: int) -> int:
        """Make the job serve the trainer's current weights. All processes of the trainer call this together.

        Args:
            trainer: the trainer.
            version: smallest version that may be used.

        Returns:
            The version that was used.

        Raises:
            RolloutClientError: the weights were not published, or an engine could not load them.
        """
        if not trainer.accelerator.is_main_process:
            return self._take_part(trainer)
        try:
            published = self._publish(trainer, version)
        except BaseException as error:
            _tell(_FAILED, str(error) or type(error).__name__)
            raise
        _tell(_PUBLISHED, published)
        return published

    def _take_part(self, trainer: Any) -> int:
        """Do what the main process needs while it publishes the weights, and return their version."""
        while True:
            what, value = _hear()
            if what == _PUBLISHED:
                return int(value)
            if what == _FAILED:
                raise RolloutClientError(f"the main process has not published the weights: {value}")
            if what == Route.FILES or _needs_gathering(trainer):
                trainer.accelerator.get_state_dict(trainer.model_wrapped)
            else:
                with suppress(WeightsError):  # the main process tells next what happens then
                    self._model_in_memory(trainer, "cpu").take_part()

    def _publish(self, trainer: Any, version: int) -> int:
        version = max(version, 1 + self._client.weight_version(timeout=self._timeout))
        backend = self._client.transfer_backend(timeout=self._timeout)
        device = trainer.accelerator.device
        route = self._routes.first(why_not_from_memory(backend, has_gpu=device.type == "cuda"))
        target = device if backend == "nccl" else "cpu"
        if route is Route.MEMORY:
            try:
                self._publish_from_memory(trainer, version, target)
                return version
            except WeightsError as error:
                route, version = self._routes.after_failure(error), version + 1
        if route is Route.MEMORY:
            self._publish_from_memory(trainer, version, target)
        else:
            self._publish_files(trainer, version)
        return version

    def _publish_from_memory(self, trainer: Any, version: int, device: Any) -> None:
        weights: TensorsInMemory
        if _needs_gathering(trainer):
            _tell(Route.MEMORY)
            weights = self._gather(trainer, device)
        else:
            weights = self._model_in_memory(trainer, device)
            _tell(Route.MEMORY)
        try:
            self._client.publish_weights(version, weights, timeout=self._timeout).raise_if_failed()
        finally:
            self._state = {}
        self._routes.succeeded()

    def _publish_files(self, trainer: Any, version: int) -> None:
        if self._directories is None:
            raise ValueError("weights cannot be published through files without a directory")
        _tell(Route.FILES)
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        _unwrapped(trainer).save_pretrained(self._directories.new(), state_dict=state)
        directory = self._directories.assign(version)
        self._client.publish_weights(version, directory, timeout=self._timeout).raise_if_failed()
        self._directories.delete_before(version)

    def _model_in_memory(self, trainer: Any, device: Any) -> ModelInMemory:
        """Return the trainer's model; it is described once, and its current parameters are read when it is sent."""
        if self._model is None:
            self._model = ModelInMemory(_unwrapped(trainer), device=device)
        return self._model

    def _gather(self, trainer: Any, device: Any) -> TensorsInMemory:
        """Gather a model whose parameters are not whole and know nothing of their shards."""
        model = _unwrapped(trainer)
        self._state = trainer.accelerator.get_state_dict(trainer.model_wrapped)

        def tensors() -> Iterator[tuple[str, Any]]:
            for name, tensor in self._state.items():
                yield from checkpoint_pieces(model, name, tensor)

        if self._gathered is None:
            self._gathered = TensorsInMemory(tensors, device=device)
        else:
            self._gathered.replace(tensors)
        return self._gathered


def _needs_gathering(trainer: Any) -> bool:
    """Return whether the trainer shards parameters in a way that only accelerate can undo (FSDP1, DeepSpeed)."""
    accelerator = trainer.accelerator
    return accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and not accelerator.is_fsdp2


def _unwrapped(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)


def _tell(what: str, value: Any = None) -> None:
    """Tell the trainer's other processes what the main process does next."""
    from accelerate.utils import broadcast_object_list

    broadcast_object_list([str(what), value])


def _hear() -> tuple[str, Any]:
    from accelerate.utils import broadcast_object_list

    what, value = broadcast_object_list([None, None])
    return what, value
