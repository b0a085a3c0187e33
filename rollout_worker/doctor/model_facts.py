"""Looks for a manifest's model on this machine. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_worker.doctor.manifest import ModelFacts, estimate_memory
from rollout_worker.engine.model_source import ModelError, find_model, load_tokenizer, read_config


def read_model(job: RolloutJob, cache: Path) -> ModelFacts:
    """Return what is known about the model of *job*.

    Args:
        job: the manifest.
        cache: the model cache.
    """
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


def _tokenizer_error(directory: Path) -> str:
    try:
        load_tokenizer(directory)
    except ImportError:
        return "transformers is not installed; install das-rollout[worker]"
    except ModelError as failure:
        return str(failure)
    return ""
