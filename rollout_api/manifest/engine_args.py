"""The engine arguments of vLLM that ``spec.engine.extraArgs`` may not contain, and why.

The names are those of vLLM's ``AsyncEngineArgs``. Names that vLLM does not know are reported when an engine starts,
because only the worker has vLLM.
"""

from __future__ import annotations

import re

FIELDS = {
    "model": "spec.model.uri",
    "revision": "spec.model.revision",
    "hf_token": "spec.model.tokenSecretRef",
    "download_dir": "spec.model.cache",
    "dtype": "spec.engine.dtype",
    "max_model_len": "spec.engine.maxModelLen",
    "max_num_seqs": "spec.engine.maxNumSeqs",
    "tensor_parallel_size": "spec.engine.tensorParallelSize",
    "pipeline_parallel_size": "spec.engine.pipelineParallelSize",
    "enable_expert_parallel": "spec.engine.enableExpertParallel",
    "enable_lora": "spec.engine.maxLoraRank",
    "max_lora_rank": "spec.engine.maxLoraRank",
    "kv_cache_memory_bytes": "spec.engine.kvCacheMemory",
    "kv_cache_dtype": "spec.engine.kvCacheDtype",
    "gpu_memory_utilization": "spec.engine.gpuMemoryUtilizationPercentage",
    "quantization": "spec.engine.quantization",
    "enforce_eager": "spec.engine.enforceEager",
    "logprobs_mode": "spec.engine.logprobsMode",
    "stream_interval": "spec.engine.checkpointTokens",
    "speculative_config": "spec.speculation",
    "spec_method": "spec.speculation",
    "spec_model": "spec.speculation",
    "spec_tokens": "spec.speculation",
}
"""Arguments that a field of the manifest sets."""

_ONE_MODEL = "the engine serves the model of spec.model with its own tokenizer"
_ONE_POD = (
    "an engine lives in one pod and has tensorParallelSize × pipelineParallelSize GPUs; a pod with a multiple of these "
    "(spec.workers.gpusPerWorker) runs several engines, which is data parallelism"
)
_KEPT_KEYS = "keys and values that were computed with earlier weights could be used"
_DISTRIBUTION = "it would change the distribution that is sampled"
_OWN = "das-rollout sets it"

REASONS = {
    "tokenizer": _ONE_MODEL,
    "tokenizer_mode": _ONE_MODEL,
    "tokenizer_revision": _ONE_MODEL,
    "skip_tokenizer_init": _ONE_MODEL,
    "model_weights": _ONE_MODEL,
    "runner": _ONE_MODEL,
    "convert": _ONE_MODEL,
    "hf_config_path": _ONE_MODEL,
    "diffusion_config": _ONE_MODEL,
    "load_format": "published weights are safetensors, and the model is loaded in the same way",
    "weight_transfer_config": "the trainer's weights arrive as spec.weights says",
    "distributed_executor_backend": _ONE_POD,
    "nnodes": _ONE_POD,
    "node_rank": _ONE_POD,
    "master_addr": _ONE_POD,
    "master_port": _ONE_POD,
    "device_ids": _ONE_POD,
    "prefill_context_parallel_size": _ONE_POD,
    "enable_elastic_ep": _ONE_POD,
    "kv_transfer_config": _KEPT_KEYS,
    "ec_transfer_config": _KEPT_KEYS,
    "kv_offloading_size": _KEPT_KEYS,
    "kv_offloading_backend": _KEPT_KEYS,
    "logits_processors": _DISTRIBUTION,
    "max_logprobs": "das-rollout sets it to what sampling.topLogprobs and sampling.keptTokens need",
    "watermark_config": _DISTRIBUTION,
    "enable_trace_replay": _DISTRIBUTION,
    "seed": "every engine needs a different one; for reproducible rollouts set spec.sampling.seed",
    "async_scheduling": "the model runner with which an engine drafts determines it, and without drafting vLLM decides",
    "scheduler_cls": _OWN,
    "worker_cls": _OWN,
    "worker_extension_cls": _OWN,
    "max_num_queued_reqs": "spec.queue limits what is queued",
    "max_num_queued_tokens": "spec.queue limits what is queued",
    "disable_log_stats": "das-rollout's metrics are computed from vLLM's statistics",
    "enable_log_requests": _OWN,
    "use_tqdm_on_load": _OWN,
    "tokens_only": _OWN,
    "max_loras": _OWN,
    "max_cpu_loras": _OWN,
}
"""Arguments that no field sets, with the reason."""

PREFIXES = {"data_parallel_": _ONE_POD}
"""Beginnings of the names of further such arguments."""
_PYTHON_NAME = re.compile(r"[a-z][a-z0-9_]*")


def extra_arg_error(name: str) -> str | None:
    """Return why ``extraArgs`` may not contain an argument, or what to set instead; None if it may."""
    if not _PYTHON_NAME.fullmatch(name):
        python_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-").replace("-", "_")).lower()
        hint = f", {python_name}" if _PYTHON_NAME.fullmatch(python_name) else ""
        return f"must be the name of a field of vLLM's AsyncEngineArgs{hint}"
    if (field := FIELDS.get(name)) is not None:
        return f"set {field} instead"
    reason = REASONS.get(name) or next((why for start, why in PREFIXES.items() if name.startswith(start)), None)
    return f"cannot be set, because {reason}" if reason else None
