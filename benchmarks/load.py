"""Measures the CPU time and the delay that a job's message path adds to rollouts, over the load.

    python -m benchmarks.load --json FILE

The coordinator, the relay and Redis run as in a job. The engines are stubs: they take part in the whole protocol, but
instead of sampling they wait for a time that the client knows, and return random tokens. A client keeps a number of
multi-turn trajectories running. Each requests its next turn as soon as it has received the last one.

What the message path adds to a turn is the time from its request to its delivery less the time that its engine waited.
CPU time is that of all processes, by kind, per rollout.

With ``--http-trajectories``, that many of the trajectories use two HTTP servers of the job (``rollout serve``) in place
of Redis, with an idempotency key for each turn. What is added to their turns includes the server.

With ``--kills``, the coordinator, the relay, Redis, half of the engines and each HTTP server are then killed with
SIGKILL in turns under the greatest load. Each rollout must have been delivered once and be in the history once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from benchmarks.figures import Figure, quantile, report
from rollout_api import AsyncRolloutClient
from rollout_api.ports import free_port
from rollout_api.protocol.messages import RolloutId
from rollout_api.redis_client.connection import connect
from rollout_head.services import Service
from rollout_store.history.records import START
from rollout_store.job.setup import JobSetup
from rollout_store.models.model_source import default_cache
from rollout_tools.tiny_model import ensure
from tests.support.redis_servers import Server
from tests.support.stub_engines import VOCABULARY, run_engines

UID = "load"
PROMPT = 64
"""Tokens of the first prompt of a trajectory."""
OBSERVATION = 16
"""Tokens of the environment between two turns."""
TURNS = 4
"""Turns of a trajectory."""
PROBLEMS = 512
"""Number of different first prompts."""
ENGINE_PROCESSES = 2
"""Processes that share the stub engines. A real engine has a process of its own."""
HTTP_SERVERS = 2
START_TIMEOUT_S = 240.0
"""Seconds that an HTTP server may take to start."""
RETRY_PAUSE_S = 0.2
"""Seconds before a request is sent again, to the other HTTP server."""
SETTLE_S = 3.0
"""Seconds that the job is left alone before it is measured without rollouts."""
KILL_INTERVAL_S = 5.0
"""Seconds between two kills."""


@dataclass(frozen=True)
class Workload:
    """What is requested of the job."""

    num_engines: int
    tokens: int
    """Tokens of each turn."""
    generation_s: float
    """Mean time that an engine waits instead of sampling a turn."""
    http_trajectories: int
    """Number of trajectories that use the HTTP servers."""
    model: str
    """Directory of a model; the HTTP servers read its tokenizer."""

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the job."""
        return {
            "apiVersion": "das.rollout.dev/v1beta1",
            "kind": "RolloutJob",
            "metadata": {"name": "load"},
            "spec": {
                "model": {"uri": self.model},
                "source": {"trainer": {}},
                "engine": {"maxModelLen": 4096, "maxNumSeqs": 256},
                "sampling": {"rolloutsPerPrompt": 1, "maxTokens": self.tokens, "logprobs": True},
                "workers": {"gpusPerWorker": 0},
                "speculation": {"policy": "off"},
            },
        }

    def setup(self, url: str) -> JobSetup:
        """Return the settings of the job."""
        return JobSetup(self.manifest(), UID, url, VOCABULARY, "load")

    def generation_time(self, request_id: str) -> float:
        """Return the seconds that an engine waits for the rollout of a request: half to one and a half times the mean.

        The client and the engines compute it independently of each other.
        """
        return self.generation_s * (0.5 + (zlib.crc32(request_id.encode()) % 1024) / 1024)


def run_engine_host(url: str, workload: Workload, names: Sequence[str]) -> None:
    """Run the workers of some stub engines until the process is killed."""
    run_engines(workload.setup(url), names, workload.generation_time)


