"""Lets vLLM's senders of weights run on a CPU, unmodified: with gloo in place of NCCL, and without CUDA's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from rollout_api.weights.gloo import GlooGroup


class GlooCommunicator:
    """In place of vLLM's ``PyNcclCommunicator``; senders use no more of it than this."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group
        self._gloo = GlooGroup(group.store, group.rank, group.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send a tensor to all other processes."""
        assert 0 == src
        self._gloo.broadcast(tensor)

    def destroy(self) -> None:
        """Leave the group."""
        self._gloo.destroy()


class _Stream:
    """In place of a CUDA stream. Everything is done when it is called."""

    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


def install(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace what needs a GPU, with ``setattr`` or a function that undoes it later."""
    from vllm.distributed.device_communicators import pynccl

    set_attribute(pynccl, "PyNcclCommunicator", GlooCommunicator)
    set_attribute(torch.accelerator, "current_device_index", lambda: 0)
    set_attribute(torch.cuda, "Stream", _Stream)
    set_attribute(torch.cuda, "current_stream", _Stream)
    set_attribute(torch.cuda, "stream", contextlib.nullcontext)
