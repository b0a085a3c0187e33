"""Sends weights to engines on CPUs over gloo, as vLLM sends them to engines on GPUs over NCCL.

It needs torch, but not vLLM.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

GLOO = "gloo"
"""Name of this backend among those of vLLM's weight transfer."""
GLOO_TIMEOUT_S = 120.0
"""Time that a process of a group waits for the others."""
_CONNECT_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.05
_REASON_TIMEOUT_S = 10.0
"""Time that a failed sender waits for the engines' reason, which is clearer than its own."""
_NUM_PRESENT_KEY = "das-present"
"""Key of the store that counts the engines' processes which have reached it."""


class GlooGroup:
    """Processes that receive the same tensors in the same order from the process with rank 0.

    It has those methods of vLLM's ``PyNcclCommunicator`` that a transfer of weights uses.

    Args:
        store: torch store that all processes of the group are connected to.
        rank: rank of this process.
        world_size: number of processes in the group.

    Raises:
        RuntimeError: not all processes have joined in time.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        import torch

        distributed: Any = torch.distributed
        self._bytes = torch.uint8
        if rank:
            store.add(_NUM_PRESENT_KEY, 1)
        group = distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=GLOO_TIMEOUT_S))
        self._groups = [group]
        # gloo's threads may release a tensor some time after its broadcast, which needs the interpreter: a process that
        # ends while they run may abort. The finalizer ends them before the interpreter, at the latest.
        self._leave = weakref.finalize(self, self._groups.clear)

    def broadcast(self, tensor: Any, src: int = 0, stream: Any = None) -> None:
        """Send a contiguous tensor (rank 0), or receive into it (all other ranks).

        Raises:
            RuntimeError: a process of the group is gone, or does not take part in time.
        """
        # gloo does not support all of torch's types.
        self._groups[0].broadcast(tensor.reshape(-1).view(self._bytes), src).wait()

    def destroy(self) -> None:
        """Leave the group, which makes the broadcasts of its other processes fail."""
        self._leave()


def update_info(tensors: Iterable[Any]) -> dict[str, Any]:
    """Return vLLM's ``update_info`` for tensors that are sent at once, each described as by vLLM's ``ParamMeta``."""
    listed = list(tensors)
    return {
        "names": [one.name for one in listed],
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in listed],
        "shapes": [list(one.shape) for one in listed],
    }


@dataclass
class GlooTrainerInitInfo:
    """How a sender forms its group; see vLLM's ``NCCLTrainerInitInfo``."""

    master_address: str
    """Address of this process that the engines can reach."""
    master_port: int
    world_size: int
    """Number of the engines' processes, and one."""


class GlooTrainer:
    """The trainer's side of a transfer; see vLLM's ``NCCLTrainerWeightTransferEngine``.

    Args:
        group: the group with the engines.
        client: lets the engines take part; see vLLM's ``VLLMWeightSyncClient``.
        source: the tensors; see vLLM's ``WeightSource``.
    """

    def __init__(self, group: GlooGroup, client: Any, source: Any) -> None:
        self._group, self._client, self._source = group, client, source

    @classmethod
    def trainer_init(cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any) -> GlooTrainer:
        """Form a group with the engines.

        Raises:
            Exception: what *client* raises, or a RuntimeError if engines are missing.
        """
        import torch

        distributed: Any = torch.distributed
        host, port, world_size = init_info.master_address, init_info.master_port, init_info.world_size
        store = distributed.TCPStore(
            host, port, world_size, True, timedelta(seconds=_CONNECT_TIMEOUT_S), wait_for_workers=False
        )
        joining = {"master_address": host, "master_port": port, "rank_offset": 1, "world_size": world_size}
        calls = ThreadPoolExecutor(1)
        try:
            joined = calls.submit(client.init_weight_transfer_engine, joining)
            deadline = time.monotonic() + GLOO_TIMEOUT_S
            while (num_present := store.add(_NUM_PRESENT_KEY, 0)) < world_size - 1:
                if joined.done():
                    joined.result()
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{num_present} of {world_size - 1} processes of engines joined at {host}:{port}"
                    )
                time.sleep(_POLL_INTERVAL_S)
            group = GlooGroup(store, 0, world_size)
            joined.result()
        finally:
            calls.shutdown(wait=False)
        return cls(group, client, source)

    def send_weights(self) -> None:
        """Send all tensors, and return when the engines serve them.

        Raises:
            Exception: what the client raises, or a RuntimeError if an engine is gone.
        """
        self._client.start_weight_update()
        calls = ThreadPoolExecutor(1)
        try:
            received = calls.submit(self._client.update_weights, update_info(self._source.metadata()))
            try:
                self._send()
            except RuntimeError:
                _raise_reason(received)
                raise
            received.result()
        finally:
            calls.shutdown(wait=False)
        self._client.finish_weight_update()

    def _send(self) -> None:
        tensors = iter(self._source)
        for one in self._source.metadata():
            name, tensor = next(tensors, ("nothing", None))
            if tensor is None or (name, tensor.dtype, tuple(tensor.shape)) != (one.name, one.dtype, one.shape):
                found = "" if tensor is None else f" ({tensor.dtype} {list(tensor.shape)})"
                raise ValueError(
                    f"{one.name} ({one.dtype} {list(one.shape)}) was announced, and {name}{found} is to be sent; "
                    "return the same tensors in the same order each time"
                )
            self._group.broadcast(tensor.contiguous())

    def shutdown(self) -> None:
        """Leave the group."""
        self._group.destroy()


def _raise_reason(received: Future[None]) -> None:
    """Raise the engines' error if they report one soon."""
    try:
        received.result(_REASON_TIMEOUT_S)
    except FutureTimeoutError:
        return
