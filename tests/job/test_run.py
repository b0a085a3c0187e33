"""``rollout run`` as a person runs it: real vLLM, real Redis, and everything that may go wrong with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_worker.embedded_redis import EmbeddedRedis
from rollout_worker.job.ledger import LedgerEntry, read_ledger
from tests.support.history_contents import ids_in
from tests.support.random_policies import TASKS, make_policies

SAMPLES = 8
PROBLEMS = sum(task["problems"] for task in TASKS)
BATCH = 16


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_policies(directory, versions=3)
    return directory


@dataclass
class Ended:
    code: int
    output: str
    seconds: float


class Bench:
    """A manifest, its state directory and a Redis server, and the command run on them."""

    def __init__(self, directory: Path, cache: Path, epochs: int) -> None:
        self.report = directory / "report.json"
        self.samples = SAMPLES
        self._directory, self._cache = directory, cache
        self._lock = os.open(directory / "redis-lock", os.O_CREAT | os.O_RDWR)
        self.server = EmbeddedRedis(directory / "redis", keep_open=self._lock)
        self.url = ""
        self.manifest: dict[str, Any] = {
            "apiVersion": "das.rollout.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "story"},
            "spec": {
                "model": {"uri": "policy/0"},
                "source": {
                    "dataset": {
                        "tasks": TASKS,
                        "epochs": epochs,
                        "checkpoints": [f"policy/{epoch}" for epoch in range(epochs)],
                    }
                },
                "engine": {
                    "maxModelLen": 512,
                    "dtype": "float32",
                    "maxNumSeqs": BATCH,
                    "kvCacheMemory": "256Mi",
                    "enforceEager": True,
                },
                "sampling": {"n": self.samples, "maxTokens": 160},
                "workers": {"gpusPerWorker": 0},
            },
        }

    def start(self, *options: str) -> subprocess.Popen[str]:
        file = self._directory / "job.yaml"
        file.write_text(yaml.safe_dump(self.manifest))
        command = [sys.executable, "-m", "rollout_worker.cli", "run", "-f", str(file)]
        command += ["--state-dir", str(self._directory / "state"), "--model-cache", str(self._cache)]
        command += ["--json", str(self.report), *options, *(["--redis", self.url] if self.url else [])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *options: str) -> Ended:
        started = time.monotonic()
        return self.end(self.start(*options), started)

    def seconds_until(self, process: subprocess.Popen[str], text: str) -> float:
        """How long it takes until the command says *text*."""
        started = time.monotonic()
        assert process.stdout is not None
        for line in process.stdout:
            if text in line:
                return time.monotonic() - started
        pytest.fail(f"it ended without saying {text!r}")

    def end(self, process: subprocess.Popen[str], since: float) -> Ended:
        output, _ = process.communicate(timeout=300)
        return Ended(process.returncode, output, time.monotonic() - since)

    def use_own_server(self) -> None:
        """From now on the command starts a server of its own."""
        self.server.stop()
        self.url = ""

    def open_own_server(self) -> None:
        """Look at what that server kept."""
        self.server = EmbeddedRedis(self._directory / "state" / "default" / "story" / "redis", keep_open=self._lock)
        self.url = self.server.start()

    def restart_server(self) -> None:
        self.server.stop()
        self.url = self.server.start()

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    @property
    def uid(self) -> str:
        state = self._directory / "state" / "default" / "story" / "job.json"
        return str(json.loads(state.read_text())["uid"]) if state.exists() else ""

    def ledger(self) -> dict[str, LedgerEntry]:
        """What the job's own rollouts left, those made for comparison apart."""
        keys = MessageKeys(self.uid)
        prefix = keys.ledger("")
        names = [
            key.decode().removeprefix(prefix) for key in self.client.scan_iter(keys.ledger("dataset:*"), count=1000)
        ]
        return {
            f"{self.uid}/{name}/{sample}/0": entry
            for name, samples in read_ledger(self.client, keys, names).items()
            for sample, entry in samples.items()
        }

    def in_history(self) -> Counter[str]:
        return ids_in(self.client, HistoryKeys("default", "story"))

    def expected(self, epochs: int) -> int:
        return epochs * PROBLEMS * self.samples

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        self.server.stop()
        os.close(self._lock)


@pytest.fixture
def bench(tmp_path: Path, cache: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, cache, epochs=2)
    made.url = made.server.start()
    yield made
    made.close()


def accepted_per_step(entries: list[Any]) -> float:
    return sum(entry["accepted"] for entry in entries) / sum(entry["steps"] for entry in entries)


def of_epoch(ledger: dict[str, LedgerEntry], epoch: int) -> dict[str, LedgerEntry]:
    return {name: entry for name, entry in ledger.items() if f"/dataset:{epoch}:" in name}


