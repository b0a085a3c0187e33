"""A job with stub engines whose parts are struck by faults, on Redis servers that keep more or less of their data.

:func:`run_cell` makes training steps, injects one fault, and counts what a trainer and the history have received.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from rollout_api.ports import free_port
from rollout_api.protocol.history_encoding import rollout_key
from rollout_api.protocol.messages import RolloutId, digest_of
from rollout_api.redis_client.connection import connect
from rollout_head.services import EXIT_SUPERSEDED, Service
from rollout_store.history.records import START
from rollout_store.job.requests import LedgerEntry
from rollout_store.job.setup import JobSetup
from rollout_store.job.streams import CONFLICTS
from tests.support.chaos_trainer import GROUPS, SAMPLES, reward_of
from tests.support.manifests import rollout_job
from tests.support.process_supervisor import ProcessSupervisor
from tests.support.redis_servers import Sentinels, Server
from tests.support.stub_engines import VOCABULARY
from tests.support.tcp_proxy import Proxy
from tests.support.waiting import wait_for

UID = "path"
TOKENS = 16
"""Tokens of each rollout."""
GENERATION_S, UPDATE_S = 0.4, 0.05
"""Mean duration of a rollout, and duration of a policy update. A crash finds a step that has received some rollouts."""
TRAINERS = ("trainer-0", "trainer-1")
ENGINES = {"engines-0": ("engine-0", "engine-1"), "engines-1": ("engine-2", "engine-3")}
"""Processes of engines, and the engines of each."""
TIMEOUT_S = 180.0
"""Seconds after which a job that makes no progress is stuck. Nothing else depends on the speed of the machine."""
STOP_S = 3.0
"""Seconds for which a process is stopped, Redis is full, its disk is full, or traffic is delayed."""
STOP_ENGINES_S = 7.0
"""Seconds for which engines are stopped, which is longer than their leases."""
DOWN_S = 0.5
"""Seconds between the death of Redis and its next start."""
LOST_S = 1.0
"""Seconds before a crash whose writes are lost: from the end of a file, or because a replica lags behind."""
DELAY_S = 0.2
"""Delay of traffic in each direction."""
CLOCK_JUMP_S = 3 * 86400
"""Seconds by which a clock jumps."""


class Setting(StrEnum):
    """What Redis keeps when it dies."""

    ALWAYS = "file, synced always"
    """An append-only file: everything that was answered."""
    EVERYSEC = "file, synced each second"
    """An append-only file that may lack the last two seconds, although the death of a process rarely loses any."""
    END_LOST = "file, end lost"
    """An append-only file that lacks the last second, as after the crash of a machine."""
    REPLICA = "lagging replica"
    """A replica that has not received the last second takes over; nothing is on disk."""
    NONE = "no persistence"
    """Nothing."""


class Storage:
    """Redis as a job uses it, with the faults of the server and of the network.

    Args:
        setting: what it keeps.
        directory: directory of its data.
    """

    def __init__(self, setting: Setting, directory: Path) -> None:
        self.setting = setting
        self._stopped: Server | None = None
        self.proxy: Proxy | None = None
        """What connections go through, except those to a server that Sentinels name."""
        if setting is Setting.REPLICA:
            self._sentinels = Sentinels(directory)
            self.url = self._direct_url = self._sentinels.url
        else:
            fsync = "always" if setting is Setting.ALWAYS else "everysec"
            settings = {"appendfsync": fsync, "auto-aof-rewrite-percentage": "0"}
            self._server = Server(directory, appendonly=setting is not Setting.NONE, settings=settings)
            self.proxy = Proxy(self._server.port)
            self.url, self._direct_url = f"redis://127.0.0.1:{self.proxy.port}/0", self._server.url
        self.redis: Any = connect(self._direct_url)

    @property
    def server(self) -> Server:
        """The primary."""
        if self.setting is not Setting.REPLICA:
            return self._server
        port = self.redis.connection_pool.get_master_address()[1]
        return next(server for server in self._sentinels.servers if server.port == port)

    def run_id(self) -> str:
        """Return an id of the server's process, which changes with a restart and a failover."""
        return str(self.redis.info("server")["run_id"])

    def crash(self) -> None:
        """Kill the server, which loses what the setting says, and wait until it or its replica answers again."""
        if self.setting is Setting.REPLICA:
            replica = next(server for server in self._sentinels.servers if server is not self.server)
            replica.client().replicaof("127.0.0.1", free_port())  # it stays a replica, and receives nothing any more
            time.sleep(LOST_S)
            self._sentinels.fail_over()
            return
        if self.setting is Setting.END_LOST:
            size = self._append_only_file.stat().st_size
            time.sleep(LOST_S)
            self._server.kill()
            os.truncate(self._append_only_file, size)
        self._server.kill()
        time.sleep(DOWN_S)
        self._server.start()

    @property
    def _append_only_file(self) -> Path:
        """The file to which the server appends; it is never rewritten here."""
        [file] = self._server.directory.glob("appendonlydir/*.incr.aof")
        return file

    def stop(self) -> None:
        """Stop the server for some seconds. A replica takes over in the meantime, if there is one."""
        server = self._stopped = self.server
        server.pause()
        time.sleep(STOP_S)
        if self.setting is Setting.REPLICA:
            wait_for(lambda: self.server is not server, TIMEOUT_S, "The replica does not become the primary.")
        server.resume()

    def settle(self) -> None:
        """Wait until no writes are lost any more: a primary that was stopped does not know its successor at once."""
        if self._stopped is not None and self._stopped is not self.server:
            client = self._stopped.client()
            wait_for(lambda: client.role()[0] == "slave", TIMEOUT_S, "There are two primaries.")

    def fill(self) -> None:
        """Let the server have no memory for some seconds."""
        self.redis.config_set("maxmemory", 1)
        time.sleep(STOP_S)
        self.redis.config_set("maxmemory", 0)

    def fill_disk(self) -> None:
        """Let the append-only file not grow for some seconds. A server that ends for this reason starts afterwards."""
        process = self._server.process
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (self._append_only_file.stat().st_size, hard))
        time.sleep(STOP_S)
        if self.setting is Setting.ALWAYS:  # it cannot take back what it has executed, so it has ended
            wait_for(
                lambda: process.status() == psutil.STATUS_ZOMBIE, TIMEOUT_S, "Redis has not noticed its full disk."
            )
            self._server.restart()
        else:
            with contextlib.closing(self._server.client()) as client:
                assert client.info("persistence")["aof_last_write_status"] == "err", "the disk was not full"
            process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))

    def drop_connections(self) -> None:
        """Cut all connections, some times in a row; without Sentinels also in the middle of messages."""
        for _ in range(5):
            if self.proxy is None:
                self.redis.client_kill_filter(_type="normal", skipme=True)
            else:
                self.proxy.drop()
            time.sleep(0.2)

    def delay(self) -> None:
        """Delay all traffic for some seconds."""
        assert self.proxy is not None
        self.proxy.delay(DELAY_S)
        time.sleep(STOP_S)
        self.proxy.delay(0.0)

    def close(self) -> None:
        """Kill all servers."""
        self.redis.close()
        if self.setting is Setting.REPLICA:
            self._sentinels.close()
        else:
            assert self.proxy is not None
            self.proxy.close()
            self._server.close()