@dataclass
class Turns:
    """The turns of a measurement."""

    added_s: list[float] = field(default_factory=list)
    """Seconds that the message path has added to each turn that was requested over Redis."""
    http_added_s: list[float] = field(default_factory=list)
    """Seconds that an HTTP server and the message path have added to each other turn."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """How often each rollout was delivered, of the whole load and not only of the measured part."""
    num_over_http: int = 0
    """Number of rollouts that were delivered over HTTP, of the whole load."""


class HttpClient:
    """Requests turns from the HTTP servers.

    Args:
        session: connections to the servers.
        urls: addresses of the servers.
        workload: what is requested.
    """

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], workload: Workload) -> None:
        self._session, self._workload = session, workload
        self._urls = itertools.cycle(urls)

    async def run_trajectories(self, name: str, rng: random.Random, turns: Turns, stopping: asyncio.Event) -> None:
        """Run one trajectory after the other; *name* must differ from that of other calls."""
        await asyncio.sleep(self._workload.generation_s * rng.random())
        for number in itertools.count():
            problem = rng.randrange(PROBLEMS)
            tokens = [(problem * 131 + position) % VOCABULARY for position in range(PROMPT)]
            for turn in range(TURNS):
                if stopping.is_set():
                    return
                headers = {
                    "Idempotency-Key": f"{name}-{number}-{turn}",
                    "X-Rollout-Problem": f"http-{problem}",
                    "X-Rollout-Trajectory": f"{name}-{number}",
                    "X-Rollout-Turn": str(turn),
                }
                asked = time.perf_counter()
                rollout_id, sampled = await self._request(tokens, headers)
                request_id = RolloutId.parse(rollout_id).request_id
                waited = self._workload.generation_time(request_id)
                turns.http_added_s.append(time.perf_counter() - asked - waited)
                turns.rollouts[rollout_id] += 1
                turns.num_over_http += 1
                tokens += [*sampled, *((problem + position) % VOCABULARY for position in range(OBSERVATION))]

    async def _request(self, tokens: list[int], headers: dict[str, str]) -> tuple[str, list[int]]:
        """Return the id and the tokens of a rollout; repeat the request until a server answers it."""
        body = {"model": "load", "prompt": tokens, "max_tokens": self._workload.tokens, "return_token_ids": True}
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.post(
                    f"{next(self._urls)}/v1/completions", json=body, headers=headers
                ) as response:
                    answer = await response.json()
                    if response.status == 200:
                        request = response.headers["X-Rollout-Request-Ids"]
                        return f"{request}/0/{headers['X-Rollout-Turn']}", answer["choices"][0]["token_ids"]
                    if response.status < 500 and response.status != 429:
                        raise RuntimeError(f"an HTTP server has refused a request: {answer}")
            await asyncio.sleep(RETRY_PAUSE_S)


def run_client(url: str, workload: Workload, http_urls: Sequence[str], pipe: Connection) -> None:
    """Run the client: for each number of trajectories received, keep as many running until the next message."""

    async def run_trajectories(step: Any, rng: random.Random, turns: Turns, stopping: asyncio.Event) -> None:
        # Trajectories that have just begun would otherwise all request their turns at the same time.
        await asyncio.sleep(workload.generation_s * rng.random())
        while not stopping.is_set():
            problem = rng.randrange(PROBLEMS)
            trajectory = step.trajectory([(problem * 131 + position) % VOCABULARY for position in range(PROMPT)])
            for _ in range(TURNS):
                asked = time.perf_counter()
                [rollout] = await step.turn([trajectory])
                request_id = RolloutId.parse(rollout.rollout_id).request_id
                turns.added_s.append(time.perf_counter() - asked - workload.generation_time(request_id))
                turns.rollouts[rollout.rollout_id] += 1
                if stopping.is_set():
                    break
                trajectory.observe([(problem + position) % VOCABULARY for position in range(OBSERVATION)])

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            AsyncRolloutClient.connect(url, uid=UID) as client,
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session,
        ):
            http_client = HttpClient(session, http_urls, workload)
            pipe.send("connected")
            number = first = http_first = 0
            while (num_trajectories := await asyncio.to_thread(pipe.recv)) is not None:
                number += 1
                turns, stopping = Turns(), asyncio.Event()
                async with client.step(number, []) as step:
                    seeds = [random.Random(f"{number}.{index}") for index in range(num_trajectories)]
                    over_http = min(num_trajectories, workload.http_trajectories)
                    running = [
                        *(run_trajectories(step, rng, turns, stopping) for rng in seeds[over_http:]),
                        *(
                            http_client.run_trajectories(f"{number}-{index}", rng, turns, stopping)
                            for index, rng in enumerate(seeds[:over_http])
                        ),
                    ]
                    tasks = [asyncio.ensure_future(one) for one in running]
                    while (message := await asyncio.to_thread(pipe.recv)) != "stop":
                        if message == "begin":
                            first, http_first = len(turns.added_s), len(turns.http_added_s)
                        pipe.send(len(turns.added_s) + len(turns.http_added_s))
                    measured = turns.added_s[first:], turns.http_added_s[http_first:]
                    stopping.set()
                    await asyncio.gather(*tasks)
                pipe.send((*measured, turns.rollouts, turns.num_over_http))

    asyncio.run(run())


class Job:
    """The processes of a job with stub engines and of its client."""

    def __init__(self, server: Server, workload: Workload, directory: Path) -> None:
        url = server.url
        self.redis: Any = connect(url)
        self._manifest = directory / "job.yaml"
        self._manifest.write_text(yaml.safe_dump(workload.manifest()))
        self._http_ports = [free_port() for _ in range(HTTP_SERVERS if workload.http_trajectories else 0)]
        self._http_servers: list[subprocess.Popen[bytes]] = []
        self._server, self._workload = server, workload
        self._setup = workload.setup(url)
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._processes: dict[str, list[BaseProcess]] = {}
        context = multiprocessing.get_context("spawn")
        self.client, client_end = context.Pipe()
        self._processes["engine hosts"] = [self._engine_host(first) for first in range(ENGINE_PROCESSES)]
        http_urls = [f"http://127.0.0.1:{port}" for port in self._http_ports]
        self._processes["client"] = [
            context.Process(target=run_client, args=(url, workload, http_urls, client_end), daemon=True)
        ]

    def start(self) -> None:
        """Start all processes, and wait until all engines serve."""
        self._setup.open_history()
        for service in Service:
            self.start_service(service)
        for process in self._processes["engine hosts"]:
            process.start()
        keys = self._setup.keys
        while self.redis.hlen(keys.engines) < self._workload.num_engines or not self.redis.exists(keys.status):
            time.sleep(0.1)
        for process in self._processes["client"]:
            process.start()
        self.client.recv()
        self._http_servers = [self._start_http_server(port) for port in self._http_ports]
        for number in range(len(self._http_ports)):
            self._wait_until_served(number)

    def _engine_host(self, first: int) -> BaseProcess:
        """Return a process with every second engine, which has not started."""
        names = [f"engine-{number}" for number in range(first, self._workload.num_engines, ENGINE_PROCESSES)]
        arguments = self._server.url, self._workload, names
        return multiprocessing.get_context("spawn").Process(target=run_engine_host, args=arguments, daemon=True)

    def _start_http_server(self, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rollout_tools.cli", "serve", "-f", str(self._manifest), "--uid", UID]
        command += ["--redis", self._server.url, "--port", str(port)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def _wait_until_served(self, number: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._http_servers[number].poll() is None:
            url = f"http://127.0.0.1:{self._http_ports[number]}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(url):
                return
            time.sleep(0.5)
        raise RuntimeError("an HTTP server has ended, or has not started in time")

    def start_service(self, service: Service) -> None:
        """Start the coordinator or the relay."""
        command = [sys.executable, "-m", "rollout_head.services", service]
        with tempfile.TemporaryFile("w+") as settings:
            settings.write(self._setup.to_json())
            settings.seek(0)
            self._services[service] = subprocess.Popen(command, stdin=settings)

    def replacements(self) -> list[Callable[[], None]]:
        """Return functions that each kill a part of the job and start it again."""
        return [
            *(partial(self._replace_service, service) for service in Service),
            self._server.restart,
            self._replace_engine_host,
            *(partial(self._replace_http_server, number) for number in range(len(self._http_servers))),
        ]

    def _replace_service(self, service: Service) -> None:
        self._services[service].kill()
        self._services[service].wait()
        self.start_service(service)

    def _replace_engine_host(self) -> None:
        hosts = self._processes["engine hosts"]
        hosts[0].kill()
        hosts[0].join()
        hosts[0] = self._engine_host(0)
        hosts[0].start()

    def _replace_http_server(self, number: int) -> None:
        self._http_servers[number].kill()
        self._http_servers[number].wait()
        self._http_servers[number] = self._start_http_server(self._http_ports[number])
        self._wait_until_served(number)

    def close(self) -> None:
        """Kill all processes."""
        for service in (*self._services.values(), *self._http_servers):
            service.kill()
            service.wait()
        for processes in self._processes.values():
            for process in processes:
                if process.pid is not None:
                    process.kill()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of the job's processes so far, by kind."""
        info = self.redis.info("cpu")
        pids = {name: [service.pid] for name, service in self._services.items()}
        pids |= {kind: [process.pid or 0 for process in found] for kind, found in self._processes.items()}
        if self._http_servers:
            pids["HTTP servers"] = [server.pid for server in self._http_servers]
        times = {kind: [psutil.Process(pid).cpu_times() for pid in found] for kind, found in pids.items()}
        seconds = {kind: sum(one.user + one.system for one in found) for kind, found in times.items()}
        return seconds | {"Redis": info["used_cpu_user"] + info["used_cpu_sys"]}

    def memory(self) -> dict[str, float]:
        """Return the bytes of memory of the largest HTTP server, if there are any, and those that Redis uses."""
        found: dict[str, float] = {"Redis": self.redis.info("memory")["used_memory"]}
        if self._http_servers:
            infos = [psutil.Process(server.pid).memory_full_info() for server in self._http_servers]
            found["an HTTP server, RSS"] = max(info.rss for info in infos)
            found["an HTTP server, USS"] = max(info.uss for info in infos)
        return found

    def finished_rollouts(self) -> int:
        """Return the number of rollouts that the job has finished."""
        return int(self.redis.hget(self._setup.keys.totals, "rollouts") or 0)

    def is_quiet(self) -> bool:
        """Return whether the relay has moved all rollouts to the history."""
        return not self.redis.xlen(self._setup.keys.outbox)

    def history(self) -> Counter[str]:
        """Return how often the history contains each rollout."""
        store = self._setup.history_store()
        logs = self.redis.scan_iter(self._setup.history_keys.log("*"), count=1000)
        problems = [key.decode().split("{")[1].split("}")[0] for key in logs]
        slices = store.read(dict.fromkeys(problems, START), count=1_000_000)
        return Counter(record.rollout_id for found in slices.values() for record in found.records)


