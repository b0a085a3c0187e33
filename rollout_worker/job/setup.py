"""What every process of a running job has to know, and how each part is made from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_api.job import RolloutJob, parse_job
from rollout_api.keys import HistoryKeys, MessageKeys
from rollout_api.quantity import parse_quantity
from rollout_worker.engine.host import CPU_BASE_TOKENS, GPU_BASE_TOKENS, Drafting, EngineConfig
from rollout_worker.engine.worker_extension import HistoryBinding
from rollout_worker.history.connection import connect, connect_async
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.plane import MessagePlane
from rollout_worker.job.weights import ByAddress, SharedFiles, TrainerMemory, WeightTransport

BLOCK_S = 1.0
"""How long a read may wait in Redis for something to come."""


@dataclass(frozen=True)
class JobSetup:
    """Plain data, so that it can be sent to another machine."""

    manifest: dict[str, Any]
    uid: str
    redis_url: str
    model: str
    """Directory of the model."""
    model_cache: str
    vocabulary: int
    cores: int = 1
    """CPU cores that a CPU engine computes with."""
    plain_engines: int = 0
    """Further engines with no speculation configured, for requests that want no drafts."""
    overrides: dict[str, Any] | None = None
    """Further vLLM engine arguments."""
    http_host: str = "127.0.0.1"
    http_port: int = 0

    @property
    def job(self) -> RolloutJob:
        """The manifest."""
        return parse_job(self.manifest)

    @property
    def keys(self) -> MessageKeys:
        """Of the message plane."""
        return MessageKeys(self.uid)

    @property
    def history_keys(self) -> HistoryKeys:
        """Of the job's history."""
        return HistoryKeys(self.job.metadata.namespace, self.job.history_name)

    def plane(self) -> MessagePlane:
        """The message plane, for the asyncio loop of the caller."""
        return MessagePlane(connect_async(self.redis_url, block=BLOCK_S), self.keys)

    def store(self) -> HistoryStore:
        """The history."""
        return HistoryStore(connect(self.redis_url), self.history_keys, window=self.job.spec.speculation.window)

    def engine_config(self, *, plain: bool) -> EngineConfig:
        """How an engine is started; a *plain* one has no speculation configured."""
        job = self.job
        cpu = job.spec.workers.gpus_per_worker == 0
        drafting = None
        if not plain and job.spec.speculation.policy != "off":
            keys = self.history_keys
            binding = HistoryBinding(self.redis_url, keys.namespace, keys.name, job.spec.speculation.window)
            base_tokens = CPU_BASE_TOKENS if cpu else GPU_BASE_TOKENS
            drafting = Drafting(job.spec.speculation.max_draft_tokens, base_tokens, binding)
        return EngineConfig(
            model=Path(self.model),
            spec=job.spec.engine,
            cpu=cpu,
            cores=self.cores,
            drafting=drafting,
            overrides=self.overrides or {},
        )

    def transport(self) -> WeightTransport:
        """How published weights come into an engine."""
        weights = self.job.spec.weights
        files = SharedFiles(Path(self.model), Path(self.model_cache), weights.allowed_roots)
        return ByAddress(files, TrainerMemory() if weights.broadcast else None)


def cores_of(job: RolloutJob, *, engines_here: int) -> int:
    """Cores for a CPU engine to compute with; by default one is left for all else and engines share the rest."""
    asked = job.spec.workers.resources.cpu
    return max(1, int(parse_quantity(asked)) if asked else (len(os.sched_getaffinity(0)) - 1) // engines_here)
