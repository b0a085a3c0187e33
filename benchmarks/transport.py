"""What the way through Redis and the coordinator costs, against driving the same engine directly.

``python -m benchmarks.transport --json FILE``. One engine (267M random parameters, batch 8) makes the same rollouts in
turn directly and through the job; the coordinator, the relay and the trainer are processes of their own, as in a job.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.random_model import VOCABULARY, random_model
from rollout_api import AsyncRolloutClient, Prompt, RolloutRequest, parse_job
from rollout_api.asyncio_tasks import end
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.engine.host import Engine, EngineConfig
from rollout_worker.history.connection import connect, connect_async
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.coordinator import Coordinator
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.relay import Relay
from rollout_worker.job.setup import BLOCK_S
from rollout_worker.job.weights import SharedFiles

UID = "transport"
HISTORY = HistoryKeys("default", "transport")
BATCH = 8
TOKENS = 48
ROLLOUTS = 40
PROMPT = 64
JOB = parse_job(
    {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "transport"},
        "spec": {
            "model": {"uri": "/model"},
            "source": {"trainer": {}},
            "engine": {"maxModelLen": 512, "maxNumSeqs": BATCH, "kvCacheMemory": "512Mi", "enforceEager": True},
            "sampling": {"n": 1, "maxTokens": TOKENS, "logprobs": True},
            "workers": {"gpusPerWorker": 0},
            "speculation": {"policy": "off"},
        },
    }
)


def prompts(run: int) -> list[list[int]]:
    """Prompts that no other run has, so that none profits from a cached prefix."""
    return [[(run * 9973 + index * 131 + place) % VOCABULARY for place in range(PROMPT)] for index in range(ROLLOUTS)]


def coordinate(url: str, pipe: Connection) -> None:
    """The coordinator's process, with the relay; says what CPU time it took so far whenever it is asked."""
    relay = Relay(
        connect(url), MessageKeys(UID), HistoryStore(connect(url), HistoryKeys("default", "transport"), window=4)
    )
    relay.start()

    async def run() -> None:
        job_store = JobStore(connect_async(url, block=BLOCK_S), MessageKeys(UID))
        work = asyncio.ensure_future(Coordinator(JOB, job_store, connect_async(url), vocabulary=VOCABULARY).run())
        while await asyncio.to_thread(pipe.recv) != "end":
            pipe.send(time.process_time())
        await end(work)

    asyncio.run(run())


def train(url: str, pipe: Connection) -> None:
    """The trainer's process: makes a step when it is asked to, and says how long it took and how late results were."""

    async def run() -> None:
        async with AsyncRolloutClient.connect(url, uid=UID) as client:
            pipe.send("connected")
            while (step := await asyncio.to_thread(pipe.recv)) is not None:
                cpu, started = time.process_time(), time.perf_counter()
                async with client.step(step, [Prompt(tokens) for tokens in prompts(step)]) as one:
                    late = [time.time() - rollout.finished_at async for rollout in one]
                    seconds = time.perf_counter() - started
                pipe.send((seconds, late, time.process_time() - cpu))

    asyncio.run(run())


async def directly(engine: Engine, run: int) -> float:
    """Seconds for the same rollouts with nothing in between: all asked for at once, the engine queues them."""
    requests = [
        RolloutRequest(
            job_uid=UID,
            request_id=f"direct-{run}-{index}",
            prompt_token_ids=tokens,
            sampling=Sampling(n=1, max_tokens=TOKENS, logprobs=True),
        )
        for index, tokens in enumerate(prompts(run))
    ]
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(request, 0) for request in requests))
    return time.perf_counter() - started


