"""Judges a manifest, and whether its model is at hand and fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import ManifestError, RolloutJob
from rollout_worker.doctor.findings import Finding, error, ok, warning
from rollout_worker.doctor.memory_estimate import MemoryEstimate
from rollout_worker.doctor.units import GIB, size_text

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
    """None if it has to be downloaded, or has an unusual configuration."""
    missing_roots: Sequence[str] = ()
    """Directories of ``weights.allowedRoots`` that do not exist here."""


def judge_invalid_manifest(failure: ManifestError) -> list[Finding]:
    """Return a finding for each error in a manifest."""
    return [error(one.path, one.message, "correct the manifest; see docs/manifest.md") for one in failure.errors]


def judge_manifest(job: RolloutJob, model: ModelFacts, *, gpu_memory: int | None, memory: int | None) -> list[Finding]:
    """Judge a valid manifest.

    Args:
        job: the manifest.
        model: its model.
        gpu_memory: memory of the smallest GPU of this machine, in bytes; None if it has none.
        memory: memory of this machine that a job may use, in bytes; None if jobs run on other machines.
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
    if model.directory is None and not runs_here:
        return [
            warning(
                "model",
                f"not examined: {model.uri} is not on this machine",
                "pods download it from the Hugging Face hub unless model.cache has it; run rollout prefetch to compare "
                "it with the manifest here",
            )
        ]
    if model.directory is None:
        return [
            warning(
                "model",
                f"{model.uri} is not on this machine",
                "it is downloaded from the Hugging Face hub when a job starts; run rollout prefetch to do so before",
            )
        ]
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
