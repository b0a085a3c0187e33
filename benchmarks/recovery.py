"""Measures what the death of an engine or of the head costs a job.

    python -m benchmarks.recovery --json FILE

A job with three workers, one engine each, decodes 12 rollouts of a tiny model all the time, on this machine's CPUs.
Each decoding step takes 20 ms, as on a GPU, but most of this is a simulated wait, so the engines do not slow each
other down. The processes are those that pods run, and a supervisor restarts them as Kubernetes would. The workers have
a lower CPU weight than the head (autogroup nice 10), because the head's pod requests CPU time and the workers' pods
here request none.

- **Engines** are killed with SIGKILL. Measured are the time until each rollout that a killed engine had is assigned to
  another engine, and the time until the killed engine serves again.
- **The head** is killed with all its processes. Measured are the time from the start of its successor until that
  coordinates the job, and the longest time without new tokens, which engines report once a second.

The effective time is calculated: an engine that is killed is lost until it serves again, and what its rollouts had
sampled since their last checkpoints is sampled twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import redis
import yaml

from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.simulated_step import environment as simulated_step
from rollout_api import AsyncRolloutClient, Prompt
from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.errors import RolloutClientError
from rollout_api.ports import free_port
from rollout_api.protocol.keys import MessageKeys
from rollout_store.job import EngineReport, JobStore
from rollout_store.job.assignments import RolloutKey
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.process_supervisor import ProcessSupervisor
from tests.support.redis_servers import Server
from tests.support.reference_model import EOS, make_model

UID = "recovery"
KEYS = MessageKeys(UID)
WORKERS = 3
CLIENTS = 3
SAMPLES = 4
TOKENS = 400
ENDLESS = list(range(EOS))
"""All tokens except the end of sequence, so that every rollout has the maximum length."""
CHECKPOINT_TOKENS = 32
"""Number of tokens after which engines checkpoint a rollout, so that at most as many are sampled twice."""
STEP_S = 0.02
"""Duration of a decoding step."""
SLOTS = 16
"""Rollouts that an engine decodes at once: a single engine has room for all."""
UNDISTURBED_S = 60.0
"""Seconds that the job is observed without kills, for comparison."""
POLL_S = 0.01
MAX_WAIT_S = 300.0
SLOW_S = 1.0
"""Kills after which a rollout waits longer are printed."""
KILLED_PER_HOUR = 0.1
"""Share of the engines that is killed per hour, at which the effective time is calculated."""


class Job:
    """The processes of a job, and what can be read about them in Redis."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.server = Server(directory / "redis", appendonly=True, end_with_parent=True)
        self.url = f"redis://127.0.0.1:{self.server.port}/0"
        self.redis: Any = redis.Redis.from_url(self.url)
        self.store = JobStore.connect(self.url, KEYS)
        self._supervisor = ProcessSupervisor(directory)

    def start(self) -> None:
        """Start the head and the workers."""
        manifest = {
            "apiVersion": "das.rollout.dev/v1beta1",
            "kind": "RolloutJob",
            "metadata": {"name": "recovery"},
            "spec": {
                "model": {"uri": str(make_model(self._directory / "model"))},
                "source": {"trainer": {}},
                "engine": {**SMALL_CPU_ENGINE, "maxNumSeqs": SLOTS, "checkpointTokens": CHECKPOINT_TOKENS},
                "sampling": {"rolloutsPerPrompt": SAMPLES, "maxTokens": TOKENS},
                "workers": {"gpusPerWorker": 0},
            },
        }
        file = self._directory / "job.yaml"
        file.write_text(yaml.safe_dump(manifest))
        common = ["-f", str(file), "--redis", self.url, "--uid", UID]
        rollout = [sys.executable, "-m", "rollout_tools.cli"]
        variables = [f"{name}={value}" for name, value in simulated_step(self._directory / "plugin", STEP_S).items()]
        with_low_weight = ["sh", "-c", 'echo 10 > /proc/self/autogroup; exec env "$0" "$@"', *variables]
        self._supervisor.start("head", [*rollout, "head", *common, "--http-port", str(free_port())])
        for number in range(WORKERS):
            name = f"worker-{number}"
            self._supervisor.start(name, [*with_low_weight, *rollout, "worker", *common, "--name", name])

    def close(self) -> None:
        """Kill everything."""
        self._supervisor.stop()
        self.server.kill()

    def kill_head(self) -> None:
        """Kill the head and its children."""
        self._supervisor.kill("head")

    def head_started_at(self) -> float:
        """Return the Unix time at which the current process of the head was started; 0.0 if it is not running."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:4] == ["-m", "rollout_tools.cli", "head"]:
                    return float(process.create_time())
        return 0.0

    async def live_engines(self) -> dict[str, EngineReport]:
        """Return the engines with a valid lease by id."""
        engines = await self.store.engines.engines()
        return {engine: found.report for engine, found in engines.items() if found.alive}

    async def assigned(self, engine: str) -> set[RolloutKey]:
        """Return the rollouts that are assigned to an engine."""
        orders = await self.store.assignments.inbox(engine)
        return {order.assignment.key for order in orders if order.assignment is not None}

    async def finished(self, rollouts: set[RolloutKey]) -> set[RolloutKey]:
        """Return which of these rollouts have finished."""
        requests = sorted({request for request, _ in rollouts})
        progress = await self.store.requests.progress(requests)
        done = {(request, sample) for request, found in zip(requests, progress, strict=True) for sample in found.done}
        return rollouts & done

    def tokens(self) -> int:
        """Return the number of tokens of all finished rollouts."""
        return int(self.redis.hget(KEYS.totals, "tokens") or 0)

    def coordinator(self) -> int:
        """Return the number of the coordinator that publishes the job's status."""
        status = self.redis.get(KEYS.status)
        return 0 if status is None else int(json.loads(status)["coordinator"])


