"""A job in one process: real Redis, engines, coordinator, workers and relay, each of which can be killed."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollout_api.asyncio_tasks import end
from rollout_api.manifest.rollout_job import RolloutJob, parse_job
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_worker.engine.drafting import Drafting, HistoryBinding
from rollout_worker.engine.host import Engine, EngineConfig
from rollout_worker.history.connection import connect, connect_async
from rollout_worker.history.store import START, HistoryStore
from rollout_worker.job.coordinator import Coordinator
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.relay import Relay
from rollout_worker.job.setup import BLOCK_S
from rollout_worker.job.weights import ByAddress, SharedFiles, TrainerMemory

CHECKPOINT_TOKENS = 32
_uids = itertools.count()


def manifest(**spec: Any) -> RolloutJob:
    return parse_job(
        {
            "apiVersion": "das.rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "live"},
            "spec": {
                "model": {"uri": "/model"},
                "source": {"trainer": {}},
                "engine": {
                    "maxModelLen": 512,
                    "dtype": "float32",
                    "maxNumSeqs": 16,
                    "kvCacheMemory": "256Mi",
                    "enforceEager": True,
                    "checkpointTokens": CHECKPOINT_TOKENS,
                },
                "sampling": {"n": 4, "maxTokens": 100},
                "workers": {"gpusPerWorker": 0, "replicas": 2},
            }
            | spec,
        }
    )


async def start_engine(model: Path, url: str, job: RolloutJob) -> Engine:
    keys = HistoryKeys("default", "live")
    binding = HistoryBinding(url, keys.namespace, keys.name, window=16)
    drafting = Drafting("fixed", 4, 2**30, binding, governed=False)
    return await Engine.start(EngineConfig(model=model, spec=job.spec.engine, cpu=True, drafting=drafting))


class LiveJob:
    """Parts of one job by name. ``kill`` ends one as ``kill -9`` would: it says goodbye to nobody."""

    def __init__(self, url: str, job: RolloutJob, model: Path, vocabulary: int) -> None:
        self.url, self.job, self.model, self.vocabulary = url, job, model, vocabulary
        self.uid = f"live-{next(_uids)}"
        self.keys = MessageKeys(self.uid)
        self.redis = connect(url)
        self.store = HistoryStore(self.redis, HistoryKeys("default", "live"), window=16)
        self.relay = Relay(connect(url), self.keys, self.store)
        self.coordinator: Coordinator | None = None
        self.workers: dict[str, EngineWorker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def job_store(self) -> JobStore:
        return JobStore(connect_async(self.url, block=BLOCK_S), self.keys)

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.job, self.job_store(), self.store, vocabulary=self.vocabulary)
        self.tasks["coordinator"] = asyncio.ensure_future(self.coordinator.run())

    async def until_nothing_is_open(self) -> None:
        """Wait until the coordinator knows of no open request, and check that it counts no open rollout."""
        assert self.coordinator is not None
        requests = self.coordinator._open
        await self.until(lambda: not requests, 20)
        assert 0 == self.coordinator._open_rollouts

    def start_worker(self, name: str, engine: Engine, *, given_up: bool = False) -> None:
        worker = self.workers[name] = EngineWorker(
            engine,
            self.job_store(),
            self.store,
            name=name,
            worker="",
            slots=self.job.spec.engine.max_num_seqs,
            checkpoint_tokens=self.job.spec.engine.checkpoint_tokens,
            sampling=self.job.spec.sampling,
            transport=ByAddress(SharedFiles(self.model, self.model.parent, ["/"]), TrainerMemory()),
            broadcast=True,
            given_up=given_up,
        )
        self.tasks[name] = asyncio.ensure_future(worker.run())

    async def kill(self, name: str) -> None:
        """End a part at once. A worker's lease runs out; nothing is handed over."""
        if name in self.workers:
            job_store = self.workers.pop(name)._job_store

            async def silent(_: str) -> None:
                pass

            job_store.leave = silent  # type: ignore[method-assign]
        await end(self.tasks.pop(name))

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(condition):
                self.check()
                await asyncio.sleep(0.02)

    def check(self) -> None:
        """Raise what a part has died of."""
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    def in_history(self) -> Counter[str]:
        """How often each of this job's rollouts is there."""
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
    """A job with a coordinator and a worker for each engine, ended whole."""
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
