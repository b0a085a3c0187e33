"""A job on several Ray nodes under fire: each rollout is delivered once and kept once, none lost, none twice.

``make test-chaos``; ``CHAOS_SEED`` chooses what is killed when, and ``CHAOS_SECONDS`` for how long.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
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

from rollout_api.protocol.keys import DATA, HistoryKeys, MessageKeys
from rollout_api.protocol.messages import CodecError, Refusal, Rollout, decode
from tests.support.chaos_trainer import GROUPS, SAMPLES, TOKENS
from tests.support.history_contents import ids_in
from tests.support.ports import free_port
from tests.support.process_supervisor import Kubelet
from tests.support.reference_model import make_model
from tests.support.tcp_proxy import Proxy

SEED = int(os.environ.get("CHAOS_SEED", "1"))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "240"))
UID = "chaos"
KEYS = MessageKeys(UID)
HISTORY = HistoryKeys("default", "chaos")
TRAINERS = 2
PATIENCE_S = 120.0


class Server:
    """redis-server with an append-only file, on a port that stays."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--dir", str(self._directory), "--appendonly", "yes"]
        command += ["--save", "", "--maxmemory-policy", "noeviction", "--bind", "127.0.0.1"]
        # with everysec, one whose disk is slow answers before it has written, and killed then it takes that back
        command += ["--appendfsync", "always"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while True:
            try:
                if self.client.ping():
                    return
            except redis.RedisError:
                time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)


@dataclass
class Audit:
    """Reads every result as a group of its own: what a client would take for a repetition is counted here."""

    server: Server
    delivered: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    _read: set[tuple[str, bytes]] = field(default_factory=set)
    """Entries that were counted. Their acknowledgement does not tell: its answer is lost where Redis dies meanwhile."""

    def prepare(self) -> None:
        for rank in range(TRAINERS):
            self.server.client.xgroup_create(KEYS.results(f"rank-{rank}"), "audit", id="0", mkstream=True)

    def read(self) -> None:
        client: Any = self.server.client
        for rank in range(TRAINERS):
            stream = KEYS.results(f"rank-{rank}")
            for start in ("0", ">"):  # what was read before a crash and not acknowledged, then the rest
                for _, entries in client.xreadgroup("audit", "audit", {stream: start}, count=1000) or []:
                    for entry, fields in entries:
                        message = decode(fields[DATA.encode()])
                        if isinstance(message, Refusal):
                            # a client asked again, since Redis had been away, for what it had got meanwhile
                            assert "answered before" in message.reason, message
                            client.xack(stream, "audit", entry)
                            continue
                        assert isinstance(message, Rollout), message
                        if (stream, entry) not in self._read:
                            self._read.add((stream, entry))
                            self.delivered[message.rollout_id] += 1
                            self.reasons[str(message.finish_reason)] += 1
                            self.tokens += len(message.token_ids)
                        client.xack(stream, "audit", entry)


@dataclass
class Flow:
    """When tokens were sampled, as the engines report it."""

    server: Server
    gaps: list[tuple[float, float]] = field(default_factory=list)
    engines: set[bytes] = field(default_factory=set)
    """All that there ever were: each new one is a new lease."""
    _tokens: dict[bytes, float] = field(default_factory=dict)
    _moved: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        import msgpack

        reports: Any = self.server.client.hgetall(KEYS.engines)
        for engine, data in reports.items():
            self.engines.add(engine)
            tokens = msgpack.unpackb(data, strict_map_key=False)["counters"].get("tokens", 0)
            if tokens > self._tokens.get(engine, 0):
                self._tokens[engine] = tokens
                now = time.monotonic()
                self.gaps.append((self._moved, now - self._moved))
                self._moved = now

    def sampled(self, engine: bytes) -> bool:
        """Whether an engine has sampled anything."""
        return engine in self._tokens

    def longest_after(self, moment: float) -> float:
        """The longest stretch without a token that ended after *moment*."""
        return max((gap for begun, gap in self.gaps if begun + gap > moment), default=0.0)