@dataclass(frozen=True)
class Load:
    """The job under one load."""

    trajectories: int
    rollouts_per_s: float
    added_s: list[float]
    http_added_s: list[float]
    cpu_s: dict[str, float]
    """CPU seconds per rollout, by kind of process."""
    memory: dict[str, float]
    """Bytes of memory after the load, by kind of process."""

    @property
    def total_cpu_s(self) -> float:
        """CPU seconds per rollout, of all processes."""
        return sum(self.cpu_s.values())


def measure_idle(job: Job, seconds: float) -> dict[str, float]:
    """Return the CPU seconds per second of a job without rollouts, by kind of process."""
    time.sleep(SETTLE_S)
    before = job.cpu_seconds()
    time.sleep(seconds)
    return {kind: (after - before[kind]) / seconds for kind, after in job.cpu_seconds().items()}


def measure(job: Job, workload: Workload, trajectories: int, seconds: float) -> Load:
    """Measure the job for *seconds* while it runs this many trajectories.

    Raises:
        RuntimeError: if a rollout was delivered twice, or more were finished than delivered.
    """
    finished_before = job.finished_rollouts()
    job.client.send(trajectories)
    time.sleep(1.5 * workload.generation_s)
    job.client.send("begin")
    begun = job.client.recv()
    started, before = time.perf_counter(), job.cpu_seconds()
    time.sleep(seconds)
    job.client.send("end")
    rollouts = job.client.recv() - begun
    elapsed, after = time.perf_counter() - started, job.cpu_seconds()
    job.client.send("stop")
    added_s, http_added_s, delivered, _ = job.client.recv()
    while not job.is_quiet():
        time.sleep(0.1)
    finished = job.finished_rollouts() - finished_before
    if finished != len(delivered) or max(delivered.values()) > 1:
        raise RuntimeError(f"{finished} rollouts have finished, and {delivered.total()} were delivered")
    cpu_s = {kind: (after[kind] - before[kind]) / rollouts for kind in after}
    return Load(trajectories, rollouts / elapsed, added_s, http_added_s, cpu_s, job.memory())