async def keep_sampling(job: Job, number: int) -> None:
    """Request one group of rollouts after the other."""
    async with AsyncRolloutClient.connect(job.url, uid=UID, name=f"client-{number}", timeout=600) as client:
        step = 0
        while True:
            tokens = [(number + 3 * step + place) % EOS for place in range(6)]
            prompt = Prompt(tokens, f"p{number}", sampling={"allowed_token_ids": ENDLESS})
            with contextlib.suppress(RolloutClientError):
                async with client.step(step, [prompt]) as running:
                    async for _ in running:
                        pass
            step += 1


async def wait_until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for an asynchronous condition.

    Raises:
        TimeoutError: if it is not met in time.
    """
    deadline = time.monotonic() + MAX_WAIT_S
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        await asyncio.sleep(POLL_S)


class TokenWatch:
    """Watches how long no engine reports new tokens."""

    def __init__(self, job: Job) -> None:
        self.longest = 0.0
        self._job = job

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch within the block."""
        self.longest = 0.0
        task = asyncio.ensure_future(self._run())
        try:
            yield
        finally:
            await cancel_and_wait(task)

    async def _run(self) -> None:
        counts: dict[str, float] = {}
        progressed_at = time.monotonic()
        while True:
            for engine, known in (await self._job.live_engines()).items():
                tokens = known.counters.get("tokens", 0)
                if tokens > counts.get(engine, 0):
                    counts[engine] = tokens
                    progressed_at = time.monotonic()
            self.longest = max(self.longest, time.monotonic() - progressed_at)
            await asyncio.sleep(0.05)


async def measure_engine_kills(job: Job, count: int, rng: random.Random) -> tuple[list[float], list[float]]:
    """Kill engines one after the other, always while at least two serve.

    Returns:
        Seconds until each rollout of a killed engine was assigned to another one, and until each killed engine served
        again.
    """
    moved, restarts = list[float](), list[float]()
    killed = 0
    waiting: dict[str, float] = {}
    while killed < count or waiting:
        engines = await job.live_engines()
        back = waiting.keys() & {known.name for known in engines.values()}
        restarts += [time.monotonic() - waiting.pop(name) for name in back]
        loaded = {engine: await job.assigned(engine) for engine in engines}
        candidates = sorted(engine for engine, rollouts in loaded.items() if rollouts)
        if killed == count or len(engines) < WORKERS - 1 or not candidates:
            await asyncio.sleep(0.1)
            continue
        victim = rng.choice(candidates)
        os.kill(engines[victim].pid, signal.SIGKILL)
        killed_at = waiting[engines[victim].name] = time.monotonic()
        moved += (seconds := await seconds_until_continued(job, victim, killed_at))
        killed += 1
        if max(seconds, default=0.0) > SLOW_S:
            print(f"kill {killed}: the last rollout of {victim} took {max(seconds):.2f} s", flush=True)
        if killed % 10 == 0:
            print(f"{killed} engines killed", flush=True)
    return moved, restarts


