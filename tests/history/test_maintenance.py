"""Maintenance of one history: byte cap, window, expiry, concurrent maintainers, unreadable keys."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api.protocol.keys import HISTORY_NAMES
from rollout_api.redis_client.connection import connect_history
from rollout_api.redis_client.server_functions import Redis
from rollout_store.history.maintenance.maintainer import HistoryMaintainer, MaintenanceThread
from rollout_store.history.maintenance.planner import COMPACTION_DELAY_S
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.metadata import MAX_KNOWN_VERSIONS, VERSION_FIELD_PREFIX, list_histories
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from tests.support.history_contents import (
    KEYS,
    OTHER,
    WINDOW,
    age_history,
    fill,
    open_history,
    problem_ids,
    random_record,
)
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

DAY_S = 86400.0


@pytest.fixture(params=["server", "cluster"])
def client(request: pytest.FixtureRequest) -> Redis:
    """A client of an empty server, then of an empty cluster."""
    server_or_cluster = request.getfixturevalue("redis_url" if request.param == "server" else "cluster")
    client: Redis = connect_history(server_or_cluster if isinstance(server_or_cluster, str) else server_or_cluster.url)
    client.flushall()
    return client


@pytest.fixture
def server(redis_url: str) -> Any:
    """A client of an empty server."""
    return connect_history(redis_url)


def rollouts(store: HistoryStore, problem: str) -> list[str]:
    """Return the ids of a problem's rollouts."""
    return [record.rollout_id for record in store.read({problem: START})[problem].records]


@pytest.mark.parametrize("command", ["xlen", "hkeys"])
def test_problem_that_could_not_be_read_is_planned_again(server: Any, command: str) -> None:
    store = open_history(server)
    fill(store, ["p"])
    age_history(server, KEYS, COMPACTION_DELAY_S + 1)
    maintainer = HistoryMaintainer(server, KEYS, token="a")
    server.execute_command("ACL", "SETUSER", "default", f"-{command}")
    try:
        with pytest.raises(redis.exceptions.NoPermissionError):
            maintainer.plan()
    finally:
        server.execute_command("ACL", "SETUSER", "default", "+@all")
    assert ["p"] == [problem.problem_id for problem in maintainer.plan().compact]


def test_old_versions_are_pruned_and_recent_ones_keep_their_generations(client: Redis) -> None:
    store = open_history(client)
    newest = 2 * MAX_KNOWN_VERSIONS
    fields = {f"{VERSION_FIELD_PREFIX}old-run:{number}": number for number in range(1, newest + 1)}
    client.hset(KEYS.meta, mapping=fields | {"generation": newest})
    assert newest + 1 == store.metadata.publish("run", 0)
    assert HistoryMaintainer(client, KEYS, token="a").run_once().complete
    left = {field.decode() for field in client.hkeys(KEYS.meta) if field.startswith(VERSION_FIELD_PREFIX.encode())}
    assert {
        f"{VERSION_FIELD_PREFIX}old-run:{number}" for number in range(newest + 2 - MAX_KNOWN_VERSIONS, newest + 1)
    } == left - {f"{VERSION_FIELD_PREFIX}run:0"}
    assert newest == store.metadata.publish("old-run", newest)
    assert newest + 1 == store.metadata.publish("run", 0)
    assert newest + 2 == store.metadata.publish("run", 1)