class FakeClocks:
    """Wall clocks that programs have in place of the system's; see ``clock_offset.c``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        for program in ("redis", "others"):
            (directory / program).write_bytes(struct.pack("q", 0))
        library = directory / "clock_offset.so"
        source = Path(__file__).with_name("clock_offset.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSETS": str(directory)}
        """Environment of programs with these clocks."""

    def jump(self, program: str, seconds: int) -> None:
        """Let a clock be ahead of the system's by *seconds*."""
        with (self._directory / program).open("r+b") as file:  # the file is mapped into memory, so it is not replaced
            file.write(struct.pack("q", seconds))


@dataclass
class Result:
    """What a cell of the matrix has measured."""

    fault: str = ""
    setting: str = ""
    rollouts: int = 0
    """Rollouts that trainers have received."""
    twice: int = 0
    """Rollouts that a trainer has received twice, or that are twice in the history."""
    lost: int = 0
    """Rollouts that Redis had kept, and that are not in the history in the end, or not with their reward."""
    wrong: int = 0
    """Rollouts that have a reward for other tokens in the history, mismatches that were not counted, and conflicts that
    were counted although Redis has lost nothing."""
    sampled_again: int = 0
    """How often a rollout was sampled that had been sampled before."""
    other_tokens: int = 0
    """Rollouts that a trainer has received before Redis lost them: the history has other tokens, without a reward."""
    gone: int = 0
    """Rollouts that a trainer has received before Redis lost them: the history does not have them."""
    conflicts: int = 0
    """Rewards for other tokens that the relay has counted and kept apart."""
    seconds: list[float] = field(default_factory=list)
    """For each time that the fault was injected, the seconds from its end to the end of the next step."""

    @property
    def median_s(self) -> float:
        """Median time to the next step."""
        return statistics.median(self.seconds)

    @property
    def max_s(self) -> float:
        """Longest time to the next step."""
        return max(self.seconds)


