"""A job with several workers whose parts are killed: every rollout is delivered once and stored once.

Run it with ``make test-chaos``. ``CHAOS_SEED`` determines what is killed when, and ``CHAOS_SECONDS`` for how
long, which is longer if not everything was killed by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml

from rollout_api.ports import free_port
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.messages import RolloutId
from rollout_store.job.requests import LedgerEntry
from tests.support.chaos_trainer import GROUPS, SAMPLES, TOKENS
from tests.support.history_contents import rollout_ids_in
from tests.support.manifests import SMALL_CPU_ENGINE, rollout_job
from tests.support.process_supervisor import ProcessSupervisor
from tests.support.redis_servers import Server
from tests.support.reference_model import make_model
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import wait_for

SEED = int(os.environ.get("CHAOS_SEED", "1"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "240"))
UID = "chaos"
KEYS = MessageKeys(UID)
HISTORY = HistoryKeys("default", "chaos")
TRAINERS = 2
"""Trainers that use Redis. Another one uses the HTTP server."""
HTTP_RANK = TRAINERS
WAIT_FOR_PROCESS_S = 120.0
SERVICES = "rollout_head.services"
RESUMPTION_S = 3.0
"""Seconds within which engines sample again once there is another coordinator. They report tokens once a second."""


@dataclass
class Audit:
    """Counts how often the job announces each result to the trainers that use Redis."""

    server: Server
    delivered: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    _positions: dict[str, str] = field(
        default_factory=lambda: {KEYS.result_updates(f"rank-{rank}"): "0" for rank in range(TRAINERS)}
    )

    def read(self) -> None:
        client: Any = self.server.raw_client()
        for stream, entries in client.xread(self._positions, count=1000) or []:
            self._positions[stream.decode()] = entries[-1][0].decode()
            for _, fields in entries:
                # A refusal follows an outage of Redis, after which a client repeats a request that was answered.
                if b"s" in fields:
                    self.delivered[str(RolloutId(UID, fields[b"r"].decode(), int(fields[b"s"])))] += 1

    def read_ledger(self) -> None:
        """Read why the rollouts have ended, and how long they are."""
        client: Any = self.server.raw_client()
        for rollout_id in map(RolloutId.parse, self.delivered):
            entry = LedgerEntry.unpack(client.hget(KEYS.ledger(rollout_id.request_id), str(rollout_id.sample)))
            self.reasons[entry.finish_reason] += 1
            self.tokens += entry.length


@dataclass
class SamplingMonitor:
    """Records when tokens were sampled, according to the engines' reports."""

    server: Server
    gaps: list[tuple[float, float]] = field(default_factory=list)
    engines: set[bytes] = field(default_factory=set)
    """All engine ids that were ever seen; each new lease has a new one."""
    _tokens: dict[bytes, float] = field(default_factory=dict)
    _last_progress: float = field(default_factory=time.monotonic)

    def update(self) -> None:
        import msgpack

        reports: Any = self.server.raw_client().hgetall(KEYS.engines)
        for engine, data in reports.items():
            self.engines.add(engine)
            tokens = msgpack.unpackb(data, strict_map_key=False)["counters"].get("tokens", 0)
            if tokens > self._tokens.get(engine, 0):
                self._tokens[engine] = tokens
                now = time.monotonic()
                self.gaps.append((self._last_progress, now - self._last_progress))
                self._last_progress = now

    def has_sampled(self, engine: bytes) -> bool:
        """Return whether an engine has sampled any token."""
        return engine in self._tokens

    def longest_after(self, moment: float) -> float:
        """Return the longest time without a token that ended after *moment*."""
        return max((gap for begun, gap in self.gaps if begun + gap > moment), default=0.0)


