"""What every process of a running job has to know, and how each part is made from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob, parse_job
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_worker.engine.drafting import Drafting, HistoryBinding
from rollout_worker.engine.host import EngineConfig
from rollout_worker.engine.model_source import default_cache, resolve_model
from rollout_worker.history.connection import connect_async, connect_history
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.weights import ByAddress, SharedFiles, TrainerMemory, WeightTransport
from rollout_worker.policy.policies import longest_draft

BLOCK_S = 1.0
"""How long a read may wait in Redis for something to come."""


@dataclass(frozen=True)
class JobSetup:
    """Plain data, so that it can be sent to another machine."""

    manifest: dict[str, Any]
    uid: str
    redis_url: str
    vocabulary: int
    tokenizer: str
    """Fingerprint of the vocabulary, which a history is of."""
    engines_per_machine: int = 1
    """Engines among which a machine's cores are divided."""
    rollouts: int | None = None
    """How many there are in all epochs of a dataset source."""
    plain_engines: int = 0
    """Further engines with no speculation configured, for requests that want no drafts."""
    overrides: dict[str, Any] | None = None
    """Further vLLM engine arguments."""
    http_host: str = "127.0.0.1"
    http_port: int = 0
    history_url: str = ""
    """Of the server or cluster that keeps the history; empty: the job's own."""

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

    def job_store(self) -> JobStore:
        """The message plane, for the asyncio loop of the caller."""
        return JobStore(connect_async(self.redis_url, block=BLOCK_S), self.keys)

    def store(self) -> HistoryStore:
        """The history."""
        client = connect_history(self.history_url or self.redis_url)
        store = HistoryStore(client, self.history_keys, window=self.job.spec.speculation.window)
        store.claim(self.tokenizer, self.job.spec.model.uri, max_bytes=self._history_bytes)
        return store

    def open_history(self) -> None:
        """Claim the history for this job's tokenizer and model.

        Raises:
            HistoryMismatchError: if it holds rollouts of others.
        """
        spec = self.job.spec
        allow = spec.history.allow_foreign_model
        store = self.store()
        store.open(self.tokenizer, spec.model.uri, allow_foreign_model=allow, max_bytes=self._history_bytes)

    @property
    def _history_bytes(self) -> int:
        return int(parse_quantity(self.job.spec.history.max_bytes))

    def model(self) -> Path:
        """The model's directory on this machine; a Hugging Face model is downloaded if it is not there yet.

        Raises:
            ModelError: if it is nowhere to be found.
        """
        return resolve_model(self.job.spec.model, default_cache())

    def engine_config(self, model: Path, *, plain: bool) -> EngineConfig:
        """How an engine of *model* is started; a *plain* one has no speculation configured."""
        job = self.job
        cpu = job.spec.workers.gpus_per_worker == 0
        drafting = None
        speculation = job.spec.speculation
        if not plain and speculation.policy != "off":
            keys = self.history_keys
            url = self.history_url or self.redis_url
            drafting = Drafting(
                policy=speculation.policy,
                max_draft_tokens=longest_draft(speculation.policy, speculation.max_draft_tokens),
                index_bytes=int(parse_quantity(speculation.index_bytes)),
                history=HistoryBinding(url, keys.namespace, keys.name, speculation.window),
            )
        return EngineConfig(
            model=model,
            spec=job.spec.engine,
            cpu=cpu,
            cores=cores_of(job, engines_here=self.engines_per_machine),
            drafting=drafting,
            overrides=self.overrides or {},
        )

    def transport(self, model: Path) -> WeightTransport:
        """How published weights come into an engine of *model*."""
        weights = self.job.spec.weights
        files = SharedFiles(model, default_cache(), weights.allowed_roots, model_uri=self.job.spec.model.uri)
        return ByAddress(files, TrainerMemory() if weights.broadcast else None)


def cores_of(job: RolloutJob, *, engines_here: int) -> int:
    """Cores for a CPU engine to compute with; by default one is left for all else and engines share the rest."""
    asked = job.spec.workers.resources.cpu
    return max(1, int(parse_quantity(asked)) if asked else (len(os.sched_getaffinity(0)) - 1) // engines_here)
