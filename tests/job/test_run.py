"""``rollout run`` with real engines and Redis: drafts from earlier epochs, interruptions and continuation."""

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
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from typer.testing import CliRunner

from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.protocol.status import EXIT_DEADLINE, EXIT_INTERRUPTED, EXIT_REDIS, EXIT_STATE, CoordinatorStatus
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.requests import LedgerEntry
from rollout_store.runtime.embedded_redis import EmbeddedRedis
from rollout_tools.cli.main import app
from rollout_tools.report.recording import load_recording
from tests.support.acceptance import FIRST_REFERENCE_STEPS, accepted_per_step
from tests.support.browser import chromium, drawn_marks
from tests.support.history_contents import rollout_ids_in
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.random_policies import TASKS, make_policies
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.serial]

SAMPLES = 8
PROBLEMS = sum(task["problems"] for task in TASKS)
BATCH = 16


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_policies(directory, versions=3)
    return directory


@dataclass
class Result:
    code: int
    output: str


class CommandHarness:
    """Runs the command with a manifest, a state directory and a Redis server."""

    def __init__(self, directory: Path, cache: Path, epochs: int) -> None:
        self.report = directory / "report.json"
        self.samples = SAMPLES
        self._directory, self._cache = directory, cache
        self._lock = os.open(directory / "redis-lock", os.O_CREAT | os.O_RDWR)
        self.server = EmbeddedRedis(directory / "redis", keep_open=self._lock)
        self.url = ""
        self.manifest: dict[str, Any] = {
            "apiVersion": "das.rollout.dev/v1beta1",
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
                "engine": {**SMALL_CPU_ENGINE, "maxNumSeqs": BATCH},
                "sampling": {"rolloutsPerPrompt": self.samples, "maxTokens": 160},
                "workers": {"gpusPerWorker": 0},
            },
        }

    def start(self, *options: str) -> subprocess.Popen[str]:
        file = self._directory / "job.yaml"
        file.write_text(yaml.safe_dump(self.manifest))
        command = [sys.executable, "-m", "rollout_tools.cli", "run", "-f", str(file)]
        command += ["--state-dir", str(self._directory / "state"), "--model-cache", str(self._cache)]
        command += ["--json", str(self.report), *options, *(["--redis", self.url] if self.url else [])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *options: str) -> Result:
        return self.end(self.start(*options))

    def call(self, command: str, *options: str) -> Result:
        """Run another command for the only job of the state directory."""
        line = [sys.executable, "-m", "rollout_tools.cli", command, *options]
        done = subprocess.run([*line, "--state-dir", str(self._directory / "state")], capture_output=True, text=True)
        return Result(done.returncode, done.stdout + done.stderr)

    def seconds_until(self, process: subprocess.Popen[str], text: str) -> float:
        """Return the seconds until the command prints *text*."""
        started = time.monotonic()
        assert process.stdout is not None
        for line in process.stdout:
            if text in line:
                return time.monotonic() - started
        pytest.fail(f"the command ended without printing {text!r}")

    def end(self, process: subprocess.Popen[str]) -> Result:
        output, _ = process.communicate(timeout=300)
        return Result(process.returncode, output)

    def use_embedded_server(self) -> None:
        """Let the command start an embedded server from now on."""
        self.server.stop()
        self.url = ""

    def open_embedded_server(self) -> None:
        """Open the data of the embedded server."""
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

    def status(self) -> CoordinatorStatus:
        """The coordinator's status, while it runs."""
        published: Any = self.client.get(MessageKeys(self.uid).status)
        status: CoordinatorStatus = json.loads(published)
        return status

    def ledger(self) -> dict[str, LedgerEntry]:
        """Ledger entries of the job's own rollouts, without those of baselines."""
        keys = MessageKeys(self.uid)
        prefix = keys.ledger("")
        names = [
            key.decode().removeprefix(prefix) for key in self.client.scan_iter(keys.ledger("dataset:*"), count=1000)
        ]
        return {
            f"{self.uid}/{name}/{sample}/0": entry
            for name, samples in LauncherStore(self.client, keys).read_ledger(names).items()
            for sample, entry in samples.items()
        }

    def in_history(self) -> Counter[str]:
        return rollout_ids_in(self.client, HistoryKeys("default", "story"))

    def expected(self, epochs: int) -> int:
        return epochs * PROBLEMS * self.samples

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        def is_met() -> bool:
            met = condition()
            assert met or process.poll() is None, process.communicate()[0]
            return met

        wait_for(is_met, 240)

    def close(self) -> None:
        self.server.stop()
        os.close(self._lock)


