"""Checks a manifest, and whether its model is on this machine and fits into memory. Nothing is downloaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import ManifestError, RolloutJob
from rollout_store.models.model_source import ModelError, find_model, load_tokenizer, read_config
from rollout_tools.doctor.findings import GIB, Finding, error, ok, size_text, warning
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.draft_settings import DraftingConfig, HistoryLocation
from rollout_worker.engine.recurrent_states import read_state_bytes

_DEFAULT_GPU_SHARE = 92
"""Percentage of a GPU's memory that vLLM 0.32 uses by default."""
_DEFAULT_CPU_CACHE = GIB
"""KV cache of an engine on CPUs if the manifest says nothing."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known about a manifest's model on this machine."""

    uri: str
    directory: str | None
    """Where it is; None if it has to be downloaded."""
    unusable: str = ""
    """Why it cannot be used."""
    tokenizer_error: str = ""
    """Why its tokenizer cannot be loaded."""
    estimate: MemoryEstimate | None = None
    """None if it has to be downloaded, has an unusual configuration, or has recurrent states of unknown size."""
    missing_roots: Sequence[str] = ()
    """Directories of ``weights.allowedRoots`` that do not exist here."""


def check_invalid_manifest(failure: ManifestError) -> list[Finding]:
    """Return a finding for each error in a manifest."""
    return [error(one.path, one.message, "correct the manifest; see docs/manifest.md") for one in failure.errors]


def check_manifest(job: RolloutJob, model: ModelFacts, *, gpu_memory: int | None, memory: int | None) -> list[Finding]:
    """Check a valid manifest.

    *gpu_memory* is that of the smallest GPU of this machine, in bytes; None if it has none. *memory* is what a job may
    use of this machine, in bytes; None if jobs run on other machines.
    """
    findings = [ok("manifest", f"RolloutJob {job.metadata.namespace}/{job.metadata.name} is valid")]
    if job.spec.runtime_ref is not None:
        findings.append(
            warning(
                "runtime",
                f"spec.runtimeRef names {job.spec.runtime_ref.name}",
                "only the operator can read it, so that its settings are not examined",
            )
        )
    findings += _model(model, runs_here=memory is not None)
    if model.estimate is not None:
        findings.append(_fit(job, model.estimate, gpu_memory=gpu_memory, memory=memory))
    if model.missing_roots:
        findings.append(
            warning(
                "weights",
                f"{', '.join(model.missing_roots)} does not exist on this machine",
                "weights that a trainer publishes there cannot be loaded; mount it, or correct weights.allowedRoots",
            )
        )
    return findings


def _model(model: ModelFacts, *, runs_here: bool) -> list[Finding]:
    if model.unusable:
        if runs_here:
            return [error("model", model.uri, model.unusable)]
        return [
            warning("model", f"{model.uri} is not on this machine", f"make sure that pods have it: {model.unusable}")
        ]
    if model.directory is None:
        seen = f"{model.uri} is not on this machine"
        if runs_here:
            advice = (
                "it is downloaded from the Hugging Face hub when a job starts; run rollout prefetch to do so before"
            )
            return [warning("model", seen, advice)]
        advice = (
            "pods download it from the Hugging Face hub unless model.cache has it; run rollout prefetch to compare it "
            "with the manifest here"
        )
        return [warning("model", f"not examined: {seen}", advice)]
    findings = [ok("model", f"{model.uri} is in {model.directory}")]
    if model.tokenizer_error:
        findings.append(error("tokenizer", model.tokenizer_error, "add the tokenizer's files to the model's directory"))
    else:
        findings.append(ok("tokenizer", "it can be loaded"))
    return findings


def _fit(job: RolloutJob, estimate: MemoryEstimate, *, gpu_memory: int | None, memory: int | None) -> Finding:
    engine = job.spec.engine
    needed = (
        f"weights {size_text(estimate.weights)}, KV cache {size_text(estimate.kv_cache_of_longest)} for each rollout "
        f"of {estimate.max_model_len} tokens"
    )
    advice = "reduce engine.maxModelLen"
    if estimate.states:
        needed += f", of which its recurrent states take {size_text(estimate.states)}"
        advice += " or speculation.maxDraftTokens"
    if job.spec.workers.gpus_per_worker == 0:
        cache = int(parse_quantity(engine.kv_cache_memory)) if engine.kv_cache_memory else _DEFAULT_CPU_CACHE
        if estimate.kv_cache_of_longest > cache:
            return error(
                "memory", needed, f"the KV cache has {size_text(cache)}; raise engine.kvCacheMemory, or {advice}"
            )
        total = (estimate.weights + cache) * job.spec.engines_per_worker
        if memory is not None and total > memory:
            return error(
                "memory",
                f"{needed}; {size_text(total)} with the whole KV cache",
                f"this machine has {size_text(memory)} available; reduce engine.kvCacheMemory, or use a larger machine",
            )
        return ok("memory", f"{needed}; {estimate.rollouts_in(estimate.weights + cache)} fit into the KV cache")
    if gpu_memory is None:
        return ok("memory", f"{needed}, on each GPU; there is none here to compare with")
    usable = gpu_memory * (engine.gpu_memory_utilization_percentage or _DEFAULT_GPU_SHARE) // 100
    if estimate.minimum > usable:
        return error(
            "memory",
            f"{needed}, on each GPU",
            f"an engine may use {size_text(usable)} of a GPU; raise engine.tensorParallelSize, or {advice}",
        )
    return ok("memory", f"{needed}, on each GPU; {estimate.rollouts_in(usable)} fit")


