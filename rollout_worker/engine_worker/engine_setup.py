"""The configuration of a machine's engines for a job."""

from __future__ import annotations

from pathlib import Path

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.control_groups import usable_cores
from rollout_worker.engine.config import EngineConfig, transfer_backend
from rollout_worker.engine.draft_settings import DraftingConfig, HistoryLocation


def engine_config(setup: JobSetup, model: Path, *, speculative: bool) -> EngineConfig:
    """Build the configuration of an engine.

    If it is not *speculative*, it has no speculation, whatever the manifest says.
    """
    job = setup.job
    drafting = None
    speculation = job.spec.speculation
    if speculative and speculation.policy != "off":
        keys = setup.history_keys
        url = setup.history_url or setup.redis_url
        drafting = DraftingConfig(
            policy=speculation.policy,
            max_draft_tokens=speculation.max_draft_length,
            max_index_bytes=int(parse_quantity(speculation.index_bytes)),
            history=HistoryLocation(url, keys.namespace, keys.name, speculation.window),
            engines=setup.num_engines,
            min_survival=speculation.min_survival or 0.0,
        )
    return EngineConfig(
        model=model,
        spec=job.spec.engine,
        cpu=job.spec.workers.gpus_per_worker == 0,
        cores=cores_per_engine(job, engines_per_machine=setup.engines_per_machine),
        drafting=drafting,
        weight_transfer=transfer_backend(job.spec),
        overrides=setup.overrides or {},
    )


def cores_per_engine(job: RolloutJob, *, engines_per_machine: int) -> int:
    """Return the number of CPU cores that a CPU engine computes with.

    By default one core is left for everything else, and the engines of a machine share the rest.
    """
    requested = job.spec.workers.resources.cpu
    available = (usable_cores() - 1) / engines_per_machine
    return max(1, int(parse_quantity(requested) if requested else available))