class Field:
    """Everything that runs, and everything that may be done to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "redis").mkdir()
        self.server = Server(directory / "redis")
        self.proxy = Proxy(self.server.port)
        self.kubelet = Kubelet(directory)
        self.audit, self.flow = Audit(self.server), Flow(self.server)
        self.trainers_killed: Counter[str] = Counter()
        self._model = make_model(directory / "model")
        self._stop = directory / "stop"
        self._ray_port = free_port()
        self._http_port = free_port()

    @property
    def url(self) -> str:
        """Redis as the job and its trainers see it."""
        return f"redis://127.0.0.1:{self.proxy.port}/0"

    def start(self) -> None:
        manifest = {
            "apiVersion": "das.rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "chaos"},
            "spec": {
                "model": {"uri": str(self._model)},
                "source": {"trainer": {}},
                "engine": {
                    "maxModelLen": 512,
                    "dtype": "float32",
                    "maxNumSeqs": 16,
                    "kvCacheMemory": "256Mi",
                    "enforceEager": True,
                    "checkpointTokens": 32,
                },
                "sampling": {"n": SAMPLES, "maxTokens": TOKENS},
                "workers": {"gpusPerWorker": 0, "replicas": 2},
            },
        }
        file = self.directory / "job.yaml"
        file.write_text(yaml.safe_dump(manifest))
        self.audit.prepare()
        head = ["head", "-f", str(file), "--port", str(self._ray_port), "--http-port", str(self._http_port)]
        self.kubelet.start("head", self._rollout(*head))
        for number in range(2):
            self.start_worker(number)
        for rank in range(TRAINERS):
            trainer = [sys.executable, "-m", "tests.support.chaos_trainer", "--redis", self.url, "--uid", UID]
            trainer += ["--rank", str(rank), "--journal", str(self.journal(rank)), "--stop", str(self._stop)]
            self.kubelet.start(f"trainer-{rank}", trainer)

    def start_worker(self, number: int) -> None:
        self.kubelet.start(f"worker-{number}", self._rollout("worker", "-f", str(self.directory / "job.yaml")))

    def journal(self, rank: int) -> Path:
        return self.directory / f"journal-{rank}"

    def steps(self) -> int:
        return sum(len(self.journal(n).read_text().splitlines()) for n in range(TRAINERS) if self.journal(n).exists())

    def _rollout(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rollout_worker.cli", *arguments, "--redis", self.url, "--uid", UID]

    # what may happen

    def kill_process(self, title: str, rng: random.Random) -> None:
        """Wait until there is such a process, and kill it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if found := self.kubelet.processes(title):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rng.choice(sorted(found, key=lambda process: process.pid)).kill()
                    return
            time.sleep(0.1)
        raise AssertionError(f"there has been no {title} for {PATIENCE_S} s")

    def kill_engine(self, rng: random.Random) -> None:
        self.kill_process("ray::EngineActor", rng)

    def kill_coordinator(self, rng: random.Random) -> None:
        self.kill_process("ray::CoordinatorActor", rng)

    def kill_relay(self, rng: random.Random) -> None:
        self.kill_process("ray::RelayActor", rng)

    def kill_trainer(self, rng: random.Random) -> None:
        name = f"trainer-{rng.randrange(TRAINERS)}"
        self.trainers_killed[name] += 1
        self.kubelet.kill(name)

    def kill_redis(self, rng: random.Random) -> None:
        self.server.kill()
        time.sleep(rng.uniform(0.2, 3.0))
        self.server.start()

    def drop_connections(self, rng: random.Random) -> None:
        for _ in range(rng.randrange(1, 6)):
            self.proxy.drop()
            time.sleep(rng.uniform(0.05, 0.5))

    def delay_connections(self, rng: random.Random) -> None:
        self.proxy.hold(rng.uniform(0.1, 1.0))
        time.sleep(rng.uniform(1.0, 4.0))
        self.proxy.hold(0.0)

    def kill_worker(self, rng: random.Random) -> None:
        self.kubelet.kill(f"worker-{rng.randrange(2)}")

    def kill_head(self, _: random.Random) -> None:
        self.kubelet.kill("head")

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} within {seconds:.0f} s; {self.logs()}"
            self.observe()
            time.sleep(0.2)

    def observe(self) -> None:
        with contextlib.suppress(redis.RedisError, CodecError):
            self.flow.look()
            self.audit.read()

    def logs(self) -> str:
        tails = [f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self.directory.glob("*.log")]
        return "\n".join(tails)

    def end_of_requests(self) -> None:
        self._stop.touch()

    def close(self) -> None:
        self.kubelet.stop()
        self.proxy.close()
        self.server.kill()


@pytest.fixture
def battlefield(tmp_path: Path) -> Iterator[Field]:
    field_ = Field(tmp_path)
    yield field_
    field_.close()


