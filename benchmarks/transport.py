"""Measures the cost of Redis and the coordinator, compared with using the same engine directly.

    python -m benchmarks.transport --json FILE

One engine (267M random parameters, batch size 8) produces the same rollouts alternately directly and through a job. The
coordinator with the relay and the trainer are separate processes, as in a job.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.random_model import VOCABULARY, random_model
from benchmarks.redis_server import redis_server
from rollout_api import AsyncRolloutClient, Prompt, RolloutRequest, parse_job
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.engine import Engine
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.coordinator import Coordinator
from rollout_worker.job.engine_worker import EngineWorker
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.relay import Relay
from rollout_worker.job.weight_directories import WeightDirectories

UID = "transport"
HISTORY = HistoryKeys("default", "transport")
BATCH = 8
TOKENS = 48
"""Tokens of each rollout."""
ROLLOUTS = 40
"""Rollouts of each measurement."""
PROMPT = 64
"""Tokens of each prompt."""
JOB = parse_job(
    {
        "apiVersion": "das.rollout.dev/v1beta1",
        "kind": "RolloutJob",
        "metadata": {"name": "transport"},
        "spec": {
            "model": {"uri": "/model"},
            "source": {"trainer": {}},
            "engine": {"maxModelLen": 512, "maxNumSeqs": BATCH, "kvCacheMemory": "512Mi", "enforceEager": True},
            "sampling": {"rolloutsPerPrompt": 1, "maxTokens": TOKENS, "logprobs": True},
            "workers": {"gpusPerWorker": 0},
            "speculation": {"policy": "off"},
        },
    }
)


def prompts(measurement: int) -> list[list[int]]:
    """Return prompts that no other measurement uses, so that none profits from a cached prefix."""
    return [
        [(measurement * 9973 + index * 131 + position) % VOCABULARY for position in range(PROMPT)]
        for index in range(ROLLOUTS)
    ]


def run_coordinator(url: str, pipe: Connection) -> None:
    """Run the coordinator and the relay; answer each message with the CPU seconds used so far, until "end"."""
    history = HistoryStore(connect(url), HISTORY, window=4)
    relay = Relay(connect(url), MessageKeys(UID), history)
    relay.start()

    async def run() -> None:
        job_store = JobStore.connect(url, MessageKeys(UID))
        task = asyncio.ensure_future(Coordinator(JOB, job_store, history, vocabulary=VOCABULARY).run())
        while await asyncio.to_thread(pipe.recv) != "end":
            pipe.send(time.process_time())
        await cancel_and_wait(task)

    asyncio.run(run())


def run_trainer(url: str, pipe: Connection) -> None:
    """Run the trainer: for each number received, request a step and send its times, until None.

    The times are the makespan, the delay from the end of each rollout to its delivery, and the CPU time, in seconds.
    """

    async def run() -> None:
        async with AsyncRolloutClient.connect(url, uid=UID) as client:
            pipe.send("connected")
            while (measurement := await asyncio.to_thread(pipe.recv)) is not None:
                cpu, started = time.process_time(), time.perf_counter()
                async with client.step(measurement, [Prompt(tokens) for tokens in prompts(measurement)]) as step:
                    delays = [time.time() - rollout.finished_at async for rollout in step]
                    seconds = time.perf_counter() - started
                pipe.send((seconds, delays, time.process_time() - cpu))

    asyncio.run(run())


async def generate_directly(engine: Engine, measurement: int) -> float:
    """Return the seconds that the engine needs for the same rollouts, all requested at once."""
    requests = [
        RolloutRequest(
            job_uid=UID,
            request_id=f"direct-{measurement}-{index}",
            prompt_token_ids=tokens,
            sampling=Sampling(n=1, max_tokens=TOKENS, logprobs=True),
        )
        for index, tokens in enumerate(prompts(measurement))
    ]
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(request, 0) for request in requests))
    return time.perf_counter() - started


async def measure(url: str, pairs: int) -> list[dict[str, Any]]:
    """Measure interleaved pairs of the same work, directly and through the job; return one row per pair."""
    context = multiprocessing.get_context("spawn")
    to_coordinator, coordinator_end = context.Pipe()
    to_trainer, trainer_end = context.Pipe()
    coordinator = context.Process(target=run_coordinator, args=(url, coordinator_end), daemon=True)
    trainer = context.Process(target=run_trainer, args=(url, trainer_end), daemon=True)
    model = random_model()
    engine = await Engine.start(EngineConfig(model=model, spec=JOB.spec.engine, cpu=True))
    redis = connect(url)
    worker = EngineWorker(
        engine,
        JobStore.connect(url, MessageKeys(UID)),
        HistoryStore(redis, HISTORY, window=4),
        name="engine-0",
        worker="",
        max_running=BATCH,
        checkpoint_tokens=JOB.spec.engine.checkpoint_tokens,
        sampling=JOB.spec.sampling,
        directories=WeightDirectories(model, model, []),
    )
    task = asyncio.ensure_future(worker.run())
    coordinator.start()
    trainer.start()
    await asyncio.to_thread(to_trainer.recv)

    def redis_cpu() -> float:
        info: Any = redis.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    async def coordinator_cpu() -> float:
        to_coordinator.send("cpu")
        return float(await asyncio.to_thread(to_coordinator.recv))

    rows = []
    for pair in range(pairs + 1):
        row: dict[str, Any] = {}
        for path in ("direct", "job") if pair % 2 else ("job", "direct"):
            host_cpu = time.process_time()
            if path == "direct":
                row["direct"] = await generate_directly(engine, 2 * pair)
                row["host_cpu_direct"] = time.process_time() - host_cpu
            else:
                before = (await coordinator_cpu(), redis_cpu())
                to_trainer.send(2 * pair + 1)
                row["job"], row["delays"], row["trainer_cpu"] = await asyncio.to_thread(to_trainer.recv)
                row["host_cpu_job"] = time.process_time() - host_cpu
                row["coordinator_cpu"] = await coordinator_cpu() - before[0]
                row["redis_cpu"] = redis_cpu() - before[1]
        if pair:  # The first pair only warms up.
            rows.append(row)
            print(f"pair {pair}: direct {row['direct']:.2f} s, job {row['job']:.2f} s", flush=True)
    to_trainer.send(None)
    to_coordinator.send("end")
    await cancel_and_wait(task)
    engine.close()
    return rows


def figures_of(rows: list[dict[str, Any]]) -> list[Figure]:
    """Return the figures of all pairs."""
    delays = [delay for row in rows for delay in row["delays"]]
    us_per_rollout = 1e6 / ROLLOUTS

    def cpu(name: str) -> float:
        return statistics.median(row[name] for row in rows) * us_per_rollout

    host = statistics.median(row["host_cpu_job"] - row["host_cpu_direct"] for row in rows) * us_per_rollout
    total = cpu("coordinator_cpu") + cpu("redis_cpu") + cpu("trainer_cpu") + host
    overhead = 100 * (statistics.median(row["job"] / row["direct"] for row in rows) - 1)
    direct = "the same engine used directly"
    return [
        Figure("overhead of the job", overhead, "% of wall time", direct, "<=", 5.0),
        Figure("end of rollout to trainer, p99", 1000 * quantile(delays, 0.99), "ms", "", "<=", 20.0),
        Figure("end of rollout to trainer, median", 1000 * quantile(delays, 0.5), "ms", "", "<=", None),
        Figure("CPU time per rollout, all processes", total, "us", direct, "<=", None),
        Figure("CPU time per token, all processes", total / TOKENS, "us", direct, "<=", None),
        Figure("CPU time per rollout, coordinator and relay", cpu("coordinator_cpu"), "us", "", "<=", None),
        Figure("CPU time per rollout, Redis", cpu("redis_cpu"), "us", "", "<=", None),
        Figure("CPU time per rollout, trainer's client", cpu("trainer_cpu"), "us", "", "<=", None),
        Figure("additional CPU time per rollout, engine's host", host, "us", direct, "<=", None),
    ]


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    with redis_server() as url:
        rows = asyncio.run(measure(url, options.pairs))
    report(
        options.json,
        figures_of(rows),
        pairs=len(rows),
        ratio=spread([row["job"] / row["direct"] for row in rows]),
        seconds={"direct": [row["direct"] for row in rows], "job": [row["job"] for row in rows]},
        workload={"rollouts": ROLLOUTS, "tokens": TOKENS, "prompt": PROMPT, "batch": BATCH},
    )


if __name__ == "__main__":
    main()