def measure_kills(job: Job, workload: Workload, trajectories: int, rounds: int) -> list[Figure]:
    """Kill each part in turns while the job runs this many trajectories, and return the figures.

    Raises:
        RuntimeError: if a rollout was delivered or is in the history more than once.
    """
    job.client.send(trajectories)
    time.sleep(1.5 * workload.generation_s)
    job.client.send("begin")
    job.client.recv()
    replacements = job.replacements() * rounds
    for replace in replacements:
        replace()
        time.sleep(KILL_INTERVAL_S)
    job.client.send("stop")
    added_s, http_added_s, delivered, num_over_http = job.client.recv()
    while not job.is_quiet():
        time.sleep(0.1)
    history = job.history()
    if max(delivered.values()) > 1 or max(history.values()) > 1:
        raise RuntimeError("a rollout was delivered twice, or is twice in the history")
    where = f"with {len(replacements)} kills, {trajectories} trajectories"
    return [
        Figure(f"rollouts delivered once, {where}", len(delivered), "rollouts", "", ">=", None),
        Figure(f"of these, over HTTP, {where}", num_over_http, "rollouts", "", ">=", None),
        Figure(f"of these, not in the history, {where}", len(delivered.keys() - history), "rollouts", "", "<=", 0.0),
        *figures_of_added(added_s, http_added_s, where),
        *figures_of_memory(job.memory(), where),
    ]


