"""Patches of the installed vLLM, to be applied in its worker processes.

They were tested with vLLM 0.32 on CPUs. Defects are probed where that is possible,
and never inferred from a version number.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rollout_store.job.engines import EngineError

logger = logging.getLogger(__name__)
_NCCL_ID = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"


def patch_adapter_rows() -> bool:
    """Patch vLLM's CPU operators if they apply adapters to responses without an adapter.

    For a token without an adapter (index -1), they use the weights of the last adapter (vllm#48421, seen in 0.32). A
    response of the full weights that shares a batch with one of an adapter is then silently changed by the adapter.

    Returns:
        Whether they were defective and are patched now.

    Raises:
        EngineError: if the patch has no effect.
    """
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def excludes_rows_without_adapter() -> bool:
        output = torch.zeros(1, 1)
        lora_ops.bgmv_shrink(torch.ones(1, 1), torch.ones(1, 1, 1), output, torch.tensor([-1]))
        return not output.any()

    if excludes_rows_without_adapter():
        return False
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        patched = _exclude_rows_without_adapter(getattr(lora_ops, name))
        setattr(lora_ops, name, patched)
        setattr(punica_cpu, name, patched)
    if not excludes_rows_without_adapter():
        raise EngineError("vLLM applies adapters to responses without an adapter; set engine.maxLoraRank to 0")
    logger.warning("Patched vLLM's CPU operators, which apply adapters to responses without one (vllm#48421).")
    return True


def _exclude_rows_without_adapter(operator: Callable[..., None]) -> Callable[..., None]:
    def patched(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
        without_adapter = (indices < 0).unsqueeze(1)
        operator(inputs.masked_fill(without_adapter, 0), weights, output, indices, *args, **kwargs)

    return patched


def patch_draft_sampling(device_type: str) -> bool:
    """Replace the ``expand_batch_to_tokens`` of vLLM's V1 model runner if it returns wrong values on this machine.

    On CPU builds without Triton, the function writes to a temporary tensor (vllm#55005, seen in 0.32 and 0.33).
    Temperature, top_p and top_k of draft positions are then uninitialized memory, so that the output distribution is
    silently wrong. Call this after the platform's kernels were loaded. On GPUs, the function launches a Triton kernel
    that writes to its result. It is not probed there.

    Args:
        device_type: type of the device that samples, ``cpu`` or ``cuda``.

    Returns:
        Whether it was defective and is replaced now.

    Raises:
        EngineError: if the replacement returns wrong values as well.
    """
    if device_type != "cpu":
        return False
    import torch
    from vllm.v1.sample import rejection_sampler

    if _expands_correctly(rejection_sampler.expand_batch_to_tokens, torch):
        return False
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    if not _expands_correctly(rejection_sampler.expand_batch_to_tokens, torch):
        raise EngineError(
            "vLLM's expand_batch_to_tokens returns wrong values on this machine, and so does its replacement; set "
            "speculation.policy to off"
        )
    logger.warning(
        "Replaced vLLM's expand_batch_to_tokens, which returns wrong values on this machine (vllm#55005), so that "
        "temperature, top_p and top_k apply at draft positions."
    )
    return True


def _expands_correctly(function: Any, torch: Any) -> bool:
    """Return whether *function* does what its docstring says, with both data types of its calls."""
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    for values, dtype in (([0.5, 0.25, 0.0, 2.0], torch.float32), ([7, 3, 0, 9], torch.int32)):
        batch = torch.tensor(values, dtype=dtype)
        expected = torch.tensor([values[0]] * 2 + [1] * 3 + [values[3]], dtype=dtype)
        # Overwrite freed memory first, because uninitialized memory may contain the right values by chance.
        for _ in range(3):
            torch.full((6,), -123, dtype=dtype)
            if not torch.equal(function(batch, ends, 6, replace_from=0, replace_to=1), expected):
                return False
    return True


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Do what vLLM's function of this name should: repeat ``x[i]`` for each token of request i."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts.to(torch.int64), output_size=num_tokens)
    if replace_from == replace_to:
        return expanded
    return torch.where(expanded == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), expanded)


def patch_sampling_without_drafts(runner: Any) -> None:
    """Let steps that verify no draft use the ordinary sampler. Call this on all ranks or on none.

    With speculation, vLLM (seen in 0.32) runs the rejection sampler in every step, even without drafts. The output
    distribution is the same, but the step takes longer.
    """
    sample = runner._sample

    def patched(logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return sample(logits, spec_decode_metadata)

    runner._sample = patched


def accept_settings_without_drafts(llm: Any) -> None:
    """Let an ``AsyncLLM`` with speculation accept ``min_p`` and ``logit_bias``.

    vLLM (seen in 0.32) rejects them, because V1 does not apply them to drafts. Such requests must have no drafts.
    """
    llm.input_processor.speculative_config = None


def apply_settings_without_drafts(runner: Any) -> None:
    """Let the V1 model runner apply ``min_p`` and ``logit_bias`` to tokens that are sampled without drafts.

    With speculation, vLLM (seen in 0.32) does not create the logits processors that do so. It would apply them to one
    position of each response: to the token after its drafts, or to its only token if it has none.
    """
    from vllm.utils.torch_utils import PIN_MEMORY
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor

    processors = runner.input_batch.logitsprocs
    processors.non_argmax_invariant.append(LogitBiasLogitsProcessor(runner.vllm_config, runner.device, PIN_MEMORY))
    processors.argmax_invariant.append(MinPLogitsProcessor(runner.vllm_config, runner.device, PIN_MEMORY))


def enable_amx() -> None:
    """Ask the kernel for permission to use AMX in this process, on CPUs that have it.

    vLLM (seen in 0.32) chooses AMX kernels by the CPU's features but never asks for permission. If PyTorch has not done
    so by chance, the worker process dies of SIGILL in its first step in bfloat16. The permission is not inherited by
    programs that the process executes.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


# Reloading weights


def reset_failed_reload(model: Any) -> None:
    """Discard what a failed reload has left in a model, so that the next reload starts from the beginning.

    vLLM (seen in 0.32) collects the tensors of a layer until they are complete. Those of an incomplete layer
    stay there. The next reload would load them together with its own, and fail or mix both.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def is_finite(tensor: Any) -> bool:
    """Return whether all values of a torch tensor are finite; true of data types that are not checked.

    These are integers, and the formats of 8 bits and less that only scales have.
    """
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # The magnitude, the lower seven bits, from which on numbers are infinite or NaN.
    limits = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
    if (limit := limits.get(tensor.dtype)) is not None:
        return int((tensor.view(torch.uint8) & 0x7F).amax()) < limit
    if tensor.element_size() == 1:
        return True
    # Sums are much faster, but may overflow themselves, which those of single rows hardly ever do.
    return bool(tensor.sum(-1).isfinite().all()) or bool(tensor.isfinite().all())


@contextmanager
def noting_not_finite(model: Any, names: list[str]) -> Iterator[None]:
    """Add the names of the tensors that are not finite to *names* while a model loads tensors within this context."""
    load_weights = model.load_weights

    def noting(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if not is_finite(tensor):
                names.append(name)
            yield name, tensor

    def note_and_load(weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        return load_weights(noting(weights), *args, **kwargs)

    model.load_weights = note_and_load
    try:
        yield
    finally:
        del model.load_weights


@contextmanager
def unpickling_nccl_ids_only() -> Iterator[None]:
    """Let vLLM unpickle nothing but NCCL's identifier when it joins a trainer's group within this context.

    vLLM's workers receive the identifier pickled, and would otherwise unpickle whatever is sent, so that whoever tells
    engines a trainer's address could run code in them.
    """
    from vllm.distributed import utils

    original: Any = utils.pickle
    utils.pickle = SimpleNamespace(dumps=original.dumps, loads=load_nccl_id)
    try:
        yield
    finally:
        utils.pickle = original


def load_nccl_id(pickled: bytes) -> Any:
    """Unpickle NCCL's identifier, a ctypes structure.

    Raises:
        pickle.UnpicklingError: it is something else.
    """
    loaded = _NcclIdUnpickler(io.BytesIO(pickled)).load()
    if type(loaded).__name__ != _NCCL_ID[1]:
        raise pickle.UnpicklingError(f"a {type(loaded).__name__} in place of NCCL's identifier")
    return loaded


class _NcclIdUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return one of the classes that the identifier consists of."""
        if (module, name) not in (_NCCL_ID, ("_ctypes", "_unpickle")):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of NCCL's identifier")
        return super().find_class(module, name)


def rewind_cpu_generators(model_runner: Any) -> bool:
    """Let the V1 model runner read the prompts of seeded responses in several steps on CPUs.

    A step that does not reach the end of a prompt samples a token that is discarded, and V1 (seen in vLLM 0.32) then
    sets the random generator of a seeded response back by four numbers. Generators on CPUs have no such position, and
    the engine dies. This function sets them back to the state that they had before the step.

    Returns:
        Whether it is a V1 model runner, whose methods are replaced.
    """
    if not hasattr(model_runner, "discard_request_mask"):
        return False
    sample, bookkeep = model_runner._sample, model_runner._bookkeeping_sync

    def discarded() -> dict[int, Any]:
        batch = model_runner.input_batch
        mask = model_runner.discard_request_mask.np
        return {row: generator for row, generator in batch.generators.items() if mask[row]}

    def sample_and_rewind(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in discarded().values()]
        output = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeep_without_generators(*args: Any, **kwargs: Any) -> Any:
        generators, hidden = model_runner.input_batch.generators, discarded()
        for row in hidden:
            del generators[row]
        try:
            return bookkeep(*args, **kwargs)
        finally:
            generators.update(hidden)

    model_runner._sample, model_runner._bookkeeping_sync = sample_and_rewind, bookkeep_without_generators
    return True


@contextmanager
def packing_experts(model: Any) -> Iterator[None]:
    """Pack the weights of experts after a reload within this context if the reload does not.

    On CPU, vLLM (seen in 0.32) packs them for its kernel when the model is loaded, but not in a reload. The kernel then
    reads unpacked weights as packed ones, so that the logits would silently be wrong.
    """
    packed: set[int] = set()
    layers: list[tuple[Any, Any]] = []
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and "w13_weight" in layer._parameters:
            layers.append((layer, experts))
            experts.process_weights_after_loading = _noting_layers(experts.process_weights_after_loading, packed)
    try:
        yield
    finally:
        for _, experts in layers:
            del experts.process_weights_after_loading
    for layer, experts in layers:
        if id(layer) not in packed:
            experts.process_weights_after_loading(layer)


def _noting_layers(process: Callable[[Any], None], processed: set[int]) -> Callable[[Any], None]:
    def process_and_note(layer: Any) -> None:
        processed.add(id(layer))
        process(layer)

    return process_and_note


@contextmanager
def repacking_output_projection(model: Any) -> Iterator[None]:
    """Pack the output projection again after a reload within this context if the reload does not.

    On CPU, vLLM (seen in 0.32) multiplies by a packed copy of the weight. A reload updates this copy for each tensor of
    the checkpoint. With tied embeddings, there is no tensor of the output projection, so that the logits would silently
    follow the previous weights. That cannot be seen in the logits: from one training step to the next, they change by
    less than the rounding errors of bfloat16.
    """
    # Each packed copy has a function of its own.
    head: Any = getattr(model, "lm_head", None)
    previous = vars(head).get("cpu_linear") if head is not None else None
    tied = [layer for layer in model.modules() if previous is not None and _shares_weight(layer, head)]
    copies = [layer.cpu_linear for layer in tied]
    yield
    if previous is None or head.cpu_linear is not previous:
        return
    for layer, copy in zip(tied, copies, strict=True):
        if layer.cpu_linear is not copy:  # the reload has packed the same weight for the embeddings
            head.cpu_linear = layer.cpu_linear
            return
    head.quant_method.process_weights_after_loading(head)


def _shares_weight(layer: Any, head: Any) -> bool:
    """Return whether another layer than the output projection packs its weight."""
    return layer is not head and getattr(layer, "weight", None) is head.weight and "cpu_linear" in vars(layer)