async def seconds_until_continued(job: Job, victim: str, killed_at: float) -> list[float]:
    """Return after how many seconds each rollout of a killed engine is assigned to another engine, or has finished.

    Raises:
        TimeoutError: if a rollout is not continued.
    """
    seconds = list[float]()
    missing = await job.assigned(victim)
    while missing:
        others = [await job.assigned(engine) for engine in await job.live_engines() if engine != victim]
        continued = missing & set().union(*others) | await job.finished(missing)
        seconds += [time.monotonic() - killed_at] * len(continued)
        missing -= continued
        if time.monotonic() - killed_at > MAX_WAIT_S:
            raise TimeoutError(f"rollouts of {victim} are not continued: {missing}")
        await asyncio.sleep(POLL_S)
    return seconds


async def measure_head_kills(job: Job, count: int) -> tuple[list[float], list[float]]:
    """Kill the head again and again.

    Returns:
        Seconds from each successor's start until it coordinates, and the longest time without new tokens around each
        kill.
    """
    starts, gaps, watch = list[float](), list[float](), TokenWatch(job)
    for _ in range(count):
        async with watch.watch():
            await asyncio.sleep(3.0)
            before, engines = job.coordinator(), set(await job.live_engines())
            job.kill_head()

            async def has_successor(before: int = before) -> bool:
                return job.coordinator() > before

            await wait_until(has_successor, "no other head coordinates")
            starts.append(time.time() - job.head_started_at())
            await asyncio.sleep(3.0)
        gaps.append(watch.longest)
        print(f"a new head coordinates {starts[-1]:.2f} s after its start", flush=True)
        if engines != set(await job.live_engines()):
            raise RuntimeError("an engine has not survived the head")
    return starts, gaps


async def measure(job: Job, engine_kills: int, head_kills: int, rng: random.Random) -> tuple[list[Figure], Any]:
    """Run the job and all measurements."""
    clients = [asyncio.ensure_future(keep_sampling(job, number)) for number in range(CLIENTS)]
    try:

        async def all_serve() -> bool:
            return len(await job.live_engines()) == WORKERS and job.tokens() > 0

        await wait_until(all_serve, "the engines do not start")
        watch = TokenWatch(job)
        async with watch.watch():
            begun, tokens = time.monotonic(), job.tokens()
            await asyncio.sleep(UNDISTURBED_S)
            speed = (job.tokens() - tokens) / (time.monotonic() - begun)
        usual_gap = watch.longest
        starts, gaps = await measure_head_kills(job, head_kills)
        moved, restarts = await measure_engine_kills(job, engine_kills, rng)
    finally:
        await cancel_and_wait(*clients)
    resampled_s = len(moved) / engine_kills * CHECKPOINT_TOKENS / (speed / WORKERS)
    loss_per_kill = statistics.mean(restarts) + resampled_s
    effective = 1.0 - KILLED_PER_HOUR * loss_per_kill / 3600.0
    continues, token_gap = "rollouts continue elsewhere after an engine's death", "longest time without reported tokens"
    figures = [
        Figure(f"{continues}, p50", quantile(moved, 0.5), "s", "", "<=", 1.0),
        Figure(f"{continues}, p99", quantile(moved, 0.99), "s", "", "<=", 1.0),
        Figure("a new head coordinates after its start, maximum", max(starts), "s", "", "<=", 3.0),
        Figure(f"{token_gap} while the head is replaced, maximum", max(gaps), "s", "", "<=", None),
        Figure(f"{token_gap} without a kill", usual_gap, "s", "", "<=", None),
        Figure(
            "effective time with 10 % of the engines killed per hour (calculated)", 100 * effective, "%", "", ">=", 95.0
        ),
    ]
    details = {
        "engine kills": engine_kills,
        "rollouts that lost their engine": len(moved),
        "seconds until they continued": spread(moved),
        "seconds until a killed engine served again": spread(restarts),
        "engine-seconds lost per kill": loss_per_kill,
        "of these, at most, for tokens that are sampled twice": resampled_s,
        "tokens per second without kills": speed,
        "head kills": head_kills,
        "seconds until a new head coordinated": spread(starts),
        "median seconds without reported tokens while the head was replaced": statistics.median(gaps),
    }
    return figures, details


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine-kills", type=int, default=100)
    parser.add_argument("--head-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="Determines which engines are killed.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory))
        try:
            job.start()
            rng = random.Random(options.seed)
            figures, details = asyncio.run(measure(job, options.engine_kills, options.head_kills, rng))
        finally:
            job.close()
    report(options.json, figures, details=details)


if __name__ == "__main__":
    main()