class ChaosJob:
    """The processes of a job and its trainers, and the faults that can be injected."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = Server(directory / "redis", appendonly=True, end_with_parent=False)
        self.proxy = Proxy(self.server.port)
        self.supervisor = ProcessSupervisor(directory)
        self.audit, self.sampling = Audit(self.server), SamplingMonitor(self.server)
        self.trainers_killed: Counter[str] = Counter()
        self._model = make_model(directory / "model")
        self._stop = directory / "stop"
        self._http_port, self._server_port = free_port(), free_port()

    @property
    def url(self) -> str:
        """URL at which the job and its trainers reach Redis, through the proxy."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def start(self) -> None:
        manifest = rollout_job(
            "chaos",
            model={"uri": str(self._model)},
            engine={**SMALL_CPU_ENGINE, "maxNumSeqs": 16, "checkpointTokens": 32},
            sampling={"rolloutsPerPrompt": SAMPLES, "maxTokens": TOKENS},
            workers={"gpusPerWorker": 0, "replicas": 2},
        )
        file = self.directory / "job.yaml"
        file.write_text(yaml.safe_dump(manifest))
        head = ["head", "-f", str(file), "--http-port", str(self._http_port)]
        self.supervisor.start("head", self._rollout(*head))
        for number in range(2):
            self.start_worker(number)
        for rank in range(TRAINERS):
            self.start_trainer(rank, "--redis", self.url, "--uid", UID)
        serve = ["serve", "-f", str(file), "--port", str(self._server_port)]
        self.supervisor.start("server", self._rollout(*serve))
        self.start_trainer(HTTP_RANK, "--url", f"http://127.0.0.1:{self._server_port}/v1")

    def start_trainer(self, rank: int, *options: str) -> None:
        command = [sys.executable, "-m", "tests.support.chaos_trainer", "--rank", str(rank), *options]
        command += ["--journal", str(self.journal(rank)), "--stop", str(self._stop)]
        self.supervisor.start(f"trainer-{rank}", command)

    def start_worker(self, number: int) -> None:
        self.supervisor.start(f"worker-{number}", self._rollout("worker", "-f", str(self.directory / "job.yaml")))

    def coordinator(self) -> int:
        """Return the number of the coordinator, which each one takes from a counter."""
        return int(self.server.raw_client().get(KEYS.fencing_token) or 0)

    def journal(self, rank: int) -> Path:
        return self.directory / f"journal-{rank}"

    def steps(self) -> int:
        """Return how many steps the trainers that use Redis have made."""
        return sum(map(self.steps_of, range(TRAINERS)))

    def steps_of(self, rank: int) -> int:
        journal = self.journal(rank)
        return len(journal.read_text().splitlines()) if journal.exists() else 0

    def _rollout(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rollout_tools.cli", *arguments, "--redis", self.url, "--uid", UID]

    # faults

    def kill_process(self, title: str, rng: random.Random) -> None:
        """Wait for a process with this title and kill it."""

        self._kill_one_of(lambda: self.supervisor.processes(title), rng, title)

    def kill_service(self, name: str, rng: random.Random) -> None:
        """Wait for the process of the coordinator or the relay and kill it."""
        self._kill_one_of(lambda: self.supervisor.processes_with_arguments(SERVICES, name), rng, name)

    def _kill_one_of(self, find: Callable[[], list[psutil.Process]], rng: random.Random, name: str) -> None:
        def is_killed() -> bool:
            if found := find():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rng.choice(sorted(found, key=lambda process: process.pid)).kill()
                    return True
            return False

        wait_for(is_killed, WAIT_FOR_PROCESS_S, f"There is no {name}.")

    def kill_engine(self, rng: random.Random) -> None:
        self.kill_process("ray::EngineActor", rng)

    def kill_coordinator(self, rng: random.Random) -> None:
        self.kill_service("coordinator", rng)

    def kill_relay(self, rng: random.Random) -> None:
        self.kill_service("relay", rng)

    def kill_trainer(self, rng: random.Random) -> None:
        name = f"trainer-{rng.randrange(TRAINERS + 1)}"
        self.trainers_killed[name] += 1
        self.supervisor.kill(name)

    def kill_redis(self, rng: random.Random) -> None:
        self.server.kill()
        time.sleep(rng.uniform(0.2, 3.0))
        self.server.start()

    def drop_connections(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 6)):
            self.proxy.drop()
            time.sleep(rng.uniform(0.05, 0.5))

    def delay_connections(self, rng: random.Random) -> None:
        self.proxy.delay(rng.uniform(0.1, 1.0))
        time.sleep(rng.uniform(1.0, 4.0))
        self.proxy.delay(0.0)

    def kill_worker(self, rng: random.Random) -> None:
        self.supervisor.kill(f"worker-{rng.randrange(2)}")

    def kill_server(self, _: random.Random) -> None:
        self.supervisor.kill("server")

    def kill_head(self, _: random.Random) -> None:
        self.supervisor.kill("head")

    def wait(self, condition: Callable[[], bool], seconds: float, failure: str) -> None:
        def is_met() -> bool:
            met = condition()
            if not met:
                self.observe()
            return met

        wait_for(is_met, seconds, lambda: f"{failure} within {seconds:.0f} s; {self.logs()}")

    def observe(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self.sampling.update()
            self.audit.read()

    def logs(self) -> str:
        tails = [f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.directory.glob("*.log")]
        return "\n".join(tails)

    def stop_trainers(self) -> None:
        self._stop.touch()

    def close(self) -> None:
        self.supervisor.stop()
        self.proxy.close()
        self.server.kill()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ChaosJob]:
    job = ChaosJob(tmp_path)
    yield job
    job.close()