@dataclass(frozen=True)
class Step:
    """A step in a trainer's journal."""

    rollouts: list[tuple[str, str]]
    """Id and digest of each rollout."""
    opened: float
    reported: float
    """Before the trainer reported rewards."""
    finished: float


class MessagePathJob:
    """The processes of a job and of its trainers, and the faults that strike them."""

    def __init__(self, storage: Storage, directory: Path, clocks: FakeClocks | None = None) -> None:
        self.storage, self.clocks = storage, clocks
        self.supervisor = ProcessSupervisor(directory)
        self._directory = directory
        manifest = rollout_job(
            "path",
            model={"uri": "/model"},
            engine={"maxModelLen": 512, "maxNumSeqs": 16},
            sampling={"rolloutsPerPrompt": SAMPLES, "maxTokens": TOKENS},
            workers={"gpusPerWorker": 0},
            speculation={"policy": "off"},
        )
        self._setup = JobSetup(manifest, UID, storage.url, VOCABULARY, "path")
        self._keys = self._setup.keys
        self._samples = directory / "samples"
        self._stop_file = directory / "stop"

    def start(self) -> None:
        """Start all processes, and wait until every trainer has finished a step."""
        self._setup.open_history()
        setup = self._directory / "setup.json"
        setup.write_text(self._setup.to_json())
        for service in Service:
            self.supervisor.start(service, self._service(service))
        for process, names in ENGINES.items():
            command = [sys.executable, "-m", "tests.support.stub_engines", str(setup), *names]
            command += ["--seconds", str(GENERATION_S), "--samples", str(self._samples)]
            self.supervisor.start(process, command)
        for rank, name in enumerate(TRAINERS):
            command = [sys.executable, "-m", "tests.support.chaos_trainer", "--rank", str(rank)]
            command += ["--redis", self.storage.url, "--uid", UID, "--update", str(UPDATE_S)]
            command += ["--journal", str(self._journal(name)), "--stop", str(self._stop_file)]
            self.supervisor.start(name, command)
        self.wait_for_steps(time.monotonic())

    def _service(self, service: Service) -> list[str]:
        settings = self._directory / "setup.json"
        return ["sh", "-c", f'exec "$0" -m rollout_head.services {service} < "$1"', sys.executable, str(settings)]

    def _journal(self, trainer: str) -> Path:
        return self._directory / f"{trainer}.journal"

    def steps(self, trainer: str) -> list[Step]:
        """Return the steps of a trainer."""
        journal = self._journal(trainer)
        lines = journal.read_text().split("\n")[:-1] if journal.exists() else []  # the last one may be incomplete
        found = [json.loads(line) for line in lines]
        return [Step([*map(tuple, one["rollouts"])], one["opened"], one["reported"], one["finished"]) for one in found]

    def wait_for_steps(self, moment: float) -> None:
        """Wait until every trainer has finished a step that it has opened after *moment*."""
        for trainer in TRAINERS:
            wait_for(
                lambda trainer=trainer: (steps := self.steps(trainer)) and steps[-1].opened > moment,
                TIMEOUT_S,
                lambda trainer=trainer: f"{trainer} makes no step; {self.logs()}",
            )

    def logs(self) -> str:
        """Return the ends of all logs."""
        tails = [f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in self._directory.glob("*.log")]
        return "\n".join(tails)

    def stop_process(self, name: str, seconds: float = STOP_S) -> None:
        """Stop a process for some seconds."""
        self.supervisor.send_signal(name, signal.SIGSTOP)
        time.sleep(seconds)
        self.supervisor.send_signal(name, signal.SIGCONT)

    def run_two_coordinators(self) -> None:
        """Stop the coordinator, start another, and continue the first one.

        Each one that has been superseded must end: the first one, and when it is started again, the other.
        """
        restarts = self.supervisor.restarts[Service.COORDINATOR]
        number = self.storage.redis.get(self._keys.fencing_token)
        self.supervisor.send_signal(Service.COORDINATOR, signal.SIGSTOP)
        with (self._directory / "second-coordinator.log").open("ab") as log:
            second = subprocess.Popen(self._service(Service.COORDINATOR), stdout=log, stderr=log)
        try:
            wait_for(
                lambda: self.storage.redis.get(self._keys.fencing_token) != number,
                TIMEOUT_S,
                "The second coordinator does not take over.",
            )
            time.sleep(1.0)
            self.supervisor.send_signal(Service.COORDINATOR, signal.SIGCONT)
            wait_for(
                lambda: self.supervisor.restarts[Service.COORDINATOR] > restarts and second.poll() is not None,
                TIMEOUT_S,
                "A coordinator that was superseded has not ended.",
            )
            assert second.returncode == EXIT_SUPERSEDED
        finally:
            second.kill()
            second.wait()

    def jump_clock(self, program: str) -> None:
        """Let a clock jump forwards by days, and back after some seconds."""
        assert self.clocks is not None
        self.clocks.jump(program, CLOCK_JUMP_S)
        time.sleep(STOP_S)
        seconds, _ = self.storage.redis.time()
        other = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"], capture_output=True, text=True
        )
        is_ahead = [clock - time.time() > CLOCK_JUMP_S / 2 for clock in (seconds, float(other.stdout))]
        assert [program == "redis", program != "redis"] == is_ahead
        self.clocks.jump(program, 0)

    def finish(self) -> None:
        """Let the trainers end, and wait until the job has moved everything to the history."""
        self._stop_file.touch()
        wait_for(
            lambda: all(self.supervisor.ended(name) == 0 for name in TRAINERS),
            TIMEOUT_S,
            lambda: f"The trainers do not end; {self.logs()}",
        )
        streams = (self._keys.requests, self._keys.outbox, self._keys.rewards)
        wait_for(
            lambda: not any(self.storage.redis.xlen(stream) for stream in streams),
            TIMEOUT_S,
            lambda: f"Requests, rollouts or rewards remain; {self.logs()}",
        )

    def kept(self) -> dict[str, str]:
        """Return the digest of each rollout that Redis knows to be finished, by rollout id."""
        found: dict[str, str] = {}
        for key in self.storage.redis.scan_iter(self._keys.ledger("*"), count=1000):
            request_id = key.decode().removeprefix(self._keys.ledger(""))
            for sample, entry in self.storage.redis.hgetall(key).items():
                if sample.isdigit():
                    rollout_id = RolloutId(UID, request_id, int(sample))
                    found[str(rollout_id)] = LedgerEntry.unpack(entry).digest.hex()
        return found

    def num_conflicts(self) -> int:
        """Return how many conflicts the relay has counted."""
        return int(self.storage.redis.hget(self._keys.totals, CONFLICTS) or 0)

    def history(self) -> tuple[Counter[str], dict[str, str], dict[str, float]]:
        """Return how often the history has each rollout, its digest, and its reward if it has one."""
        store = self._setup.history_store()
        times: Counter[str] = Counter()
        digests: dict[str, str] = {}
        rewards: dict[str, float] = {}
        problems = [problem.problem_id for problem in store.catalog.problems()]
        slices = store.read(dict.fromkeys(problems, START), with_rewards=problems, count=1_000_000)
        for log_slice in slices.values():
            for record in log_slice.records:
                times[record.rollout_id] += 1
                digests[record.rollout_id] = digest_of(record.tokens.astype("<u4").tobytes())
                if (reward := (log_slice.rewards or {}).get(rollout_key(record.rollout_id))) is not None:
                    rewards[record.rollout_id] = reward
        return times, digests, rewards

    def num_sampled_again(self) -> int:
        """Return how often a rollout was sampled that had been sampled before."""
        samples = Counter(self._samples.read_text().split())
        return samples.total() - len(samples)

    def close(self) -> None:
        """Kill all processes."""
        self.supervisor.stop()


