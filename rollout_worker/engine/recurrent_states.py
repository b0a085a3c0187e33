"""Models with recurrent layers, such as linear attention and Mamba: what their states cost, and which undo drafts.

A recurrent layer keeps one state for each response instead of keys and values for each token. A rejected draft must be
undone, so that vLLM keeps a state for each place for a draft as well.
"""

from __future__ import annotations

import logging
import os
from typing import Any, get_args

from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import EngineConfig, engine_args, engine_environment, vllm_settings

logger = logging.getLogger(__name__)
_MAX_MEMORY_SHARE = 0.25
"""Share of an engine's memory that the states of a full batch may take. The rest is for weights and KV cache."""


def state_bytes(vllm_config: Any) -> int:
    """Return the memory of one response's recurrent states on each GPU, in bytes; 0 for a model without such layers."""
    from vllm.config.model import LayerBlockType
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    if not model.has_inner_state:
        return 0
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    if not hasattr(model_class, "get_mamba_state_shape_from_config"):
        return 0
    layers = model.get_num_layers(parallel)
    try:
        numbers = {kind: model.get_num_layers_by_block_type(parallel, kind) for kind in get_args(LayerBlockType)}
    except ValueError:  # the configuration does not tell the layers apart; the result is an upper bound
        pass
    else:
        attention = numbers.pop("attention")
        layers = max(numbers.values()) or layers - attention
    spec = MambaSpec(
        shapes=model_class.get_mamba_state_shape_from_config(vllm_config),
        dtypes=model_class.get_mamba_state_dtype_from_config(vllm_config),
        block_size=-1,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=0 if cache.use_replayssm else vllm_config.num_speculative_tokens,
    )
    return int(layers * spec.max_memory_usage_bytes(vllm_config))


def limit_draft_tokens(vllm_config: Any) -> None:
    """Reduce the places for drafts until the recurrent states of a full batch take at most a quarter of the memory.

    One place always remains.
    """
    from vllm.platforms import current_platform

    speculative, cache = vllm_config.speculative_config, vllm_config.cache_config
    if vllm_config.model_config is None or not state_bytes(vllm_config):
        return
    memory = cache.kv_cache_memory_bytes or current_platform.get_device_total_memory() * cache.gpu_memory_utilization
    responses, wanted = vllm_config.scheduler_config.max_num_seqs, speculative.num_speculative_tokens
    while speculative.num_speculative_tokens > 1 and responses * state_bytes(vllm_config) > memory * _MAX_MEMORY_SHARE:
        speculative.num_speculative_tokens -= 1
    if speculative.num_speculative_tokens < wanted:
        logger.warning(
            "The model keeps recurrent states for each place for a draft. Drafts have at most %d tokens instead of %d, "
            "for which the states of %d responses take %.1f GiB; reduce engine.maxNumSeqs, vLLM's max_num_seqs, to "
            "allow longer drafts.",
            speculative.num_speculative_tokens,
            wanted,
            responses,
            responses * state_bytes(vllm_config) / 2**30,
        )


def check_layers(vllm_config: Any) -> None:
    """Check that all recurrent layers of a loaded model undo rejected drafts. vLLM (seen in 0.32) does not.

    Raises:
        EngineError: if a layer does not.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    for layer in vllm_config.compilation_config.static_forward_context.values():
        if not isinstance(layer, MambaBase):
            continue
        backend = layer.get_attn_backend()
        support = backend.get_builder_cls().get_cudagraph_support(vllm_config, layer.get_kv_cache_spec(vllm_config))
        # Backends that undo drafts have CUDA graphs for several tokens of each request. So has Mamba's first version,
        # but its layer does not read how many of them were accepted.
        if (
            support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            or layer.mamba_type is MambaAttentionBackendEnum.MAMBA1
        ):
            raise EngineError(
                f"the model's layers of {type(layer).__name__} ({backend.get_name()}) cannot undo rejected drafts, "
                "which would change what is sampled; start the engine without drafts (speculation.policy: off in a job)"
            )


def read_state_bytes(config: EngineConfig) -> int:
    """Return :func:`state_bytes` of an engine that is not started.

    It takes some seconds to import vLLM.

    Raises:
        Exception: what vLLM raises if it is not installed, or does not support the model on this machine.
    """
    os.environ.update(engine_environment(config, os.environ))
    return state_bytes(engine_args(vllm_settings(config)).create_engine_config())