def test_least_recently_used_problems_are_evicted_at_the_cap(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = open_history(client)
    fill(store, [f"p{number}" for number in range(10)])
    for used_last in ("p0", "p3"):
        store.catalog.mark_used([used_last])
    total = sum(problem.bytes for problem in store.catalog.problems())
    store = open_history(client, max_bytes=int(total * 0.75))
    done = HistoryMaintainer(client, KEYS, token="a").run_once()
    by_use = ["p1", "p2", "p4", "p5", "p6", "p7", "p8", "p9", "p0", "p3"]
    assert by_use[done.counts.evicted :] == problem_ids(store)
    assert done.problems == len(problem_ids(store)) == 10 - done.counts.evicted
    left = sum(problem.bytes for problem in store.catalog.problems())
    assert done.bytes == left <= 0.95 * 0.75 * total
    largest = max(problem.bytes for problem in store.catalog.problems())
    assert left + largest > 0.95 * 0.75 * total, "no more problems are evicted than necessary"
    assert done.counts.evicted_bytes == total - left
    assert f"evicted the {done.counts.evicted} least recently used of 10 problems" in caplog.text
    for evicted in ("p1", "p2"):
        assert 0 == sum(client.exists(key) for key in KEYS.problem_keys(evicted))
    # Nothing more is evicted once the history is within its cap.
    assert 0 == HistoryMaintainer(client, KEYS, token="a").run_once().counts.evicted


def test_generations_are_deleted_at_the_cap_before_problems(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """The least recently used problems are trimmed first. Rollouts in blocks are deleted, too."""
    caplog.set_level(logging.INFO)
    store = open_history(client)
    problems = [f"p{number}" for number in range(8)]
    for generation in range(1, 5):
        fill(store, problems, generation=generation)
        if generation == 3:
            for problem in problems:
                MaintenanceOperations(store).compact(problem)
    fill(store, ["new"], generation=4)
    total = sum(problem.bytes for problem in store.catalog.problems())
    store = open_history(client, max_bytes=int(total * 0.7))
    maintainer = HistoryMaintainer(client, KEYS, token="a")
    plan = maintainer.plan()
    assert ((), {2, 3}) == (plan.evict, {kept for _, kept in plan.trim_to_cap})
    done = maintainer.run_once()
    while done.counts.trimmed_to_cap:  # sizes are estimated, so one run may not be enough
        done = maintainer.run_once()
    left = store.catalog.problems()
    assert 9 == len(left)
    assert done.bytes == sum(problem.bytes for problem in left) <= 0.7 * total
    kept = store.catalog.generations([*problems, "new"])
    assert [4] == kept.pop("new")
    lengths = [len(kept[problem] or ()) for problem in problems]
    assert sorted(lengths) == lengths
    assert lengths[-1] - lengths[0] <= 1 < lengths[-1]
    for problem in problems:
        assert set(kept[problem] or ()) == {int(rollout_id.split("-")[1]) for rollout_id in rollouts(store, problem)}
    assert "of 9 problems." in caplog.text
    # If the cap is too low for one generation of each problem, problems are evicted.
    store.metadata.open("tokenizer", "model", max_bytes=int(0.15 * total))
    while (done := maintainer.run_once()).counts.trimmed_to_cap:
        pass
    last = problem_ids(store)
    assert [*problems, "new"][-len(last) :] == last
    assert 0 < len(last) < 9


def test_maintenance_frees_memory_on_a_full_server(tmp_path: Path) -> None:
    with Server(tmp_path) as running:
        client = connect_history(running.url)
        store = open_history(client)
        fill(store, [f"p{number}" for number in range(300)])
        total = sum(problem.bytes for problem in store.catalog.problems())
        store.metadata.open("tokenizer", "model", max_bytes=total // 2)
        used = running.client().info("memory")["used_memory"]
        running.client().config_set("maxmemory", int(used - total * 0.1))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            store.append("p", random_record("late"))
        maintainer = HistoryMaintainer(client, KEYS, token="a")
        wait_for(lambda: maintainer.run_once().bytes <= total // 2, 20, "The history is larger than its cap.")
        wait_for(
            lambda: store.append("p", random_record("late")),
            20,
            "The server does not accept rollouts.",
            ignored=redis.RedisError,
        )


def test_problems_are_trimmed_and_compacted_on_a_full_server(tmp_path: Path) -> None:
    with Server(tmp_path) as running:
        client = connect_history(running.url)
        store = open_history(client)
        old = [f"old{number}" for number in range(20)]
        for generation in range(1, WINDOW + 2):
            assert generation == store.metadata.publish("run", generation)
            fill(store, old, rollouts=1, generation=generation)
        fill(store, [f"p{number}" for number in range(40)], generation=WINDOW + 1)
        open_history(client, window=1)
        age_history(client, KEYS, COMPACTION_DELAY_S + 1)
        running.client().config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            store.append("p0", random_record("late"))
        maintainer = HistoryMaintainer(client, KEYS, token="a")
        done = maintainer.run_once()
        assert (20, 60, 0) == (done.counts.trimmed, done.counts.compacted, done.counts.unreadable)
        assert [[f"{problem}-{WINDOW + 1}-0"] for problem in old] == [rollouts(store, problem) for problem in old]


def test_announced_problem_that_gets_no_rollouts_is_deleted_after_an_hour(client: Redis) -> None:
    store = open_history(client)
    fill(store, ["p"])
    store.catalog.mark_used(["without rollouts"])
    HistoryMaintainer(client, KEYS, token="a").run_once()
    assert {"p", "without rollouts"} == {problem.problem_id for problem in store.catalog.problems()}
    later = client.time()[0] + 2 * 3600.0
    HistoryMaintainer(client, KEYS, token="a", clock=lambda: later).run_once()
    assert {"p"} == {problem.problem_id for problem in store.catalog.problems()}


def test_problems_are_compacted_once_they_stop_changing(client: Redis) -> None:
    store = open_history(client)
    fill(store, ["unchanged"])
    age_history(client, KEYS, COMPACTION_DELAY_S + 1)
    fill(store, ["changing"])
    maintainer = HistoryMaintainer(client, KEYS, token="a")
    assert 1 == maintainer.run_once().counts.compacted
    assert [0, 4] == [client.xlen(KEYS.log(problem)) for problem in ("unchanged", "changing")]
    assert [f"unchanged-1-{number}" for number in range(4)] == rollouts(store, "unchanged")
    assert 0 == maintainer.run_once().counts.compacted
    # It changes, and then stops changing again.
    fill(store, ["unchanged"], generation=2)
    age_history(client, KEYS, COMPACTION_DELAY_S + 1)
    assert 2 == maintainer.run_once().counts.compacted
    assert 8 == len(rollouts(store, "unchanged"))


def test_rollouts_outside_the_window_are_deleted_without_an_append(client: Redis) -> None:
    store = open_history(client)
    for generation in range(1, WINDOW + 1):
        assert generation == store.metadata.publish("run", generation)
        fill(store, ["p"], 1, generation)
    fill(store, ["q"], 1)
    maintainer = HistoryMaintainer(client, KEYS, token="a")
    counts = maintainer.run_once().counts
    assert (0, 0) == (counts.trimmed, counts.deleted_empty)
    # Newer versions alone delete nothing.
    for version in range(WINDOW + 1, 3 * WINDOW):
        store.metadata.publish("run", version)
    assert 0 == maintainer.run_once().counts.trimmed
    assert [f"p-{generation}-0" for generation in range(1, WINDOW + 1)] == rollouts(store, "p")
    # A job with a smaller window opens the history.
    open_history(client, window=1)
    assert 1 == maintainer.run_once().counts.trimmed
    assert ([f"p-{WINDOW}-0"], ["q-1-0"]) == (rollouts(store, "p"), rollouts(store, "q"))
    assert 0 == maintainer.run_once().counts.trimmed


@pytest.mark.parametrize("client_time", [0.0, 4e9], ids=["clock in 1970", "clock in 2096"])
def test_unused_history_expires_by_the_clock_of_the_server(
    client: Redis, monkeypatch: pytest.MonkeyPatch, client_time: float
) -> None:
    for keys, unused in ((KEYS, 30.5), (OTHER, 29.5)):
        fill(open_history(client, keys), ["p", "q"])
        age_history(client, keys, unused * DAY_S)
    monkeypatch.setattr(time, "time", lambda: client_time)
    results = [HistoryMaintainer(client, keys, token="a", retention=30 * DAY_S).run_once() for keys in (KEYS, OTHER)]
    assert [True, False] == [result.expired for result in results]
    assert [OTHER] == list_histories(client)
    HistoryMaintainer(client, KEYS, token="a").lease.release()
    # No key of this history is left, and the other history is complete.
    pattern = KEYS.patterns()
    left: Any = [key for key_pattern in pattern for key in client.scan_iter(key_pattern.replace("{", "[{]"))]
    assert [] == left
    assert ["p", "q"] == sorted(problem_ids(HistoryStore(client, OTHER, window=WINDOW)))


def test_history_that_is_only_drafted_from_does_not_expire(client: Redis) -> None:
    store = open_history(client)
    fill(store, ["p", "q"])
    age_history(client, KEYS, 40 * DAY_S)
    store.catalog.mark_used(["q"])
    done = HistoryMaintainer(client, KEYS, token="a").run_once()
    assert not done.expired
    assert {"p", "q"} == set(problem_ids(store))


def test_history_without_problems_expires_after_the_retention_time(client: Redis) -> None:
    open_history(client)
    now = [float(client.time()[0])]
    for maintainer in (HistoryMaintainer(client, KEYS, token="a", clock=lambda: now[0]) for _ in range(2)):
        assert not maintainer.run_once().expired
        now[0] += 20 * DAY_S
    # The maintainers that saw it empty first no longer exist.
    assert HistoryMaintainer(client, KEYS, token="a", clock=lambda: now[0]).run_once().expired
    assert [] == list_histories(client)


def test_time_without_problems_starts_again_after_a_problem_was_added(client: Redis) -> None:
    store = open_history(client)
    now = float(client.time()[0])
    HistoryMaintainer(client, KEYS, token="a", clock=lambda: now - 40 * DAY_S).run_once()
    fill(store, ["p"])
    HistoryMaintainer(client, KEYS, token="a").run_once()
    store.catalog.delete(store.catalog.problems())
    assert not HistoryMaintainer(client, KEYS, token="a").run_once().expired


def test_name_without_a_history_is_removed_after_a_delay(client: Redis) -> None:
    client.sadd(HISTORY_NAMES, KEYS.full_name)
    now = float(client.time()[0])
    maintainer = HistoryMaintainer(client, KEYS, token="a", clock=lambda: now)
    assert not maintainer.run_once().expired
    assert not client.exists(KEYS.meta)
    now += COMPACTION_DELAY_S + 1
    assert maintainer.run_once().expired
    assert [] == list_histories(client)


def test_one_of_two_maintainers_works_until_it_releases_the_lease(client: Redis) -> None:
    fill(open_history(client), ["p"])
    first, second = HistoryMaintainer(client, KEYS, token="a"), HistoryMaintainer(client, KEYS, token="b")
    assert first.run_once().plan is not None
    assert second.run_once().plan is None
    assert [True, False] == [first.lease.held, second.lease.held]
    assert 10_000 < client.pttl(KEYS.maintainer_lease) <= 15_000
    second.lease.release()  # without effect, because another maintainer holds it
    assert first.lease.acquire()
    first.lease.release()
    assert second.run_once().plan is not None


def test_two_maintainers_at_once_do_no_harm(client: Redis) -> None:
    """This happens if a process is suspended for longer than its lease and then continues."""
    store = open_history(client)
    problems = [f"p{number}" for number in range(60)]
    fill(store, problems, rollouts=2)
    age_history(client, KEYS, COMPACTION_DELAY_S + 1)
    total = sum(problem.bytes for problem in store.catalog.problems())
    store.metadata.open("tokenizer", "model", max_bytes=total // 2)
    failures: list[BaseException] = []

    def work(token: str) -> None:
        try:
            maintainer = HistoryMaintainer(client, KEYS, token=token)
            for _ in range(3):
                maintainer.run_once(ignore_lease=True)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures
    left = problem_ids(store)
    # No more problems were evicted than by one maintainer, because compaction frees memory, too.
    assert 60 * 0.95 / 2 - 2 <= len(left) <= 60 / 2
    assert set(problems[-len(left) :]) == set(left)
    for problem in left:
        assert 0 == client.xlen(KEYS.log(problem))
        assert [f"{problem}-1-0", f"{problem}-1-1"] == rollouts(store, problem)
    assert sum(problem.bytes for problem in store.catalog.problems()) == sum(
        client.memory_usage(key) or 0 for problem in left for key in KEYS.problem_keys(problem)
    )


def test_maintainer_continues_where_a_killed_one_stopped(redis_url: str, server: Any) -> None:
    store = open_history(server)
    problems = [f"p{number}" for number in range(300)]
    for at in range(0, 300, 50):
        store.append_all([(problem, random_record(problem)) for problem in problems[at : at + 50]], newest=1)
    age_history(server, KEYS, COMPACTION_DELAY_S + 1)
    program = (
        "import sys; from rollout_api.protocol.keys import HistoryKeys\n"
        "from rollout_api.redis_client.connection import connect_history\n"
        "from rollout_store.history.maintenance.maintainer import HistoryMaintainer\n"
        "HistoryMaintainer(connect_history(sys.argv[1]), HistoryKeys('default', 'math'), token='killed').run_once()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, redis_url])
    try:
        wait_for(lambda: num_compacted(server, problems), 20, "No problem is compacted.")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < num_compacted(server, problems) < 300, "the process was killed too late"
    maintainer = HistoryMaintainer(server, KEYS, token="next")
    assert maintainer.run_once().plan is None  # the lease has not expired
    server.pexpire(KEYS.maintainer_lease, 100)
    wait_for(lambda: maintainer.run_once().plan is not None, 20, "The lease does not expire.")
    wait_for(lambda: num_compacted(server, problems) == 300, 20, "Not all problems are compacted.")
    assert [[problem] for problem in problems] == [rollouts(store, problem) for problem in problems]


def num_compacted(client: Any, problems: list[str]) -> int:
    """Return the number of problems whose logs are empty."""
    pipeline = client.pipeline(transaction=False)
    for problem in problems:
        pipeline.xlen(KEYS.log(problem))
    return pipeline.execute().count(0)


def test_problem_with_a_key_of_the_wrong_type_is_skipped(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    store = open_history(client)
    fill(store, ["good", "wrong-blocks", "wrong-lengths"])
    client.set(KEYS.blocks("wrong-blocks"), "not a hash")
    client.delete(KEYS.lengths("wrong-lengths"))
    client.set(KEYS.lengths("wrong-lengths"), "not a hash")
    age_history(client, KEYS, COMPACTION_DELAY_S + 1)
    maintainer = HistoryMaintainer(client, KEYS, token="a")
    done = maintainer.run_once()
    assert 1 == done.counts.unreadable
    assert 0 == client.xlen(KEYS.log("good"))
    assert "'wrong-blocks' of history default/math is skipped until it changes" in caplog.text
    assert 0 == maintainer.run_once().counts.unreadable  # it is not tried again
    # It can be evicted like any other problem.
    store.metadata.open("tokenizer", "model", max_bytes=1)
    assert 3 == maintainer.run_once().counts.evicted
    assert not client.exists(KEYS.blocks("wrong-blocks"))


def test_thread_maintains_the_history_of_a_job(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = open_history(server, max_bytes=1)
    fill(store, ["p"])
    thread = MaintenanceThread(server, KEYS)
    thread.start()
    wait_for(lambda: problem_ids(store) == [], 20, "The problem is not evicted.")
    assert server.exists(KEYS.maintainer_lease)
    thread.stop()
    assert "is not being maintained" not in caplog.text
    assert not server.exists(KEYS.maintainer_lease)