@dataclass(frozen=True)
class Fault:
    """A fault, and how it strikes a job."""

    name: str
    inject: Callable[[MessagePathJob], None]
    """Injects the fault, and returns when it ends."""
    settings: frozenset[Setting] = frozenset(Setting) - {Setting.END_LOST}
    trainer: str = ""
    """The trainer that is struck; empty for other parts."""

    @property
    def needs_clocks(self) -> bool:
        """Whether it changes a clock."""
        return "clock" in self.name


def _kill(name: str) -> Callable[[MessagePathJob], None]:
    return lambda job: job.supervisor.kill(name)


def _stop(name: str, seconds: float = STOP_S) -> Callable[[MessagePathJob], None]:
    return lambda job: job.stop_process(name, seconds)


_ON_DISK = frozenset({Setting.ALWAYS, Setting.EVERYSEC})
_WITH_PROXY = frozenset({Setting.ALWAYS, Setting.EVERYSEC, Setting.NONE})
FAULTS = (
    Fault("trainer killed", _kill(TRAINERS[0]), trainer=TRAINERS[0]),
    Fault("trainer stopped", _stop(TRAINERS[0]), trainer=TRAINERS[0]),
    Fault("engines killed", _kill("engines-0")),
    Fault("engines stopped", _stop("engines-0", STOP_ENGINES_S)),
    Fault("coordinator killed", _kill(Service.COORDINATOR)),
    Fault("coordinator stopped", _stop(Service.COORDINATOR)),
    Fault("two coordinators", MessagePathJob.run_two_coordinators),
    Fault("relay killed", _kill(Service.RELAY)),
    Fault("relay stopped", _stop(Service.RELAY)),
    Fault("Redis killed", lambda job: job.storage.crash(), frozenset(Setting)),
    Fault("Redis stopped", lambda job: job.storage.stop()),
    Fault("Redis out of memory", lambda job: job.storage.fill()),
    Fault("disk full", lambda job: job.storage.fill_disk(), _ON_DISK),
    Fault("clock of Redis jumps", lambda job: job.jump_clock("redis")),
    Fault("other clocks jump", lambda job: job.jump_clock("others")),
    Fault("connections dropped", lambda job: job.storage.drop_connections()),
    Fault("traffic delayed", lambda job: job.storage.delay(), _WITH_PROXY),
)
CELLS = [(fault, setting) for fault in FAULTS for setting in Setting if setting in fault.settings]
"""The matrix."""


