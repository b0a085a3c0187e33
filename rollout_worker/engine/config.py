"""The configuration of an engine, and the vLLM settings and environment variables that follow from it."""

from __future__ import annotations

import dataclasses
import difflib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJobSpec
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.weights.gloo import GLOO
from rollout_store.job.engines import EngineError
from rollout_store.models.model_source import max_positions
from rollout_worker.engine.draft_settings import PROPOSER, DraftingConfig
from rollout_worker.engine.sampling_params import MAX_KEPT_WIDTH
from rollout_worker.engine.vllm_version import check_vllm

_PROMPT_TOKENS_BESIDE_PLACES = 8192
"""Tokens of prompts that a step can read while all places for drafts are planned; the whole step of ``vllm serve`` on
an H100."""
_DEFAULT_CUDA_GRAPH_TOKENS = 512
"""Tokens of the largest CUDA graph that vLLM captures by default."""
_MAX_CUDA_GRAPH_TOKENS = 2048
"""Tokens of the largest CUDA graph that is captured for batches with drafts. Each graph takes memory and start time. In
larger steps, the GPU is estimated to work for longer than it takes to launch its kernels."""
_CPU_KV_CACHE_BYTES = 1 << 30
"""Size of the KV cache of a CPU engine whose manifest does not set it."""
_MAX_BATCH_ADAPTERS = 2
"""Adapters that one batch may use: that of the responses which started before an update, and the newest."""
_MAX_CPU_ADAPTERS = 8
"""Adapters that vLLM keeps in main memory. It reads a dropped one again from its directory, and dies if that fails."""
_IN_CORE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the process of the engine's core. vLLM replaces its short name, "uni", on CPUs."""
EXTENSIONS = "rollout_worker.engine.worker_extension"
"""The module of the extensions of vLLM's workers in jobs."""


@dataclass(frozen=True)
class EngineNode:
    """One of several machines that run an engine together. vLLM calls them nodes."""

    count: int
    """Number of machines. vLLM's worker processes are divided equally among them, in the order of ranks."""
    rank: int
    """0 on the machine with the engine's core."""
    address: str
    """Address of the machine of rank 0."""
    port: int
    """Port of this machine for the others."""


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an engine when it starts."""

    model: Path
    """Directory of the model."""
    spec: EngineSpec
    """``spec.engine`` of the manifest."""
    cpu: bool
    """Whether the engine decodes on the CPU."""
    weight_version: int = 0
    """Version of the weights in *model*."""
    cores: int = 1
    """Number of CPU cores that a CPU engine computes with."""
    drafting: DraftingConfig | None = None
    """None for an engine without speculation."""
    node: EngineNode | None = None
    """None for an engine on one machine."""
    weight_transfer: str = ""
    """The backend of vLLM's weight transfer from a trainer's memory; '' if there is none."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Additional vLLM engine arguments."""
    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))
    """Seed of the random stream of responses without a seed of their own. With equal seeds, as vLLM's default is,
    engines that receive the same prompts at the same time would sample the same responses."""

    @property
    def sends_differences(self) -> bool:
        """Whether a trainer sends only what has changed in the weights."""
        return self.weight_transfer == "sparse_nccl"

    @property
    def returns_routed_experts(self) -> bool:
        """Whether vLLM returns the experts of each token."""
        return bool((self.spec.extra_args | self.overrides).get("enable_return_routed_experts"))

    @property
    def can_sleep(self) -> bool:
        """Whether the engine can free the memory of its GPUs, if it has any."""
        return self.cpu or bool((self.spec.extra_args | self.overrides).get("enable_sleep_mode"))

    @property
    def ranks(self) -> int:
        """Number of the engine's worker processes."""
        return self.spec.gpus


def transfer_backend(spec: RolloutJobSpec) -> str:
    """Return vLLM's backend for weights that a trainer sends from its memory; '' if the job's engines receive none."""
    choice = spec.weights.transfer
    if choice == "none":
        return ""
    if spec.workers.gpus_per_worker == 0:
        return GLOO
    return "nccl" if choice == "auto" else choice