async def measure(url: str, pairs: int) -> dict[str, Any]:
    """Interleaved pairs of the same work, directly and through the job."""
    context = multiprocessing.get_context("spawn")
    (ours_c, theirs_c), (ours_t, theirs_t) = context.Pipe(), context.Pipe()
    coordinator = context.Process(target=coordinate, args=(url, theirs_c), daemon=True)
    trainer = context.Process(target=train, args=(url, theirs_t), daemon=True)
    model = random_model()
    engine = await Engine.start(EngineConfig(model=model, spec=JOB.spec.engine, cpu=True))
    redis = connect(url)
    worker = EngineWorker(
        engine,
        JobStore(connect_async(url, block=BLOCK_S), MessageKeys(UID)),
        HistoryStore(redis, HISTORY, window=4),
        name="engine-0",
        worker="",
        slots=BATCH,
        checkpoint_tokens=JOB.spec.engine.checkpoint_tokens,
        sampling=JOB.spec.sampling,
        transport=SharedFiles(model, model, []),
    )
    work = asyncio.ensure_future(worker.run())
    coordinator.start()
    trainer.start()
    await asyncio.to_thread(ours_t.recv)

    def redis_cpu() -> float:
        info: Any = redis.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    async def coordinator_cpu() -> float:
        ours_c.send("cpu")
        return float(await asyncio.to_thread(ours_c.recv))

    rows = []
    for pair in range(pairs + 1):
        row: dict[str, Any] = {}
        for way in ("direct", "job") if pair % 2 else ("job", "direct"):
            host = time.process_time()
            if way == "direct":
                row["direct"] = await directly(engine, 2 * pair)
                row["host_cpu_direct"] = time.process_time() - host
            else:
                before = (await coordinator_cpu(), redis_cpu())
                ours_t.send(2 * pair + 1)
                row["job"], row["late"], row["trainer_cpu"] = await asyncio.to_thread(ours_t.recv)
                row["host_cpu_job"] = time.process_time() - host
                row["coordinator_cpu"] = await coordinator_cpu() - before[0]
                row["redis_cpu"] = redis_cpu() - before[1]
        if pair:  # the first warms everything up
            rows.append(row)
            print(f"pair {pair}: direct {row['direct']:.2f} s, job {row['job']:.2f} s", flush=True)
    ours_t.send(None)
    ours_c.send("end")
    await end(work)
    engine.close()
    return {"rows": rows}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="transport-"))
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    server = EmbeddedRedis(directory, keep_open=lock)
    try:
        measured = asyncio.run(measure(server.start(), options.pairs))
    finally:
        server.stop()
    rows = measured["rows"]
    ratios = [row["job"] / row["direct"] for row in rows]
    late = [seconds for row in rows for seconds in row["late"]]
    micros = 1e6 / ROLLOUTS

    def per_rollout(name: str) -> float:
        return statistics.median(row[name] for row in rows) * micros

    worker = statistics.median(row["host_cpu_job"] - row["host_cpu_direct"] for row in rows) * micros
    total = per_rollout("coordinator_cpu") + per_rollout("redis_cpu") + per_rollout("trainer_cpu") + worker
    direct = "the same engine driven directly"
    figures = [
        Figure("overhead of the job's way", 100 * (statistics.median(ratios) - 1), "% of wall time", direct, "<=", 5.0),
        Figure("finish to trainer, p99", 1000 * quantile(late, 0.99), "ms", "", "<=", 20.0),
        Figure("finish to trainer, median", 1000 * quantile(late, 0.5), "ms", "", "<=", None),
        Figure("CPU a rollout, all processes", total, "µs", direct, "<=", None),
        Figure("CPU a token, all processes", total / TOKENS, "µs", direct, "<=", None),
        Figure("CPU a rollout, coordinator and relay", per_rollout("coordinator_cpu"), "µs", "", "<=", None),
        Figure("CPU a rollout, Redis", per_rollout("redis_cpu"), "µs", "", "<=", None),
        Figure("CPU a rollout, trainer's client", per_rollout("trainer_cpu"), "µs", "", "<=", None),
        Figure("CPU a rollout, engine's host more than direct", worker, "µs", direct, "<=", None),
    ]
    report(
        options.json,
        figures,
        pairs=len(rows),
        ratio=spread(ratios),
        seconds={"direct": [row["direct"] for row in rows], "job": [row["job"] for row in rows]},
        workload={"rollouts": ROLLOUTS, "tokens": TOKENS, "prompt": PROMPT, "batch": BATCH},
    )


if __name__ == "__main__":
    main()