@contextlib.contextmanager
def running_job(setting: Setting, directory: Path, *, with_clocks: bool) -> Iterator[MessagePathJob]:
    """Run a job on a Redis server of its own; *with_clocks*, its processes have clocks that can jump."""
    with contextlib.ExitStack() as stack:
        clocks = FakeClocks(directory / "clocks") if with_clocks else None
        stack.enter_context(patch.dict(os.environ, {} if clocks is None else clocks.environment))
        storage = Storage(setting, directory / "redis")
        stack.callback(storage.close)
        job = MessagePathJob(storage, directory, clocks)
        stack.callback(job.close)
        job.start()
        yield job


def run_cell(fault: Fault, setting: Setting, directory: Path, *, times: int = 2, seed: int = 1) -> Result:
    """Inject a fault *times* times into a job, and return what was measured.

    Raises:
        AssertionError: a step is incomplete, or a trainer has failed instead of waiting.
        TimeoutError: the job makes no more steps.
    """
    rng = random.Random(f"{fault.name} {setting} {seed}")
    with running_job(setting, directory, with_clocks=fault.needs_clocks) as job:
        first_server, ends = job.storage.run_id(), []
        for _ in range(times):
            time.sleep(rng.uniform(0.2, 1.0))
            fault.inject(job)
            ends.append(time.monotonic())
            job.storage.settle()
            settled_at = time.monotonic()
            kept, last_server = job.kept(), job.storage.run_id()
            job.wait_for_steps(settled_at)
        job.wait_for_steps(time.monotonic())
        job.finish()
        if job.storage.run_id() != last_server:  # Sentinels have replaced a primary that was slow
            kept, settled_at = {}, time.monotonic()
        loses = job.storage.run_id() != first_server and setting is not Setting.ALWAYS
        result = _audit(job, kept | job.kept(), settled_at if loses else None)
        steps = [step for name in TRAINERS if fault.trainer in ("", name) for step in job.steps(name)]
        result.seconds = [min(step.finished for step in steps if step.finished > end) - end for end in ends]
        may_end = {fault.trainer: times} if "killed" in fault.name else {}
        if setting is not Setting.NONE:  # otherwise, a trainer may find that its job is gone
            restarts = job.supervisor.restarts
            has_failed = any(restarts[name] > may_end.get(name, 0) for name in TRAINERS)
            assert not has_failed, f"a trainer has failed; {job.logs()}"
    result.fault, result.setting = fault.name, setting
    return result