@pytest.mark.timeout(1800)
def test_every_rollout_is_delivered_once_and_kept_once_whatever_is_killed(battlefield: Field) -> None:
    rng = random.Random(SEED)
    battlefield.start()
    battlefield.wait(lambda: battlefield.steps() >= TRAINERS, 240, "the first steps were not made")

    actions: list[Callable[[random.Random], None]] = [
        battlefield.kill_engine,
        battlefield.kill_coordinator,
        battlefield.kill_relay,
        battlefield.kill_trainer,
        battlefield.kill_redis,
        battlefield.drop_connections,
        battlefield.delay_connections,
        battlefield.kill_worker,
    ]
    ends = time.monotonic() + SECONDS
    done: list[tuple[float, str]] = []

    failures: list[Exception] = []

    def fire() -> None:
        try:
            shoot()
        except Exception as error:
            failures.append(error)

    def shoot() -> None:
        rng.shuffle(actions)
        chosen = list(actions)  # each at least once, if there is time
        while time.monotonic() < ends:
            action = chosen.pop() if chosen else rng.choice(actions)
            done.append((time.monotonic(), action.__name__))
            action(rng)
            time.sleep(rng.uniform(1.0, 12.0))

    shooter = threading.Thread(target=fire, daemon=True)
    shooter.start()
    while shooter.is_alive():
        battlefield.observe()
        time.sleep(0.2)
    if failures:
        raise failures[0]
    assert SECONDS < 200 or {action.__name__ for action in actions} == {name for _, name in done}

    # the head, by itself, so that it can be said how long it takes
    battlefield.wait(lambda: len(battlefield.server.client.hgetall(KEYS.engines)) == 2, 420, "no two engines are back")
    steps = battlefield.steps()
    battlefield.wait(lambda: battlefield.steps() > steps, 120, "no step was made after the fire")
    killed_at = time.monotonic()
    battlefield.kill_head(rng)
    old = set(battlefield.server.client.hgetall(KEYS.engines))

    def new_engines_sample() -> bool:
        new = set(battlefield.server.client.hgetall(KEYS.engines)) - old
        return len(new) == 2 and any(map(battlefield.flow.sampled, new))

    battlefield.wait(new_engines_sample, 420, "the engines did not join the new head")
    until_new = time.monotonic() - killed_at
    gap = battlefield.flow.longest_after(killed_at)
    steps = battlefield.steps()
    battlefield.wait(lambda: battlefield.steps() > steps + 1, 120, "no step was made under the new head")

    # a worker comes and another goes
    battlefield.start_worker(2)
    battlefield.wait(
        lambda: len(set(battlefield.server.client.hgetall(KEYS.engines)) - old) == 3, 420, "no third engine came"
    )
    battlefield.kubelet.remove("worker-0")
    steps = battlefield.steps()
    battlefield.wait(lambda: battlefield.steps() > steps + 3, 180, "no step was made without the worker that left")

    battlefield.end_of_requests()
    trainers = [f"trainer-{rank}" for rank in range(TRAINERS)]
    battlefield.wait(
        lambda: all(battlefield.kubelet.ended(name) == 0 for name in trainers), 180, "trainers did not end"
    )
    client = battlefield.server.client
    battlefield.wait(lambda: client.xlen(KEYS.requests) == client.xlen(KEYS.outbox) == 0, 60, "something is left over")
    battlefield.audit.read()

    asked: set[str] = set()
    received: Counter[str] = Counter()
    for rank in range(TRAINERS):
        for line in battlefield.journal(rank).read_text().splitlines():
            step = json.loads(line)
            assert GROUPS * SAMPLES == len(step["rollouts"]), f"step {step['step']} of rank {rank} is not whole"
            received.update(list(step["rollouts"]))
            asked |= set(step["rollouts"])
    in_history = ids_in(client, HISTORY)
    lost = len(battlefield.flow.engines) - len(client.hgetall(KEYS.engines))
    print(
        json.dumps(
            {
                "seed": SEED,
                "actions": dict(Counter(name for _, name in done)),
                "restarts": battlefield.kubelet.restarts,
                "rollouts": len(asked),
                "reasons": battlefield.audit.reasons,
                "tokens": battlefield.audit.tokens,
                "engines lost": lost,
                "seconds without a token after the head's death": round(gap, 1),
                "seconds until engines of the new head sample": round(until_new, 1),
            }
        )
    )
    assert {1} == set(received.values())
    # a trainer that was killed between its journal and its acknowledgement was delivered a step that it had
    assert asked <= set(battlefield.audit.delivered)
    assert {1} == set(battlefield.audit.delivered.values()), "a result was written twice"
    assert set(battlefield.audit.delivered) == asked
    assert {1} == set(in_history.values()), "a rollout is in the history twice"
    assert asked == set(in_history)
    assert {"stop", "length"} >= set(battlefield.audit.reasons)
    assert 0 == client.hlen(KEYS.partials)
    # it was a fire
    assert lost > 0
    assert battlefield.proxy.dropped > 0
    # and the clients waited wherever they were
    restarts = {name: battlefield.kubelet.restarts[name] for name in trainers}
    assert all(restarts[name] <= battlefield.trainers_killed[name] for name in trainers), (restarts, battlefield.logs())