@pytest.fixture
def harness(tmp_path: Path, cache: Path) -> Iterator[CommandHarness]:
    harness = CommandHarness(tmp_path, cache, epochs=2)
    harness.url = harness.server.start()
    yield harness
    harness.close()


def of_epoch(ledger: dict[str, LedgerEntry], epoch: int) -> dict[str, LedgerEntry]:
    return {name: entry for name, entry in ledger.items() if f"/dataset:{epoch}:" in name}


@dataclass
class ComparedRun:
    """A run with baselines that has ended, and the Redis server with its data."""

    harness: CommandHarness
    result: Result
    page: Path


@pytest.fixture(scope="module")
def compared_run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[ComparedRun]:
    # Sampling is greedy, with one sample per problem: the first epoch can draft only from its own text, and drafting
    # pays for so few concurrent rollouts. With 64 of them it hardly pays on this engine, and the governor would disable
    # it in some epoch.
    directory = tmp_path_factory.mktemp("compared")
    harness = CommandHarness(directory, cache, epochs=2)
    harness.samples = 1
    harness.manifest["spec"]["sampling"] |= {"rolloutsPerPrompt": harness.samples, "temperature": 0}
    page = directory / "page.html"
    result = harness.run("--compare", "--report", str(page))
    harness.open_embedded_server()
    yield ComparedRun(harness, result, page)
    harness.close()


def test_later_epochs_profit_from_drafts_of_earlier_ones(compared_run: ComparedRun) -> None:
    harness, result = compared_run.harness, compared_run.result
    assert result.code == 0, result.output
    report = json.loads(harness.report.read_text())
    runs = {(run["epoch"], run["mode"]): run for run in report["epoch_runs"]}
    assert {(epoch, mode) for epoch in (1, 2) for mode in ("das", "non-speculative")} == set(runs)
    assert all(len(run["rollouts"]) == PROBLEMS for run in report["epoch_runs"])

    second = runs[2, "das"]["accepted_per_step"]
    assert second >= 1.2 * runs[1, "das"]["accepted_per_step"]
    assert runs[2, "non-speculative"]["accepted_per_step"] == runs[2, "non-speculative"]["drafted_per_step"] == 0
    assert all(row["op"] in (">=", "<=") for row in report["figures"])

    # Baselines leave no rollouts in the ledger or the history.
    assert harness.expected(2) == len(harness.ledger())
    assert set(harness.ledger()) == set(harness.in_history())
    assert {1} == set(harness.in_history().values())
    for column in ("makespan", "accepted", "plain vLLM", "speed"):
        assert column in result.output


def test_the_page_about_a_run_shows_every_plot(compared_run: ComparedRun) -> None:
    with chromium() as browser:
        page = browser.open(compared_run.page)
        marks = drawn_marks(page)
        assert {"makespans", "running", "gantt", "accepted-by-source", "acceptance-by-position"} <= set(marks)
        assert [] == [name for name, count in marks.items() if not count]
        assert [] == browser.messages
        assert page.locator("#columns .rollout pre span").count()  # draft tokens are marked
        assert page.text_content("#prompt pre")
        assert "measured" in page.inner_text("#summary")