def figures_of_memory(memory: dict[str, float], where: str) -> list[Figure]:
    """Return the figures of the memory after a load."""
    return [Figure(f"memory of {kind}, {where}", size / 1e6, "MB", "", "<=", None) for kind, size in memory.items()]


def figures_of_added(added_s: Sequence[float], http_added_s: Sequence[float], where: str) -> list[Figure]:
    """Return the figures of what was added to turns over Redis, and over HTTP if there are any."""
    kinds = {"the message path": added_s, "an HTTP server and the message path": http_added_s}
    return [
        Figure(f"added by {what}, {name}, {where}", 1000 * quantile(found, share), "ms", "", "<=", None)
        for what, found in kinds.items()
        if found
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


def figures_of(idle: dict[str, float], loads: Sequence[Load]) -> list[Figure]:
    """Return the figures."""
    figures = [
        Figure(f"CPU time without rollouts, {kind}", 1000 * share, "ms per second", "", "<=", None)
        for kind, share in idle.items()
    ]
    for load in loads:
        where = f"{load.trajectories} trajectories"
        target = None if load.http_added_s else 1.5  # without the HTTP servers
        figures += [
            Figure(f"rollouts, {where}", load.rollouts_per_s, "per second", "", ">=", None),
            *figures_of_added(load.added_s, load.http_added_s, where),
            Figure(f"CPU time per rollout, all processes, {where}", 1000 * load.total_cpu_s, "ms", "", "<=", target),
        ]
        figures += [
            Figure(f"CPU time per rollout, {kind}, {where}", 1000 * seconds, "ms", "", "<=", None)
            for kind, seconds in load.cpu_s.items()
        ]
        figures += figures_of_memory(load.memory, where)
    return figures


@contextlib.contextmanager
def running_job(workload: Workload) -> Iterator[Job]:
    """Run a job with stub engines on a Redis server of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-load-") as directory,
        Server(Path(directory), appendonly=True, settings={"appendfsync": "everysec"}, end_with_parent=True) as server,
    ):
        job = Job(server, workload, Path(directory))
        try:
            job.start()
            yield job
        finally:
            job.close()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=256, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each turn [%(default)s]")
    parser.add_argument("--generation", type=float, default=20.0, help="mean seconds of each turn [%(default)s]")
    parser.add_argument(
        "--trajectories", default="200,1000,2500,5000,10000", help="concurrent trajectories [%(default)s]"
    )
    parser.add_argument(
        "--http-trajectories", type=int, default=0, help="how many of them use HTTP servers [%(default)s]"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each measurement [%(default)s]")
    parser.add_argument("--kills", type=int, default=0, help="how often each part is killed afterwards [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    model = ensure(default_cache() / "das" / "tiny-qwen3")[-1]
    workload = Workload(options.engines, options.tokens, options.generation, options.http_trajectories, str(model))
    loads = []
    with running_job(workload) as job:
        idle = measure_idle(job, min(10.0, options.seconds))
        for trajectories in map(int, options.trajectories.split(",")):
            loads.append(measure(job, workload, trajectories, options.seconds))
            print(f"{trajectories} trajectories: {loads[-1].rollouts_per_s:.0f} rollouts per second", flush=True)
        figures = figures_of(idle, loads)
        if options.kills:
            figures += measure_kills(job, workload, loads[-1].trajectories, options.kills)
    report(
        options.json,
        figures,
        engines=workload.num_engines,
        tokens=workload.tokens,
        generation_s=workload.generation_s,
        http_trajectories=workload.http_trajectories,
        seconds=options.seconds,
    )


if __name__ == "__main__":
    main()