def read_model(job: RolloutJob, cache: Path) -> ModelFacts:
    """Return what is known about the model of *job*."""
    model, engine = job.spec.model, job.spec.engine
    roots = [root for root in job.spec.weights.allowed_roots if not Path(root).is_dir()]
    try:
        directory = find_model(model, cache)
        if directory is None:
            return ModelFacts(model.uri, None, missing_roots=roots)
        estimate = estimate_memory(
            read_config(directory),
            sum(file.stat().st_size for file in directory.glob("*.safetensors")),
            max_model_len=engine.max_model_len,
            gpus=engine.gpus,
            dtype=engine.dtype,
            kv_cache_dtype=engine.kv_cache_dtype,
            states=_read_states(job, directory),
        )
    except ModelError as failure:
        return ModelFacts(model.uri, None, unusable=str(failure), missing_roots=roots)
    except ImportError:  # the package huggingface_hub is missing, and with it the models of the hub
        return ModelFacts(model.uri, None, missing_roots=roots)
    return ModelFacts(
        model.uri,
        str(directory),
        tokenizer_error=_tokenizer_error(directory),
        estimate=estimate,
        missing_roots=roots,
    )


_RECURRENT = re.compile(r"conv|hybrid|linear_|mamba|recurrent|rwkv|ssm")
"""Occurs in the configurations of models with recurrent layers, and rarely in others."""


def _read_states(job: RolloutJob, directory: Path) -> int | None:
    """Return the memory of one rollout's recurrent states; None if only vLLM knows it, and cannot be asked.

    vLLM, which takes ten seconds to import, is not asked about other models.
    """
    if _RECURRENT.search(json.dumps(read_config(directory))) is None:
        return 0
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    speculation, drafting = job.spec.speculation, None
    if speculation.policy != "off":
        drafting = DraftingConfig(speculation.policy, speculation.max_draft_tokens, 0, HistoryLocation("", "", "", 1))
    cpu = job.spec.workers.gpus_per_worker == 0
    try:
        return read_state_bytes(EngineConfig(model=directory, spec=job.spec.engine, cpu=cpu, drafting=drafting))
    except Exception:  # it is not installed, is built for other hardware, or does not know the model
        return None


def _tokenizer_error(directory: Path) -> str:
    try:
        load_tokenizer(directory)
    except ImportError:
        return "transformers is not installed; install das-rollout[worker]"
    except ModelError as failure:
        return str(failure)
    return ""


_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one engine on each of its GPUs, in bytes. vLLM needs some more for activations and CUDA graphs."""

    weights: int
    kv_cache_per_token: int
    max_model_len: int
    states: int = 0
    """Recurrent states of one rollout, with those for its drafts."""

    @property
    def kv_cache_of_longest(self) -> int:
        """KV cache of one rollout of the maximum length, without which vLLM does not start."""
        return self.kv_cache_per_token * self.max_model_len + self.states

    @property
    def minimum(self) -> int:
        """Memory without which the engine does not start."""
        return self.weights + self.kv_cache_of_longest

    def rollouts_in(self, memory: int) -> int:
        """Return how many rollouts of the maximum length fit into *memory* together with the weights."""
        return max(0, memory - self.weights) // max(1, self.kv_cache_of_longest)


def estimate_memory(
    config: Mapping[str, Any],
    weight_bytes: int,
    *,
    max_model_len: int,
    gpus: int,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    states: int | None = 0,
) -> MemoryEstimate | None:
    """Return the estimate for a model; None if its configuration does not have the usual fields.

    Layers with a sliding window or without attention count as if they kept all tokens, so that the estimate is an upper
    bound for models with such layers.

    Args:
        config: its ``config.json``.
        weight_bytes: size of its safetensors files.
        max_model_len: maximum number of tokens of a prompt and its response.
        gpus: number of GPUs among which the engine divides the model.
        dtype: ``engine.dtype``.
        kv_cache_dtype: ``engine.kvCacheDtype``.
        states: memory of one rollout's recurrent states on each GPU; None if it is unknown, and with it the estimate.
    """
    if states is None:
        return None
    text: Mapping[str, Any] = config.get("text_config") or config
    stored = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    computed = stored if dtype == "auto" else dtype
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        values = _values_per_layer(text, heads)
    except (KeyError, TypeError, ValueError):
        return None
    width = 1 if kv_cache_dtype.startswith("fp8") else _BYTES.get(computed, 2)
    if stored in _BYTES and "quantization_config" not in config:
        weight_bytes = weight_bytes * _BYTES.get(computed, 2) // _BYTES[stored]
    return MemoryEstimate(
        weights=weight_bytes // gpus,
        kv_cache_per_token=layers * values * width // gpus,
        max_model_len=max_model_len,
        states=states,
    )


def _values_per_layer(config: Mapping[str, Any], heads: int) -> int:
    """Return how many numbers a layer keeps for each token."""
    if (rank := config.get("kv_lora_rank")) is not None:  # multi-head latent attention
        return int(rank) + int(config["qk_rope_head_dim"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
    return 2 * int(config.get("num_key_value_heads") or heads) * int(head_dim)
