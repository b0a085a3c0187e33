"""The settings that every process of a job needs, and the creation of each part of the job from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob, parse_job
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.connection import connect, connect_history
from rollout_store.history.store import HistoryStore
from rollout_store.job import JobStore
from rollout_store.job.engine_groups import EngineGroupStore
from rollout_store.models.model_source import resolve_model
from rollout_store.runtime.command_line import default_cache


@dataclass(frozen=True)
class JobSetup:
    """The settings of one job. They are plain data, so that they can be sent to the job's processes."""

    manifest: dict[str, Any]
    uid: str
    redis_url: str
    vocabulary_size: int
    tokenizer: str
    """Fingerprint of the tokenizer's vocabulary. A history belongs to one vocabulary."""
    engines_per_machine: int = 1
    """Number of engines that share a machine's CPU cores, without additional ones."""
    total_rollouts: int | None = None
    """Number of rollouts in all epochs of a dataset source; None for a job that serves a trainer."""
    non_speculative_engines: int = 0
    """Number of additional engines without speculation, for requests that want no drafts."""
    overrides: dict[str, Any] | None = None
    """Additional vLLM engine arguments."""
    http_host: str | None = "127.0.0.1"
    """Address of the coordinator's HTTP server; None for all addresses."""
    http_port: int = 0
    """Port of that server; 0 for a free one."""
    model_cache: str = ""
    """Directory of models on every machine of the job; empty for the default of each machine."""
    worker: str = ""
    """Id of the worker process whose engines these are; empty for the engines of ``rollout run``."""
    history_url: str = ""
    """URL of the Redis server or cluster that keeps the history; empty for the job's own server."""
    machines_per_engine: int = 1
    """Number of machines that an engine runs on."""
    group: str = ""
    """Name that the machines of an engine find each other by."""
    log_directory: str = ""
    """Directory of log files of the coordinator and the relay, which are written in addition to standard error; empty
    for none."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the settings that :meth:`to_json` has encoded."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the settings as JSON."""
        return json.dumps(asdict(self))

    @property
    def num_engines(self) -> int:
        """Number of engines on one machine."""
        return self.engines_per_machine + self.non_speculative_engines

    @property
    def worker_name(self) -> str:
        """Name of the worker, which its next process has, too; empty for the engines of ``rollout run``."""
        return self.worker.partition("/")[0]

    def engine_name(self, name: str) -> str:
        """Return the job's name of an engine of this worker."""
        return f"{self.worker_name}/{name}" if self.worker_name else name

    @property
    def job(self) -> RolloutJob:
        """The parsed manifest."""
        return parse_job(self.manifest)

    @property
    def keys(self) -> MessageKeys:
        """Redis keys of the job's messages."""
        return MessageKeys(self.uid)

    @property
    def history_keys(self) -> HistoryKeys:
        """Redis keys of the job's history."""
        return HistoryKeys(self.job.metadata.namespace, self.job.history_name)

    def job_store(self) -> JobStore:
        """Open the job's state in Redis for the caller's asyncio event loop."""
        return JobStore.connect(self.redis_url, self.keys)

    def group_store(self) -> EngineGroupStore:
        """Return the store that lets the machines of an engine find each other."""
        return EngineGroupStore(connect(self.redis_url), self.keys, self.group)

    def history_store(self) -> HistoryStore:
        """Open the job's history."""
        client = connect_history(self.history_url or self.redis_url)
        store = HistoryStore(client, self.history_keys, window=self.job.spec.speculation.window)
        store.metadata.set_initial(self.tokenizer, self.job.spec.model.uri, max_bytes=self._history_bytes)
        return store

    def open_history(self) -> None:
        """Claim the history for this job's tokenizer and model.

        Raises:
            HistoryMismatchError: if it holds rollouts of another tokenizer or model.
        """
        spec = self.job.spec
        allow = spec.history.allow_model_mismatch
        store = self.history_store()
        store.metadata.open(self.tokenizer, spec.model.uri, allow_model_mismatch=allow, max_bytes=self._history_bytes)

    @property
    def _history_bytes(self) -> int:
        return int(parse_quantity(self.job.spec.history.max_bytes))

    @property
    def cache(self) -> Path:
        """Directory of models on this machine."""
        return Path(self.model_cache) if self.model_cache else default_cache()

    def model(self) -> Path:
        """Find the model's directory on this machine; download a Hugging Face model that is not there yet.

        Raises:
            ModelError: if the model cannot be found.
        """
        return resolve_model(self.job.spec.model, self.cache)