def _audit(job: MessagePathJob, kept: dict[str, str], lost_until: float | None) -> Result:
    """Compare what trainers have received with the history.

    Args:
        job: a job that has finished.
        kept: digests of the rollouts that Redis has kept, by rollout id.
        lost_until: time until which Redis has lost writes; None if it has lost none.
    """
    certain_after = lost_until or 0.0
    steps = [step for trainer in TRAINERS for step in job.steps(trainer)]
    assert all(len(step.rollouts) == GROUPS * SAMPLES for step in steps), "a step is incomplete"
    received = Counter(rollout_id for step in steps for rollout_id, _ in step.rollouts)
    times, digests, rewards = job.history()
    is_lost = {rollout_id for rollout_id, digest in kept.items() if digests.get(rollout_id) != digest}
    mismatches = num_rewarded = 0
    for step in steps:
        for rollout_id, digest in step.rollouts:
            found = digests.get(rollout_id)
            if step.opened > certain_after and (found != digest or rollout_id not in rewards):
                is_lost.add(rollout_id)
            if found is not None and found != digest:
                mismatches += 1
                num_rewarded += step.reported > certain_after
    wrong = sum(reward != reward_of(digests[rollout_id]) for rollout_id, reward in rewards.items())
    return Result(
        rollouts=len(received),
        twice=sum(number > 1 for found in (received, times) for number in found.values()),
        lost=len(is_lost),
        wrong=wrong + (job.num_conflicts() if lost_until is None else max(0, num_rewarded - job.num_conflicts())),
        sampled_again=job.num_sampled_again(),
        other_tokens=mismatches,
        gone=len(received.keys() - digests),
        conflicts=job.num_conflicts(),
    )


def as_table(results: Sequence[Result]) -> str:
    """Return results as the rows of a Markdown table."""
    counts = ("rollouts", "twice", "lost", "wrong", "sampled_again", "other_tokens", "gone", "conflicts")
    titles = (name.replace("_", " ").capitalize() for name in counts)
    lines = [("Fault", "Redis", *titles, "Next step, median", "max"), ("---",) * (len(counts) + 4)]
    for one in results:
        numbers = (f"{getattr(one, name):,}" for name in counts)
        lines.append((one.fault, one.setting, *numbers, f"{one.median_s:.2f} s", f"{one.max_s:.2f} s"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