def test_a_report_can_be_made_after_the_end_of_a_run(compared_run: ComparedRun, tmp_path: Path) -> None:
    state = compared_run.page.parent / "state"
    recording = load_recording(state / "default" / "story" / "recording.json.gz")
    assert 2 * 2 * PROBLEMS == len(recording.ended)
    assert all(rollout.engine for rollout in recording.ended)
    result = CliRunner().invoke(app, ["report", "--state-dir", str(state), "--html", str(tmp_path / "page.html")])
    assert 0 == result.exit_code, result.output
    assert "default/story" in (tmp_path / "page.html").read_text()


def descendants(of: int) -> set[int]:
    """Return all descendants of process *of*."""
    found: set[int] = set()
    # The kernel lists children by the thread that created them.
    for children in Path(f"/proc/{of}/task").glob("*/children"):
        for child in children.read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
def test_a_run_that_is_killed_during_an_epoch_is_continued_with_its_history(harness: CommandHarness) -> None:
    # Sampling is greedy with the same weights, so that a problem's rollouts are the same in each epoch and drafts are
    # accepted often. The rollouts are so long that one step more or less is less than a tenth of them.
    harness.manifest["spec"]["sampling"] |= {"temperature": 0, "minTokens": 320, "maxTokens": 400}
    harness.manifest["spec"]["source"]["dataset"] |= {"epochs": 3, "checkpoints": ["policy/0"] * 3}
    process = harness.start("--no-compare")
    half = harness.expected(2) + PROBLEMS * SAMPLES // 2
    harness.wait_for(lambda: bool(harness.uid) and len(harness.ledger()) >= half, process)
    processes = descendants(process.pid)
    assert len(processes) >= 5  # Ray's processes, the actors and the engine
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Ray's and the engine's processes end by themselves, and may finish some rollouts before they do.
    wait_for(lambda: not any(map(alive, processes)), 30, "The engine outlives the run that was killed.")
    done = harness.ledger()
    assert half <= len(done) < harness.expected(3)
    keys = HistoryKeys("default", "story")
    # The history of an unfinished problem is corrupted, because only those are read again.
    ended_of = Counter(entry.problem_id for entry in of_epoch(done, 3).values())
    problems = {entry.problem_id for entry in done.values()}
    log = keys.log(next(problem for problem in sorted(problems) if ended_of[problem] < SAMPLES))
    harness.client.xadd(log, {"i": "x", "g": 1, "d": b"\x00\x01\x02"})

    result = harness.run("--no-compare")
    assert result.code == 0, result.output
    assert f"{len(done)} rollouts are finished" in result.output
    assert b"closed" == harness.client.hget(MessageKeys(harness.uid).job, "state")

    # No rollout is lost, duplicated or sampled again.
    ledger = harness.ledger()
    assert harness.expected(3) == len(ledger)
    assert done == {name: ledger[name] for name in done}
    assert set(ledger) == set(harness.in_history())
    assert {1} == set(harness.in_history().values())

    # The corrupt record was skipped, counted and reported.
    report = json.loads(harness.report.read_text())
    assert report["corrupt_records"] == 1
    assert "1 history records could not be read" in result.output

    # The new process had loaded the history and its calibration before its first batch.
    (third,) = [run for run in report["epoch_runs"] if run["epoch"] == 3]
    new_rows = sorted((row for row in third["rollouts"] if row["finished"] is not None), key=lambda r: r["finished"])
    new = [SimpleNamespace(**row) for row in new_rows]
    # Rollouts that the killed process had begun are too short: their first and last steps are a large part of them.
    first = [each for each in new if each.num_decoding_steps + each.num_accepted_tokens == each.length][:BATCH]
    assert first
    problems = {row.problem_id for row in first}
    before = [entry for entry in of_epoch(done, 2).values() if entry.problem_id in problems]
    assert accepted_per_step(first, FIRST_REFERENCE_STEPS) >= 0.9 * accepted_per_step(before)