@pytest.mark.timeout(1800)
def test_every_rollout_is_delivered_once_and_stored_once_whatever_is_killed(job: ChaosJob) -> None:
    rng = random.Random(SEED)
    job.start()
    job.wait(lambda: job.steps() >= TRAINERS and job.steps_of(HTTP_RANK) > 0, 240, "the first steps were not made")

    faults: list[Callable[[random.Random], None]] = [
        job.kill_engine,
        job.kill_coordinator,
        job.kill_relay,
        job.kill_trainer,
        job.kill_redis,
        job.drop_connections,
        job.delay_connections,
        job.kill_worker,
        job.kill_server,
    ]
    ends = time.monotonic() + SECONDS
    done: list[tuple[float, str]] = []

    failures: list[Exception] = []

    def run_faults() -> None:
        try:
            inject_faults()
        except Exception as error:
            failures.append(error)

    def inject_faults() -> None:
        rng.shuffle(faults)
        chosen = list(faults)  # each fault at least once
        while chosen or time.monotonic() < ends:
            fault = chosen.pop() if chosen else rng.choice(faults)
            done.append((time.monotonic(), fault.__name__))
            fault(rng)
            time.sleep(rng.uniform(1.0, 12.0))

    injector = threading.Thread(target=run_faults, daemon=True)
    injector.start()
    while injector.is_alive():
        job.observe()
        time.sleep(0.2)
    if failures:
        raise failures[0]
    assert {fault.__name__ for fault in faults} == {name for _, name in done}

    # the head is killed separately, to measure what its replacement costs
    job.wait(lambda: len(job.server.raw_client().hgetall(KEYS.engines)) == 2, 420, "no two engines are back")
    steps = job.steps()
    job.wait(lambda: job.steps() > steps, 120, "no step was made after the faults")
    engines = set(job.server.raw_client().hgetall(KEYS.engines))
    coordinator = job.coordinator()
    killed_at = time.monotonic()
    job.kill_head(rng)
    job.wait(lambda: job.coordinator() != coordinator, 120, "no other coordinator has taken over")
    until_new = time.monotonic() - killed_at
    steps = job.steps()
    job.wait(lambda: job.steps() > steps + 1, 120, "no step was made under the new head")
    gap = job.sampling.longest_after(killed_at)
    assert engines == set(job.server.raw_client().hgetall(KEYS.engines)), "engines have not survived the head"

    # one worker joins and another leaves
    job.start_worker(2)
    job.wait(lambda: len(job.server.raw_client().hgetall(KEYS.engines)) == 3, 420, "no third engine came")
    job.supervisor.remove("worker-0")
    steps = job.steps()
    job.wait(lambda: job.steps() > steps + 3, 180, "no step was made without the worker that left")

    steps = job.steps_of(HTTP_RANK)
    job.wait(lambda: job.steps_of(HTTP_RANK) > steps, 180, "no step was made through the HTTP server")
    job.stop_trainers()
    trainers = [f"trainer-{rank}" for rank in (*range(TRAINERS), HTTP_RANK)]
    job.wait(lambda: all(job.supervisor.ended(name) == 0 for name in trainers), 180, "trainers did not end")
    client = job.server.raw_client()
    job.wait(
        lambda: client.xlen(KEYS.requests) == client.xlen(KEYS.outbox) == 0, 60, "requests or finished rollouts remain"
    )
    job.audit.read()
    job.audit.read_ledger()

    requested: set[str] = set()
    through_http: set[str] = set()
    received: Counter[str] = Counter()
    for rank in (*range(TRAINERS), HTTP_RANK):
        for line in job.journal(rank).read_text().splitlines():
            step = json.loads(line)
            assert GROUPS * SAMPLES == len(step["rollouts"]), f"step {step['step']} of rank {rank} is not complete"
            rollout_ids = [rollout_id for rollout_id, _ in step["rollouts"]]
            received.update(rollout_ids)
            requested |= set(rollout_ids)
            if rank == HTTP_RANK:
                through_http |= set(rollout_ids)
    in_history = rollout_ids_in(client, HISTORY)
    lost = len(job.sampling.engines) - len(client.hgetall(KEYS.engines))
    print(
        json.dumps(
            {
                "seed": SEED,
                "faults": dict(Counter(name for _, name in done)),
                "restarts": job.supervisor.restarts,
                "rollouts": len(requested),
                "rollouts through the HTTP server": len(through_http),
                "reasons": job.audit.reasons,
                "tokens": job.audit.tokens,
                "engines lost": lost,
                "seconds without a token after the head's death": round(gap, 1),
                "seconds until another coordinator has taken over": round(until_new, 1),
            }
        )
    )
    assert {1} == set(received.values())
    # a trainer that is killed between journal and release gets a step again that it has recorded
    assert {1} == set(job.audit.delivered.values()), "a result was announced twice"
    assert set(job.audit.delivered) == requested - through_http
    assert GROUPS * SAMPLES * job.steps_of(HTTP_RANK) == len(through_http)
    assert {1} == set(in_history.values()), "a rollout is in the history twice"
    assert requested == set(in_history)
    assert {"stop", "length"} >= set(job.audit.reasons)
    assert 0 == client.hlen(KEYS.partials)
    assert [] == [key for rank in range(TRAINERS) for key in client.keys(KEYS.results(f"rank-{rank}:*"))]
    # The rollouts of this job are so short that engines run out of work without a coordinator.
    assert gap <= until_new + RESUMPTION_S
    # the faults had an effect
    assert lost > 0
    assert job.proxy.dropped > 0
    # and the trainers waited instead of failing
    restarts = {name: job.supervisor.restarts[name] for name in trainers}
    assert all(restarts[name] <= job.trainers_killed[name] for name in trainers), (restarts, job.logs())
