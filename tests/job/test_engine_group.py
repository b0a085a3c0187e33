"""The machines of an engine find and lose each other: a real Redis, and processes that wait instead of vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_store.job.engines import EngineGroupStore
from rollout_worker.engine_worker.engine_group import EngineGroup, Follower
from tests.support.waiting import wait_for

WAITING = "import json, sys, time; json.dump(json.load(sys.stdin), open(sys.argv[1], 'w')); time.sleep(600)"


@pytest.fixture
def store(redis_url: str) -> EngineGroupStore:
    return EngineGroupStore(redis.Redis.from_url(redis_url), MessageKeys(secrets.token_hex(4)), "math-worker-0")


@pytest.fixture
def losses() -> list[str]:
    return []


@contextmanager
def leader(store: EngineGroupStore, losses: list[str], size: int = 2) -> Iterator[threading.Event]:
    """Offer a part in an engine; the event is set when all followers have taken theirs."""
    group = EngineGroup(store, size, {"model": "/on/the/leader", "node_rank": 0, "seed": 7}, losses.append)
    gathered = threading.Event()

    def gather() -> None:
        group.gather()
        gathered.set()

    threading.Thread(target=gather, daemon=True).start()
    try:
        yield gathered
    finally:
        group.close()


@contextmanager
def follower(store: EngineGroupStore, directory: Path, rank: int = 1, *, leaves: bool = False) -> Iterator[Follower]:
    """Follow the leader in a thread, which is killed or leaves at the end."""
    command = (sys.executable, "-c", WAITING, str(directory / f"settings-{rank}"))
    running = Follower(store, rank, Path("/on/this/machine"), dict(os.environ), command)
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(0.05):
            running.run_once()
        running.leave() if leaves else running.stop()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield running
    finally:
        stopping.set()
        thread.join()


def child() -> psutil.Process:
    """Return the process that stands for the follower's part of an engine."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):  # earlier tests have left some
            if WAITING in process.cmdline():
                return process
    raise AssertionError("there is no such process")


def test_a_leader_waits_for_all_followers(store: EngineGroupStore, losses: list[str], tmp_path: Path) -> None:
    with leader(store, losses, size=3) as gathered, follower(store, tmp_path) as first:
        wait_for(lambda: first.takes_part, 10)
        assert not gathered.is_set()
        with follower(store, tmp_path, rank=2):
            wait_for(gathered.is_set, 10)
            wait_for((tmp_path / "settings-2").exists, 10)
    assert [] == losses
    settings = json.loads((tmp_path / "settings-2").read_text())
    assert {"model": "/on/this/machine", "node_rank": 2, "seed": 7} == settings


def test_a_leader_that_still_waits_notices_that_a_part_has_ended(
    store: EngineGroupStore, losses: list[str], tmp_path: Path
) -> None:
    with leader(store, losses, size=3) as gathered, follower(store, tmp_path) as running:
        wait_for(lambda: running.takes_part, 10)
        os.kill(child().pid, signal.SIGKILL)
        wait_for(lambda: bool(losses), 5)
        assert "while the leader waited" in losses[0]
        assert not gathered.is_set()


def test_a_follower_that_leaves_tells_its_leader(store: EngineGroupStore, losses: list[str], tmp_path: Path) -> None:
    with leader(store, losses) as gathered:
        with follower(store, tmp_path, leaves=True):
            wait_for(gathered.is_set, 10)
        wait_for(lambda: losses == ["the part of the engine on machine 1 has ended"], 3)


def test_a_leader_notices_at_once_that_a_followers_part_has_ended(
    store: EngineGroupStore, losses: list[str], tmp_path: Path
) -> None:
    with leader(store, losses) as gathered, follower(store, tmp_path) as running:
        wait_for(gathered.is_set, 10)
        os.kill(child().pid, signal.SIGKILL)
        wait_for(lambda: losses == ["the part of the engine on machine 1 has ended"], 3)
        assert not running.takes_part  # it waits for another offer


@pytest.mark.slow
def test_a_leader_notices_that_a_machine_is_lost(store: EngineGroupStore, losses: list[str], tmp_path: Path) -> None:
    with leader(store, losses) as gathered:
        with follower(store, tmp_path):
            wait_for(gathered.is_set, 10)
        wait_for(lambda: bool(losses), 30)
        assert "has not answered" in losses[0]


def test_another_process_in_a_followers_place_is_not_taken_for_it(
    store: EngineGroupStore, losses: list[str], tmp_path: Path
) -> None:
    with leader(store, losses) as gathered:
        with follower(store, tmp_path):
            wait_for(gathered.is_set, 10)
        with follower(store, tmp_path):
            wait_for(lambda: losses == ["the part of the engine on machine 1 has ended"], 3)


def test_a_follower_joins_the_next_engine_of_its_leader(
    store: EngineGroupStore, losses: list[str], tmp_path: Path
) -> None:
    with follower(store, tmp_path) as running:
        with leader(store, losses) as gathered:
            wait_for(gathered.is_set, 10)
            first = child()
        with leader(store, losses) as gathered:
            wait_for(gathered.is_set, 10)
            assert first != child()
        wait_for(lambda: not running.takes_part, 10)
    assert [] == losses


def test_a_redis_that_has_lost_its_data_ends_no_engine(
    store: EngineGroupStore, losses: list[str], tmp_path: Path, redis_url: str
) -> None:
    with leader(store, losses) as gathered, follower(store, tmp_path):
        wait_for(gathered.is_set, 10)
        part = child()
        with redis.Redis.from_url(redis_url) as client:
            for _ in range(8):
                for key in client.scan_iter("*engine-group*"):
                    client.delete(key)
                threading.Event().wait(1)
        assert [] == losses
        assert part == child()