def vllm_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of ``AsyncEngineArgs``.

    Raises:
        EngineError: if vLLM does not support the maximum LoRA rank, the quantization or the data type of the KV cache.
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
        "seed": config.seed,
        "logprobs_mode": f"{spec.logprobs_mode}_logprobs",
        "max_logprobs": MAX_KEPT_WIDTH,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "worker_extension_cls": f"{EXTENSIONS}.EngineExtension",
    }
    if spec.kv_cache_memory is not None:
        settings["kv_cache_memory_bytes"] = int(parse_quantity(spec.kv_cache_memory))
    elif config.cpu:
        settings["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if spec.gpu_memory_utilization_percentage is not None:
        settings["gpu_memory_utilization"] = spec.gpu_memory_utilization_percentage / 100
    if spec.kv_cache_dtype != "auto":
        from vllm.config.cache import CacheDType

        _check_name("engine.kvCacheDtype", spec.kv_cache_dtype, get_args(CacheDType))
        settings["kv_cache_dtype"] = spec.kv_cache_dtype
    if spec.quantization is not None:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

        _check_name("engine.quantization", spec.quantization, QUANTIZATION_METHODS)
        settings["quantization"] = spec.quantization
    if spec.enable_expert_parallel:
        settings["enable_expert_parallel"] = True
    if spec.max_lora_rank:
        settings["enable_lora"] = True
        settings["max_lora_rank"] = lora_rank(spec.max_lora_rank)
        settings["max_loras"] = _MAX_BATCH_ADAPTERS
        settings["max_cpu_loras"] = _MAX_CPU_ADAPTERS
    if config.weight_transfer:
        settings["weight_transfer_config"] = {"backend": config.weight_transfer}
    if config.drafting is not None:
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": config.drafting.max_draft_tokens,
        }
        settings["worker_extension_cls"] = f"{EXTENSIONS}.DraftingExtension"
        if sizes := _cuda_graph_sizes(config, config.drafting.max_draft_tokens):
            settings["cudagraph_capture_sizes"] = sizes
    if not config.cpu:
        draft_tokens = 0 if config.drafting is None else config.drafting.max_draft_tokens
        settings["max_num_batched_tokens"] = scheduled_tokens(spec.max_num_seqs, draft_tokens)
    elif config.ranks == 1:
        # vLLM would run the model in a process of its own, which takes seconds to start, and each step would take
        # two messages to it. vLLM does so in order to set OMP_NUM_THREADS, which engine_environment has set already.
        settings["distributed_executor_backend"] = _IN_CORE_PROCESS
    if config.node is not None:
        settings |= {
            "distributed_executor_backend": "mp",
            "nnodes": config.node.count,
            "node_rank": config.node.rank,
            "master_addr": config.node.address,
            "master_port": config.node.port,
        }
    settings |= spec.extra_args | config.overrides
    if config.cpu:
        settings.pop("enable_sleep_mode", None)  # vLLM refuses it, although its CPU workers ignore sleep
    return settings


def scheduled_tokens(max_num_seqs: int, max_draft_tokens: int) -> int:
    """Return how many tokens a step on a GPU can schedule.

    V2's scheduler plans places for the longest drafts before it knows the drafts. If the limit were smaller, they would
    leave little of a step for prompts, or leave out responses, although their drafts are mostly shorter. vLLM's default
    for an engine that a program starts is 2,048 on every GPU.
    """
    return max_num_seqs * (1 + max_draft_tokens) + _PROMPT_TOKENS_BESIDE_PLACES


def _cuda_graph_sizes(config: EngineConfig, max_draft_tokens: int) -> list[int]:
    """Return the sizes of the CUDA graphs that vLLM captures, in tokens of a step; empty for vLLM's own sizes."""
    spec = config.spec
    compilation = spec.extra_args.get("compilation_config")
    chosen = spec.extra_args.keys() | (compilation.keys() if isinstance(compilation, dict) else set())
    if config.cpu or spec.enforce_eager or chosen & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
        return []
    return cuda_graph_sizes(spec.max_num_seqs, max_draft_tokens)


def cuda_graph_sizes(max_num_seqs: int, max_draft_tokens: int) -> list[int]:
    """Return sizes of CUDA graphs up to a full batch with full drafts; empty if vLLM's own sizes include it.

    vLLM captures graphs up to 512 tokens (1,024 on data center GPUs of the Blackwell generation) and runs larger steps
    without a graph. The sizes have the same spacing as vLLM's up to 512 tokens. Above, it doubles with the size, so
    that steps are padded by at most about 6 %, and the number of graphs grows only with the logarithm of the limit.

    Args:
        max_num_seqs: maximum number of responses in a step.
        max_draft_tokens: maximum number of tokens of one draft.

    Returns:
        Numbers of tokens in ascending order. The last is a multiple of 1 + *max_draft_tokens*, because vLLM's V1 model
        runner rounds all sizes up to such multiples and drops those beyond the last.
    """
    response_tokens = 1 + max_draft_tokens
    limit = min(max_num_seqs * response_tokens, _MAX_CUDA_GRAPH_TOKENS) // response_tokens * response_tokens
    if limit <= _DEFAULT_CUDA_GRAPH_TOKENS:
        return []
    sizes = [1, 2, 4, *range(8, 256, 8)]
    spacing, size = 16, 256
    while size < limit:
        sizes.append(size)
        size += spacing
        if size >= 32 * spacing:
            spacing *= 2
    return [*sizes, limit]