def test_later_epochs_draft_from_earlier_ones_and_it_pays(bench: Bench) -> None:
    # Greedily, and one sample of each problem: the first epoch has nothing but its own text to draft from, and with so
    # few rollouts at once drafting pays on every engine. With 64 at once it hardly does on this one: the governor
    # stops it in one epoch or the other.
    bench.samples = 1
    bench.manifest["spec"]["sampling"] |= {"n": bench.samples, "temperature": 0}
    bench.use_own_server()
    ended = bench.run("--compare")
    bench.open_own_server()
    assert ended.code == 0, ended.output
    report = json.loads(bench.report.read_text())
    passes = {(made["epoch"], made["mode"]): made for made in report["passes"]}
    assert {(epoch, mode) for epoch in (1, 2) for mode in ("das", "self", "plain")} == set(passes)
    assert all(len(made["rollouts"]) == PROBLEMS for made in report["passes"])

    second = passes[2, "das"]["accepted_per_step"]
    assert second >= 1.2 * passes[1, "das"]["accepted_per_step"]
    assert second >= 1.2 * passes[2, "self"]["accepted_per_step"]
    assert passes[2, "plain"]["accepted_per_step"] == passes[2, "plain"]["drafted_per_step"] == 0
    assert all(row["op"] in (">=", "<=") for row in report["figures"])

    # what was made for comparison leaves no trace
    assert bench.expected(2) == len(bench.ledger())
    assert set(bench.ledger()) == set(bench.in_history())
    assert {1} == set(bench.in_history().values())
    for column in ("makespan", "accepted", "plain vLLM", "own text"):
        assert column in ended.output


def engine_processes(of: int) -> set[int]:
    """Every process below *of*."""
    found: set[int] = set()
    for children in Path(f"/proc/{of}/task").glob("*/children"):  # a child belongs to the thread that made it
        for child in children.read_text().split():
            found |= {int(child)} | engine_processes(int(child))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_killed_in_the_middle_of_an_epoch_the_next_run_goes_on_with_its_history(bench: Bench) -> None:
    # Greedily and with the same weights, so that a problem's rollouts say the same in each epoch: other problems are
    # drafted for ten times as well. Long enough that one step more or less is no tenth of them.
    bench.manifest["spec"]["sampling"] |= {"temperature": 0, "minTokens": 320, "maxTokens": 400}
    bench.manifest["spec"]["source"]["dataset"] |= {"epochs": 3, "checkpoints": ["policy/0"] * 3}
    process = bench.start("--no-compare")
    half = bench.expected(2) + PROBLEMS * SAMPLES // 2
    bench.wait_for(lambda: bool(bench.uid) and len(bench.ledger()) >= half, process)
    below = engine_processes(process.pid)
    assert len(below) >= 5  # Ray's processes, the actors and the engine's own
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Ray's and the engine's processes notice by themselves, and may still end what was about to
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in below):
        assert time.monotonic() < deadline, "the engine outlived the run that was killed"
        time.sleep(0.1)
    done = bench.ledger()
    assert half <= len(done) < bench.expected(3)
    keys = HistoryKeys("default", "story")
    # in the history of a problem that is not done with: no other is read again
    ended_of = Counter(entry.problem_id for entry in of_epoch(done, 3).values())
    problems = {entry.problem_id for entry in done.values()}
    log = keys.log(next(problem for problem in sorted(problems) if ended_of[problem] < SAMPLES))
    bench.client.xadd(log, {"i": "x", "g": 1, "d": b"\x00\x01\x02"})

    ended = bench.run("--no-compare")
    assert ended.code == 0, ended.output
    assert f"{len(done)} rollouts are done" in ended.output

    # none lost, none twice, none made anew
    ledger = bench.ledger()
    assert bench.expected(3) == len(ledger)
    assert done == {name: ledger[name] for name in done}
    assert set(ledger) == set(bench.in_history())
    assert {1} == set(bench.in_history().values())

    # the record that nobody can read was skipped, counted and reported
    report = json.loads(bench.report.read_text())
    assert report["corrupt_records"] == 1
    assert "1 history records could not be read" in ended.output

    # what the new process drafts from, and what it knows of that, was there before its first batch
    (third,) = [made for made in report["passes"] if made["epoch"] == 3]
    made_now = sorted((row for row in third["rollouts"] if row["finished"] is not None), key=lambda r: r["finished"])
    first = made_now[:BATCH]
    problems = {row["problem_id"] for row in first}
    before = [vars(entry) for entry in of_epoch(done, 2).values() if entry.problem_id in problems]
    assert accepted_per_step(first) >= 0.9 * accepted_per_step(before)


