"""Weights that a trainer sends to the engines from its memory. Needs torch; NCCL needs vLLM."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rollout_api.errors import InvalidRequestError, WeightsError
from rollout_api.ports import free_port
from rollout_api.weights.gloo import GLOO, GlooTrainer, GlooTrainerInitInfo, update_info

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | Callable[[], Iterable[tuple[str, Any]]]
"""Names and torch tensors, or a function that returns them anew for each publication."""
_START, _FAILED = "start", "failed: "
"""Messages of the process that publishes to the trainer's other processes; a reason follows the last one."""


@dataclass(frozen=True)
class TensorDescription:
    """Name, torch data type and shape of a tensor; the same as vLLM's ``ParamMeta``."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class TensorsInMemory:
    """Tensors that can be published from memory, as a ``WeightSource`` of vLLM's weight transfer.

    They are sent with NCCL from a GPU, and with gloo from main memory. The job must allow it
    (``spec.weights.transfer``). An engine that joins later waits for the next version.

    If the tensors are sharded (``DTensor``, as with FSDP2 and torch's tensor parallelism), every process of the trainer
    creates an instance. The process with rank 0 publishes, and every other one calls :meth:`take_part` meanwhile.

    Args:
        tensors: all tensors of the model, with the names and shapes of the engines' initial
            checkpoint. They are read once to describe them, and once more while they are sent, so that a function which
            computes them should yield them one after the other.
        host: address of this machine that the engines can reach. Default: that of its default route.
        port: port of this process for engines that join; 0 chooses a free one.
        trainers: process group (``torch.distributed``) of the trainer's processes that hold shards; None if the tensors
            are not sharded, or for torch's default group if they are.
        device: torch device that each tensor is copied to before it is sent. It decides between NCCL and gloo;
            None to send the tensors from where they are.

    Raises:
        InvalidRequestError: there are no tensors, or they are on several kinds of devices and *device* is None.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        *,
        host: str | None = None,
        port: int = 0,
        trainers: Any = None,
        device: Any = None,
    ) -> None:
        self._host, self._port, self._trainers, self._target = host, port, trainers, device
        self._sender: Any = None
        """A ``TrainerWeightTransferEngine`` of vLLM or the like; None without a group."""
        self._client = _CurrentClient()
        self._remaining: Iterator[tuple[str, Any]] = iter(())
        """Tensors that the sender has not read yet, which other processes still gather with this one."""
        self.group = ""
        """Id of the group that the sender has formed; '' if there is none."""
        self.replace(tensors)

    def replace(self, tensors: NamedTensors) -> None:
        """Publish these tensors from now on.

        Raises:
            InvalidRequestError: see :class:`TensorsInMemory`.
        """
        self._read = _reader(tensors)
        devices, self._is_sharded = set(), False
        self._described: list[TensorDescription] = []
        for source, tensor in self._read():
            self._device = _device_of(tensor, self._target)
            devices.add(self._device.type)
            self._is_sharded = self._is_sharded or hasattr(tensor, "full_tensor")
            self._described += [
                TensorDescription(name, piece.dtype, tuple(piece.shape))
                for name, piece in self._split(source, _without_data(tensor))
            ]
        if devices not in ({"cpu"}, {"cuda"}):
            found = ", ".join(sorted(devices)) or "no device"
            raise InvalidRequestError(f"the tensors are on {found}; they must all be on cpu, or all on cuda")
        self.backend = GLOO if devices == {"cpu"} else "nccl"
        """Backend that sends them."""

    def _split(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        """Return the tensors of the checkpoint that a whole tensor contains."""
        return [(name, tensor)]

    def metadata(self) -> list[TensorDescription]:
        """Describe the tensors of the checkpoint, in their order."""
        return self._described

    @property
    def update_info(self) -> dict[str, Any]:
        """The same as vLLM's ``update_info``."""
        return update_info(self._described)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor of the checkpoint as a whole, with its name.

        If the tensors are sharded, the trainer's other processes must call :meth:`take_part` meanwhile.
        """
        for source, tensor in self._read():
            yield from self._split(source, _whole(tensor).to(self._device))

    def connect(self, client: Any, world_size: int) -> None:
        """Form a group with the engines; the earlier one is left.

        Args:
            client: lets the engines join; see vLLM's ``VLLMWeightSyncClient``.
            world_size: number of the engines' processes, and one.

        Raises:
            WeightsError: this process cannot use NCCL, which the tensors need.
            Exception: what *client* raises, or a RuntimeError if engines are missing.
        """
        self.disconnect()
        self._client.target = client
        host, port = self._host or _own_address(), self._port or free_port("")
        source: Any = _RecordedSource(self)
        if self.backend == GLOO:
            self._sender = GlooTrainer.trainer_init(
                GlooTrainerInitInfo(host, port, world_size), client=self._client, source=source
            )
            return
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        check_nccl()
        with self._on_device():
            self._sender = WeightTransferTrainerFactory.trainer_init(
                NCCLTrainerInitInfo(host, port, world_size, rank=0), client=self._client, source=source
            )

    def disconnect(self) -> None:
        """Leave the group with the engines, if there is one."""
        sender, self._sender, self.group = self._sender, None, ""
        if sender is not None:
            sender.shutdown()

    def send(self, client: Any) -> None:
        """Send the tensors to the engines, which :meth:`connect` has connected, and return when these serve them.

        Args:
            client: tells the engines about it; it may be another one than before.

        Raises:
            Exception: what the client raises, or a RuntimeError if an engine is gone.
        """
        if self._sender is None:
            raise ValueError("connect must be called before")
        self._client.target, self._remaining = client, iter(self)
        self._tell(_START)
        try:
            with self._on_device():
                self._sender.send_weights()
        except BaseException:
            self.disconnect()  # a group must not be used again after a failed transfer
            if self._is_sharded:
                for _ in self._remaining:  # the trainer's other processes gather all of them
                    pass
            raise

    def abort(self, reason: str) -> None:
        """Tell the trainer's other processes that :meth:`send` will not be called."""
        self._tell(f"{_FAILED}{reason}")

    def take_part(self) -> None:
        """Gather the tensors together with the process that publishes them; for every other process of the trainer.

        It does nothing if the tensors are not sharded.

        Raises:
            WeightsError: the weights were not published; it says why.
            RuntimeError: the process that publishes is gone.
        """
        if not self._is_sharded:
            return
        told = self._hear()
        if told != _START:
            reason = told.removeprefix(_FAILED)
            raise WeightsError(f"the process with rank 0 has not published the weights: {reason}")
        for _, tensor in self._read():
            _whole(tensor)

    def _on_device(self) -> Any:
        """Make the tensors' GPU that of this thread."""
        import torch

        return nullcontext() if self.backend == GLOO else torch.cuda.device(self._device)

    def _tell(self, message: str) -> None:
        """Tell the trainer's other processes what happens next."""
        if self._is_sharded:
            import torch

            torch.distributed.broadcast_object_list([message], src=self._root(), group=self._trainers)

    def _hear(self) -> str:
        import torch

        messages: list[Any] = [None]
        torch.distributed.broadcast_object_list(messages, src=self._root(), group=self._trainers)
        return str(messages[0])

    def _root(self) -> int:
        """Return the rank, within torch's default group, of the process that publishes."""
        import torch

        if self._trainers is None:
            return 0
        return int(torch.distributed.get_global_rank(self._trainers, 0))


class _CurrentClient:
    """Forwards a sender's calls, so that the sender can outlive the client that it was created with."""

    target: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


class _RecordedSource:
    """The tensors as a sender reads them, so that those which a failed sender leaves can still be gathered."""

    def __init__(self, tensors: TensorsInMemory) -> None:
        self._tensors = tensors

    def metadata(self) -> list[TensorDescription]:
        return self._tensors.metadata()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._tensors._remaining


class ModelInMemory(TensorsInMemory):
    """A model whose current weights can be published from memory::

        weights = ModelInMemory(model)
        client.publish_weights(version, weights)

    The model's parameters may be sharded and may be named otherwise than in a checkpoint, as are the experts of
    transformers' models; see :class:`TensorsInMemory`.

    Args:
        model: a ``torch.nn.Module``.
        host: see :class:`TensorsInMemory`.
        port: see :class:`TensorsInMemory`.
        trainers: see :class:`TensorsInMemory`.
        device: see :class:`TensorsInMemory`.

    Raises:
        InvalidRequestError: the parameters are on several kinds of devices and *device* is None.
    """

    def __init__(
        self, model: Any, *, host: str | None = None, port: int = 0, trainers: Any = None, device: Any = None
    ) -> None:
        self._model = model
        super().__init__(model.named_parameters, host=host, port=port, trainers=trainers, device=device)

    def _split(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        return checkpoint_pieces(self._model, name, tensor)


def checkpoint_pieces(model: Any, name: str, parameter: Any) -> Iterable[tuple[str, Any]]:
    """Return the tensors of a checkpoint, with their names, that a parameter of a model contains.

    Since version 5, models of transformers hold the experts of a layer in one parameter, and a checkpoint has one
    tensor for each. Parameters of other models have the names and shapes of their checkpoint.

    Args:
        model: the model.
        name: name of the parameter.
        parameter: its value, or a tensor of its shape on torch's device ``meta``.
    """
    transformers = sys.modules.get("transformers")  # a model of transformers cannot exist before this is imported
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return [(name, parameter)]
    from transformers.core_model_loading import revert_weight_conversion

    pieces: dict[str, Any] = revert_weight_conversion(model, {name: parameter})
    return pieces.items()


def check_nccl() -> None:
    """Check that vLLM's communicator works in this process.

    Otherwise, vLLM (seen in 0.32) creates one whose broadcasts return at once. An engine would then serve what happened
    to be in its memory, and the trainer would take the weights for published.

    Raises:
        WeightsError: it does not work. The message says why.
    """
    from vllm import envs
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    if envs.VLLM_DISABLE_PYNCCL:
        raise WeightsError(
            f"VLLM_DISABLE_PYNCCL disables NCCL on {socket.gethostname()}, so that no weights can be sent or received "
            "there; unset the environment variable, or publish the weights as files"
        )
    try:
        NCCLLibrary()
    except Exception as error:
        raise WeightsError(
            f"the NCCL library cannot be loaded on {socket.gethostname()} ({error}); install it, name its file in "
            "VLLM_NCCL_SO_PATH, or publish the weights as files"
        ) from error


def _reader(tensors: NamedTensors) -> Callable[[], Iterable[tuple[str, Any]]]:
    """Return a function that returns the tensors anew at each call."""
    if callable(tensors):
        return tensors
    found = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    return lambda: iter(found)


def _whole(tensor: Any) -> Any:
    """Return a tensor as a whole, without its gradient; its other shards' processes must do the same."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _device_of(tensor: Any, target: Any) -> Any:
    """Return the device that a tensor is sent from: *target*, or if that is None, the one that it is on."""
    import torch

    return tensor.device if target is None else torch.device(target)


def _without_data(tensor: Any) -> Any:
    """Return a tensor with the shape and the data type of *tensor* that takes no memory."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _own_address() -> str:
    """Return the address that this machine uses towards others; the loopback address if it has no route to them."""
    # Documentation addresses (RFC 5737 and RFC 3849), to which nothing is sent.
    for family, other in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((other, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"