def engine_args(settings: dict[str, Any]) -> Any:
    """Return ``AsyncEngineArgs`` with these settings.

    Raises:
        EngineError: if the installed vLLM is not supported, or does not have one of the settings.
    """
    check_vllm()
    from vllm import __version__
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    if missing := sorted(settings.keys() - known):
        names = ", ".join(name + _similar_names(name, known) for name in missing)
        raise EngineError(f"vLLM {__version__} has no engine argument {names}; correct engine.extraArgs")
    return AsyncEngineArgs(**settings)


def _similar_names(name: str, known: Iterable[str]) -> str:
    """Return the known names that are similar to an unknown one, as a question in parentheses; empty if none is."""
    similar = difflib.get_close_matches(name, sorted(known))
    return f" (did you mean {' or '.join(similar)}?)" if similar else ""


def _check_name(field: str, name: str, known: Sequence[str]) -> None:
    """Check that vLLM has what a field of the manifest names.

    Raises:
        EngineError: if it does not. The message lists all names.
    """
    from vllm import __version__

    if name not in known:
        raise EngineError(f"{field} is {name}, but vLLM {__version__} supports only {', '.join(known)}")


def lora_rank(rank: int) -> int:
    """Return the smallest maximum rank that vLLM supports for LoRA adapters of at most *rank*.

    Raises:
        EngineError: if vLLM supports no such rank.
    """
    from vllm.config.lora import MaxLoRARanks

    for supported in sorted(get_args(MaxLoRARanks)):
        if supported >= rank:
            return int(supported)
    raise EngineError(f"engine.maxLoraRank is {rank}, but vLLM supports at most {max(get_args(MaxLoRARanks))}")


def engine_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that vLLM's processes need in addition to *inherited*.

    These settings exist in no other form. Variables that the user has set keep their values, except for the one that
    permits the model length which drafting requires, and for a directory of compiled code that cannot be written to.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        # On GPUs, vLLM tells the attention backend, the mode of CUDA graphs and the size of the KV cache at this level.
        "VLLM_LOGGING_LEVEL": "ERROR" if config.cpu else "INFO",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_LOGS": "-torch._library.triton",  # errors only: it warns that Triton is missing, which CPUs do not need
        # vLLM causes both kinds of warnings: by how it uses torch, and by killing processes that end slowly before
        # they have released their shared memory.
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
    }
    if config.cpu:
        # vLLM would bind every engine of a machine to the same cores, the first ones. More threads than free cores
        # make a step many times slower.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.cores)}
        if config.ranks > 1 and config.spec.enforce_eager:
            # With several ranks, vLLM compiles the embedding even with enforce_eager. Images without a compiler cannot
            # do this.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V2 needs a GPU
    else:
        # vLLM would fork this process. A forked process cannot use CUDA if this one has, even if it only asked whether
        # there is a GPU ("Cannot re-initialize CUDA in forked subprocess").
        defaults["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        # Without this, vLLM would use V1, which waits for each step, if V2 lacks anything. With it, vLLM refuses.
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    variables: dict[str, str] = {}
    compiled = inherited.get("VLLM_CACHE_ROOT")
    if compiled is not None and not _is_writable(Path(compiled)):
        # An engine that cannot write there does not start, for example if a claim is mounted read-only.
        variables["VLLM_CACHE_ROOT"] = str(Path("~/.cache/vllm").expanduser())
    if config.weight_transfer == "ipc":
        defaults["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # vLLM receives handles of GPU memory pickled
    variables |= {name: value for name, value in defaults.items() if name not in inherited}
    if config.drafting is not None:
        positions = max_positions(config.model)
        if positions is not None and _max_model_len(config) > positions >= config.spec.max_model_len:
            variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    return variables


def _is_writable(directory: Path) -> bool:
    """Return whether files can be created in a directory, which is created if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _max_model_len(config: EngineConfig) -> int:
    """Return the sequence length that vLLM is configured for.

    Within max_draft_tokens of this length, V1 replaces the drafts of the whole batch by placeholders, and the scheduler
    plans fewer places for drafts. With asynchronous scheduling, it takes all places of the running step for tokens
    until it knows how many were accepted. With drafting, the length is therefore increased beyond that of any admitted
    request. Positions beyond the model's own are never computed.
    """
    return config.spec.max_model_len + (2 * config.drafting.max_draft_tokens if config.drafting is not None else 0)