@pytest.mark.nightly
def test_every_interruption_is_reported_and_loses_no_finished_rollout(harness: CommandHarness) -> None:
    def assert_kept(done: dict[str, LedgerEntry]) -> None:
        ledger = harness.ledger()
        assert done == {name: ledger[name] for name in done}

    # There must be something left to do after each interruption.
    harness.samples = harness.manifest["spec"]["sampling"]["rolloutsPerPrompt"] = 2 * SAMPLES

    # A second run of the same job is rejected; then Redis is full for a while.
    process = harness.start("--no-compare")
    harness.wait_for(lambda: bool(harness.uid), process)
    concurrent = harness.run("--no-compare")
    assert EXIT_STATE == concurrent.code, concurrent.output
    assert "another run of this job holds" in concurrent.output
    harness.wait_for(lambda: len(harness.ledger()) >= 5, process)
    # The coordinator publishes the job's status a moment after the rollouts.
    harness.wait_for(lambda: any(engine["tokens_per_second"] > 0 for engine in harness.status()["engines"]), process)
    shown = harness.call("status")
    assert 0 == shown.code, shown.output
    assert f"Job default/story (uid {harness.uid}) is running" in shown.output
    assert "served by 1 of 1 engines" in shown.output
    harness.client.config_set("maxmemory", 1)
    assert harness.seconds_until(process, "The job waits: ") < 10
    harness.client.config_set("maxmemory", 0)
    harness.seconds_until(process, "the job continues")
    done = harness.ledger()

    # Redis is gone.
    harness.wait_for(lambda: len(harness.ledger()) > len(done) + 5, process)
    done = harness.ledger()
    os.kill(int(harness.client.info()["process_id"]), signal.SIGKILL)
    assert harness.seconds_until(process, "cannot be reached") < 10
    result = harness.end(process)
    assert EXIT_REDIS == result.code, result.output
    harness.restart_server()
    assert_kept(done)

    # The run is terminated.
    process = harness.start("--no-compare")
    harness.wait_for(lambda: len(harness.ledger()) > len(done) + 5, process)
    process.send_signal(signal.SIGTERM)
    result = harness.end(process)
    assert EXIT_INTERRUPTED == result.code, result.output
    assert "the same command continues from there" in result.output
    assert_kept(done)
    done = harness.ledger()

    # The deadline is exceeded.
    harness.manifest["spec"]["lifecycle"] = {"activeDeadlineSeconds": 1}
    result = harness.run("--no-compare")
    assert EXIT_DEADLINE == result.code, result.output
    assert "spec.lifecycle.activeDeadlineSeconds" in result.output
    assert_kept(done)
    assert len(harness.ledger()) < harness.expected(2)
    done = harness.ledger()

    # The same command completes the job.
    del harness.manifest["spec"]["lifecycle"]
    result = harness.run("--no-compare")
    assert result.code == 0, result.output
    assert_kept(done)
    assert harness.expected(2) == len(harness.ledger())
    assert set(harness.ledger()) == set(harness.in_history())
    assert {1} == set(harness.in_history().values())

    # The logs of all runs are in one place.
    logs = harness.call("logs")
    assert 0 == logs.code, logs.output
    lines = [line.split(maxsplit=2) for line in logs.output.splitlines()]
    assert [line[0] for line in lines] == sorted(line[0] for line in lines)
    assert {"run", "coordinator", "engine-0"} <= {line[1] for line in lines}
    assert "has joined" in logs.output
    assert logs.output.count("Starting 1 vLLM engine with") >= 4
    assert {"coordinator"} == {
        line.split()[1] for line in harness.call("logs", "--process", "coordinator").output.splitlines()
    }


def test_an_unreachable_redis_and_a_wrong_password_are_reported_within_ten_seconds(harness: CommandHarness) -> None:
    def run() -> str:
        started = time.monotonic()
        result = harness.run("--no-compare")
        assert time.monotonic() - started < 10
        assert EXIT_REDIS == result.code, result.output
        return result.output

    url = harness.url
    harness.url = url.replace("redis://:", "redis://:wrong")
    assert "refused the user name or password" in run()
    harness.server.stop()
    harness.url = url
    output = run()
    assert "cannot be reached" in output
    assert str(urlsplit(url).password) not in output
