"""A job in one process with a real Redis, engines, coordinator, workers and relay. Each of them can be killed."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.rollout_job import RolloutJob, parse_job
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_head.coordinator import Coordinator
from rollout_head.relay import Relay
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_store.job import JobStore
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.draft_settings import DraftingConfig, HistoryLocation
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.published_weights import WeightDirectories
from rollout_worker.engine_worker.worker import EngineWorker
from rollout_worker.policy.governor import SpeculationCutoff
from tests.support.manifests import SMALL_CPU_ENGINE, rollout_job
from tests.support.waiting import wait_for_async

CHECKPOINT_TOKENS = 32
_uids = itertools.count()


def manifest(**spec: Any) -> RolloutJob:
    sections = {
        "model": {"uri": "/model"},
        "engine": {**SMALL_CPU_ENGINE, "maxNumSeqs": 16, "checkpointTokens": CHECKPOINT_TOKENS},
        "sampling": {"rolloutsPerPrompt": 4, "maxTokens": 100},
        "workers": {"gpusPerWorker": 0, "replicas": 2},
    }
    return parse_job(rollout_job("live", **sections | spec))


async def start_engine(model: Path, url: str, job: RolloutJob, **overrides: Any) -> Engine:
    """Start an engine; *overrides* are additional vLLM engine arguments."""
    keys = HistoryKeys("default", "live")
    binding = HistoryLocation(url, keys.namespace, keys.name, window=16)
    drafting = DraftingConfig("fixed", 4, 2**30, binding, governed=False)
    config = EngineConfig(
        model=model, spec=job.spec.engine, cpu=True, drafting=drafting, weight_transfer="gloo", overrides=overrides
    )
    return await Engine.start(config)


class LiveJob:
    """The parts of one job by name. ``kill`` ends a part as ``kill -9`` does: without releasing its lease."""

    def __init__(self, url: str, job: RolloutJob, model: Path, vocabulary: int) -> None:
        self.url, self.job, self.model, self.vocabulary = url, job, model, vocabulary
        self.uid = f"live-{next(_uids)}"
        self.keys = MessageKeys(self.uid)
        self.redis = connect(url)
        self.store = HistoryStore(self.redis, HistoryKeys("default", "live"), window=16)
        self.relay = Relay(connect(url), self.keys, self.store)
        self.coordinator: Coordinator | None = None
        self.workers: dict[str, EngineWorker] = {}
        self.job_stores: dict[str, JobStore] = {}
        """The store that each worker uses, so that a test can make its calls slow or fail."""
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def job_store(self) -> JobStore:
        return JobStore.connect(self.url, self.keys)

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.job, self.job_store(), self.store, vocabulary=self.vocabulary)
        self.tasks["coordinator"] = asyncio.ensure_future(self.coordinator.run())

    async def until_nothing_is_open(self) -> None:
        """Wait until the coordinator has no open request, and check that it counts no open rollout."""
        coordinator = self.coordinator
        assert coordinator is not None
        await self.until(lambda: coordinator.num_open_requests == 0, 20)
        assert 0 == coordinator.num_open_rollouts

    def start_worker(
        self,
        name: str,
        engine: Engine,
        *,
        speculation_disabled: bool = False,
        speculation_cutoff: SpeculationCutoff | None = None,
    ) -> EngineWorker:
        job_store = self.job_stores[name] = self.job_store()
        directories = WeightDirectories(self.model, self.model.parent, ["/"], checksum=job_store.weight_checksums)
        worker = self.workers[name] = EngineWorker(
            engine,
            self.job_stores[name],
            self.store,
            name=name,
            worker="",
            max_running=self.job.spec.engine.max_num_seqs,
            checkpoint_tokens=self.job.spec.engine.checkpoint_tokens,
            sampling=self.job.spec.sampling,
            directories=directories,
            speculation_disabled=speculation_disabled,
            speculation_cutoff=speculation_cutoff,
        )
        self.tasks[name] = asyncio.ensure_future(worker.run())
        return worker

    async def drain(self, name: str) -> None:
        """Let a worker leave the job, as on SIGTERM with no time for its rollouts to finish."""
        await self.workers.pop(name).drain(0.0)
        await self.tasks.pop(name)

    async def kill(self, name: str) -> None:
        """End a part at once: a worker's lease expires and nothing is handed over."""
        if name in self.workers:
            del self.workers[name]

            async def silent(_: str) -> None:
                pass

            self.job_stores.pop(name).engines.release = silent
        await cancel_and_wait(self.tasks.pop(name))

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until a condition is met, which is evaluated in a thread, or raise the error of a part that fails."""

        async def is_met() -> bool:
            met = await asyncio.to_thread(condition)
            if not met:
                self.check()
            return met

        await wait_for_async(is_met, seconds, max_interval_s=0.02)

    def check(self) -> None:
        """Raise the error of a part that has failed."""
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    def in_history(self) -> Counter[str]:
        """Return how often the history contains each rollout of this job."""
        self.relay.drain()
        logs = [key.decode() for key in self.redis.scan_iter("history:default/live:*:log")]
        problems = [log.split("{")[1].split("}")[0] for log in logs]
        slices = self.store.read(dict.fromkeys(problems, START), count=100_000)
        ids = [record.rollout_id for found in slices.values() for record in found.records]
        return Counter(rollout_id for rollout_id in ids if rollout_id.startswith(self.uid + "/"))


@asynccontextmanager
async def live(
    url: str, job: RolloutJob, model: Path, vocabulary: int, engines: dict[str, Engine]
) -> AsyncIterator[LiveJob]:
    """Start a job with a coordinator and a worker for each engine, and end all its parts on exit."""
    running = LiveJob(url, job, model, vocabulary)
    running.start_coordinator()
    for name, engine in engines.items():
        running.start_worker(name, engine)
    try:
        yield running
        running.check()
    finally:
        for name in list(running.tasks):
            await running.kill(name)
