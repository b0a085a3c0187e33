"""The configuration of an engine, and the vLLM settings and environment variables that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_worker.engine.compat import lora_rank
from rollout_worker.engine.compat_v2 import PROPOSER
from rollout_worker.engine.drafting_config import DraftingConfig
from rollout_worker.engine.limits import CPU_KV_CACHE_BYTES, MAX_BATCH_ADAPTERS, MAX_CPU_ADAPTERS
from rollout_worker.engine.model_source import max_positions

_EXTENSIONS = "rollout_worker.engine.worker_extension"


@dataclass(frozen=True)
class EngineConfig:
    """The configuration with which an engine is started."""

    model: Path
    """Directory of the model."""
    spec: EngineSpec
    """``spec.engine`` of the manifest."""
    cpu: bool
    """Whether the engine decodes on the CPU."""
    weight_version: int = 0
    """Version of the weights in *model*."""
    cores: int = 1
    """Number of CPU cores with which a CPU engine computes."""
    drafting: DraftingConfig | None = None
    """None for an engine without speculation."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Additional vLLM engine arguments."""

    @property
    def broadcast_backend(self) -> str:
        """The torch.distributed backend with which the engine receives weights from a trainer's memory."""
        return "gloo" if self.cpu else "nccl"

    @property
    def ranks(self) -> int:
        """Number of the engine's worker processes."""
        return self.spec.gpus


def vllm_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of ``AsyncEngineArgs``.

    Raises:
        EngineError: if vLLM does not support the maximum LoRA rank.
    """
    spec = config.spec
    settings: dict[str, Any] = {
        "model": str(config.model),
        "load_format": "safetensors",
        "dtype": spec.dtype,
        "max_model_len": _max_model_len(config),
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "pipeline_parallel_size": spec.pipeline_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "worker_extension_cls": f"{_EXTENSIONS}.EngineExtension",
    }
    if spec.kv_cache_memory is not None:
        settings["kv_cache_memory_bytes"] = int(parse_quantity(spec.kv_cache_memory))
    elif config.cpu:
        settings["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    if spec.max_lora_rank:
        settings["enable_lora"] = True
        settings["max_lora_rank"] = lora_rank(spec.max_lora_rank)
        settings["max_loras"] = MAX_BATCH_ADAPTERS
        settings["max_cpu_loras"] = MAX_CPU_ADAPTERS
    if config.drafting is not None:
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": config.drafting.max_draft_tokens,
        }
        settings["worker_extension_cls"] = f"{_EXTENSIONS}.DraftingExtension"
    return settings | config.overrides


def engine_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that vLLM's processes need in addition to *inherited*.

    These settings exist in no other form. Variables that the user has set keep their values, except for the one that
    permits the model length which drafting requires.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # vLLM causes both kinds of warnings: by how it uses torch, and by killing processes that end slowly before
        # they have released their shared memory.
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if config.cpu:
        # vLLM would bind every engine of a machine to the same cores, the first ones. More threads than free cores
        # make a step many times slower.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.cores)}
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # V2 needs Triton, which runs its kernels on CPUs in its interpreter.
        if ({**defaults, **inherited})["VLLM_USE_V2_MODEL_RUNNER"] == "1":
            defaults["TRITON_INTERPRET"] = "1"
    variables = {name: value for name, value in defaults.items() if name not in inherited}
    if config.drafting is not None:
        positions = max_positions(config.model)
        if positions is not None and _max_model_len(config) > positions >= config.spec.max_model_len:
            variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    return variables


def _max_model_len(config: EngineConfig) -> int:
    """Return the sequence length that vLLM is configured for.

    Within max_draft_tokens of this length, vLLM replaces the drafts of the whole batch by placeholders. With drafting,
    the length is therefore increased beyond that of any admitted request. Positions beyond the model's own are never
    computed.
    """
    return config.spec.max_model_len + (config.drafting.max_draft_tokens if config.drafting is not None else 0)
