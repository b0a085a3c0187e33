"""A worker extension with which tests examine and disturb weights that an engine passes on."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rollout_worker.engine.worker_extension import DraftingExtension


class _Disturbed(list[Any]):
    """Tensors before each of which something is done."""

    def __init__(self, tensors: Iterable[Any], disturb: Callable[[int], object]) -> None:
        super().__init__(tensors)
        self._disturb = disturb

    def __iter__(self) -> Iterator[Any]:
        for number, tensor in enumerate(list(super().__iter__())):
            self._disturb(number)
            yield tensor


class PassingExtension(DraftingExtension):
    """The extension of an engine whose tensors can be compared, and whose senders can be delayed."""

    _undo: Callable[[], None] | None = None
    _disturb: Callable[[int], object] = staticmethod(lambda _: None)
    _gate = threading.Event()

    def test_tensors(self) -> list[tuple[str, str]]:
        """Return the name and a checksum of each tensor that is passed on."""
        import torch

        from rollout_worker.engine.model_tensors import read_tensors

        return [
            (str(one[0]), hashlib.sha256(one[1].detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
            for one in read_tensors(self.model_runner.get_model(), self.vllm_config)
            if one is not None
        ]

    def das_pass_weights(self, token: str) -> tuple[str, int] | str:
        """Disturb the sender."""
        reply = super().das_pass_weights(token)
        if not isinstance(reply, str):
            sender: Any = self._das_senders[-1]
            sender._tensors = _Disturbed(sender._tensors, self._disturb)
        return reply

    def test_undisturb_senders(self) -> None:
        """Let later senders send at once."""
        self._disturb = lambda _: None

    def test_block_senders(self, num_sent: int) -> None:
        """Let each later sender wait after a number of tensors, until :meth:`test_release_senders`."""
        self._gate = gate = threading.Event()
        self._disturb = lambda number: gate.wait() if number >= num_sent else None

    def test_release_senders(self) -> None:
        """Let the senders continue."""
        self._gate.set()

    def test_has_receiver(self) -> bool:
        """Return whether a receiver has connected to the latest sender."""
        return bool(self._das_senders) and self._das_senders[-1].connected

    def test_remove_weight(self) -> None:
        """Let a layer have an empty parameter that is not a packed weight."""
        import torch

        norm = self.model_runner.get_model().model.norm
        self._replace(norm, "weight", torch.nn.Parameter(torch.empty(0), requires_grad=False))

    def test_reshape(self) -> None:
        """Let a layer have a weight of another shape."""
        import torch

        norm = self.model_runner.get_model().model.norm
        self._replace(norm, "weight", torch.nn.Parameter(torch.ones(3), requires_grad=False))

    def test_add_copy(self) -> None:
        """Let a layer have a tensor that is neither a parameter nor a buffer."""
        norm = self.model_runner.get_model().model.norm
        norm.transposed = norm.weight.detach().reshape(1, -1)
        self._undo = lambda: delattr(norm, "transposed")

    def test_quantize(self) -> None:
        """Let the model seem to be quantized."""
        self._replace(self.vllm_config.model_config, "quantization", "fp8")

    def test_undo(self) -> None:
        """Undo the last change."""
        assert self._undo is not None
        self._undo()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        self._undo = lambda: setattr(owner, name, original)
        setattr(owner, name, value)