def test_redis_full_or_gone_ends_the_run_at_once_and_nothing_is_lost(bench: Bench) -> None:
    # full
    process = bench.start("--no-compare")
    bench.wait_for(lambda: bool(bench.uid) and len(bench.ledger()) >= 5, process)
    bench.client.config_set("maxmemory", 1)
    assert bench.seconds_until(process, "out of memory") < 10
    ended = bench.end(process, time.monotonic())
    assert ended.code == 3, ended.output
    assert "raise maxmemory" in ended.output
    bench.client.config_set("maxmemory", 0)
    done = bench.ledger()
    assert len(done) >= 5

    # gone
    process = bench.start("--no-compare")
    bench.wait_for(lambda: len(bench.ledger()) > len(done) + 5, process)
    done = bench.ledger()
    os.kill(int(bench.client.info()["process_id"]), signal.SIGKILL)
    assert bench.seconds_until(process, "cannot be reached") < 10
    ended = bench.end(process, time.monotonic())
    assert ended.code == 3, ended.output
    bench.restart_server()
    ledger = bench.ledger()
    assert done == {name: ledger[name] for name in done}

    # back
    ended = bench.run("--no-compare")
    assert ended.code == 0, ended.output
    assert bench.expected(2) == len(bench.ledger())
    assert set(bench.ledger()) == set(bench.in_history())
    assert {1} == set(bench.in_history().values())


def test_stopped_by_a_signal_by_its_deadline_or_by_a_run_beside_it_it_says_so_and_loses_nothing(bench: Bench) -> None:
    process = bench.start("--no-compare")
    bench.wait_for(lambda: bool(bench.uid), process)
    beside = bench.run("--no-compare")
    assert beside.code == 5, beside.output
    assert "another run of this job holds" in beside.output

    bench.wait_for(lambda: len(bench.ledger()) >= 5, process)
    process.send_signal(signal.SIGTERM)
    ended = bench.end(process, time.monotonic())
    assert ended.code == 130, ended.output
    assert "goes on from there" in ended.output
    done = bench.ledger()

    bench.manifest["spec"]["lifecycle"] = {"activeDeadlineSeconds": 1}
    ended = bench.run("--no-compare")
    assert ended.code == 6, ended.output
    assert "spec.lifecycle.activeDeadlineSeconds" in ended.output
    later = bench.ledger()
    assert done == {name: later[name] for name in done}
    assert len(done) <= len(later) < bench.expected(2)


def test_no_redis_and_a_wrong_password_are_said_within_ten_seconds(bench: Bench) -> None:
    url = bench.url
    bench.url = url.replace("redis://:", "redis://:wrong")
    ended = bench.run("--no-compare")
    assert (ended.code, ended.seconds < 10) == (3, True), ended.output
    assert "refused the user name or password" in ended.output
    bench.server.stop()
    bench.url = url
    ended = bench.run("--no-compare")
    assert (ended.code, ended.seconds < 10) == (3, True), ended.output
    assert "cannot be reached" in ended.output
    assert url.split("@")[0].split(":")[-1] not in ended.output  # the password


def test_a_wrong_manifest_lists_every_error_by_path_and_exits_2(bench: Bench) -> None:
    bench.manifest["spec"] |= {"typo": 1, "model": {}}
    bench.manifest["spec"]["sampling"] = {"topP": 7, "minP": 0.1}
    ended = bench.run()
    assert ended.code == 2
    for path in ("spec.typo", "spec.model.uri", "spec.sampling.topP"):
        assert path in ended.output


def test_a_redis_named_by_a_secret_must_be_given_since_no_secret_can_be_read(bench: Bench) -> None:
    bench.use_own_server()
    bench.manifest["spec"]["redis"] = {"urlFrom": {"secretKeyRef": {"name": "rollout-redis", "key": "url"}}}
    ended = bench.run("--no-compare")
    assert ended.code == 2, ended.output
    assert "spec.redis.urlFrom" in ended.output
    assert "--redis" in ended.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"uri": "policy/none"}}, "neither a directory in the model cache"),
        ({"model": {"uri": "/nowhere"}}, "there is no directory /nowhere"),
        ({"model": {"uri": "../policy/0"}}, "leads out of the model cache"),
        ({"sampling": {"maxTokens": 500}}, "spec.sampling.maxTokens"),
        ({"sampling": {"maxTokens": 10, "allowedTokenIds": [10000000]}}, "spec.sampling.allowedTokenIds"),
        ({"workers": {"gpusPerWorker": 0, "resources": {"cpu": "9000"}}}, "spec.workers.resources.cpu"),
        ({"lifecycle": {"suspend": True}}, "spec.lifecycle.suspend"),
        ({"source": {"dataset": {"tasks": [{"name": "a", "generator": "chainsum"}]}}}, "did you mean chain_sum"),
        (
            {"source": {"dataset": {"tasks": [{"name": "a", "generator": "chain_sum", "config": {"terms": 1}}]}}},
            "spec.source.dataset.tasks[0].config",
        ),
    ],
)
def test_what_only_this_machine_can_know_is_refused_before_anything_is_started(
    bench: Bench, change: dict[str, Any], says: str
) -> None:
    bench.manifest["spec"] |= change
    ended = bench.run("--no-compare")
    assert ended.code == (7 if "model" in change else 2), ended.output
    assert says in ended.output.replace("\n", " ")
