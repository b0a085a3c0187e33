"""NumPy implementations of the Triton kernels that a step of vLLM's V2 model runner launches, for CPUs.

On CPUs, V2 runs its kernels in Triton's interpreter, where a step takes several tenths of a second. These
implementations give the same results; uniform random numbers are equal bit for bit. They were written for vLLM 0.32
and 0.33, and :func:`register` hands them to ``vllm.triton_utils.dispatcher``. Whatever is not in :func:`kernels` stays
in the interpreter: bad words, log-probabilities of requested tokens, and drafters with models. So do the modes of a
kernel that an implementation here lacks.

vLLM finds the plugin :func:`install` if the folder that contains this package is on ``PYTHONPATH``.

``DAS_INTERPRET_KERNELS=1`` leaves all kernels in the interpreter, for tests of the kernels as GPUs run them.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from inspect import signature
from typing import Any

logger = logging.getLogger(__name__)

Grid = tuple[int, ...]
Kernel = Callable[..., Grid | None]
"""Takes a kernel's arguments by position. Returns None, or, if it does not support them, the grid of the original."""

_PREFIX = "vllm.v1.worker.gpu."
_ANY = object()
_UNUSED = {
    "num_computed_tokens_ptr": _ANY,
    "sliding_window_reach_ptr": _ANY,
    "block_sizes_ptr": _ANY,
    "MASK_SLIDING_WINDOW": False,
    "num_logits": _ANY,
    "num_speculative_steps": _ANY,
    "fly_entropy_ptr": None,
    "fly_entropy_threshold": _ANY,
    "FLY_WINDOW_SIZE": 0,
}
"""Parameters of one of the two versions that an implementation may lack, and the only value that it supports."""


class KernelReplacement:
    """Calls an implementation, or the original kernel if the implementation does not support the arguments."""

    def __init__(self, kernel: Kernel, original: Any) -> None:
        self.kernel, self.original = kernel, original
        self._parameters = signature(kernel).parameters

    def __call__(self, *args: Any, num_warps: int | None = None, **kwargs: Any) -> None:
        """Launch the kernel. Its grid is known from its arguments; *num_warps* has no meaning on CPUs."""
        named = dict(zip(self.original.arg_names, args, strict=False)) | kwargs
        for name in named.keys() - self._parameters.keys():
            value = named.pop(name)
            assert _UNUSED[name] in (_ANY, value), f"there is no implementation for {name}={value}"
        grid = self.kernel(**named)
        if grid is not None:
            self.original[grid](*args, **kwargs)


def install() -> None:
    """Let engines with V2 use the implementations, and schedule asynchronously, as on GPUs.

    vLLM calls this in each of its processes. Engines with V1 are not affected.
    """
    from vllm.platforms import current_platform

    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1" or not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    update_config, register_overrides = platform.check_and_update_config, platform.register_triton_kernel_overrides

    def check_and_update_config(vllm_config: Any) -> None:
        """Restore asynchronous scheduling, which vLLM disables on CPUs, because V1 does not need it there."""
        wanted = vllm_config.scheduler_config.async_scheduling
        update_config(vllm_config)
        if vllm_config.use_v2_model_runner:
            vllm_config.scheduler_config.async_scheduling = wanted

    def register_triton_kernel_overrides() -> None:
        """Replace kernels in the processes that run the model, which is where vLLM calls this function."""
        register_overrides()
        register()

    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.register_triton_kernel_overrides = staticmethod(register_triton_kernel_overrides)


def kernels() -> dict[str, Kernel]:
    """Return the implementations by the qualified names of vLLM's kernels."""
    from cpu_kernels import inputs, rejection, sampling

    return {
        _PREFIX + name: kernel for module in (inputs, rejection, sampling) for name, kernel in module.KERNELS.items()
    }


def register() -> None:
    """Replace the kernels of this process, and the filter by ``top_k`` and ``top_p``; further calls have no effect.

    A kernel that the installed vLLM lacks, or that has other parameters, is not replaced; the log names it.
    """
    if os.environ.get("DAS_INTERPRET_KERNELS") == "1":
        return
    # Changes torch for CPUs. Must be imported before the modules that hold the kernels.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.triton_utils.dispatcher import register_kernels

    replacements = {}
    for name, kernel in kernels().items():
        original = _find(name)
        if original is None:
            continue
        names, own = original.arg_names, signature(kernel).parameters
        expected = [name for name in names if name in own or name not in _UNUSED]
        parameters = [name for name, one in own.items() if name in names or one.default is one.empty]
        if expected == parameters:
            replacements[name] = KernelReplacement(kernel, original)
        else:
            logger.warning(
                "%s runs in Triton's interpreter, because it has the parameters %s instead of %s",
                *(name, ", ".join(expected), ", ".join(parameters)),
            )
    register_kernels(replacements)
    _filter_without_triton()


def _find(name: str) -> Any:
    """Return a kernel that was not replaced yet, or None."""
    module, attribute = name.rsplit(".", 1)
    try:
        kernel = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError:
        kernel = None
    if kernel is None:
        logger.warning("The installed vLLM has no kernel %s", name)
        return None
    return None if isinstance(getattr(kernel, "func", None), KernelReplacement) else kernel


def _filter_without_triton() -> None:
    """Let vLLM filter by ``top_k`` and ``top_p`` with torch, as V1 does on CPUs."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply(logits: Any, k: Any, p: Any, **_: Any) -> Any:
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    topk_topp_sampler.apply_top_k_top_p_triton = apply
