"""Keepers: the byte cap, the window, expiry, two at once, one that is killed, histories that cannot be read."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from rollout_api.protocol.keys import HISTORIES, HistoryKeys
from rollout_worker.history.connection import connect_history
from rollout_worker.history.maintenance import REST_S, HistoryMaintainer, MaintenanceThread
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.server_functions import Redis
from rollout_worker.history.service import HistoryService
from rollout_worker.history.store import PUBLISHED, START, VERSIONS_KNOWN, HistoryStore, histories
from tests.support.redis_servers import Cluster, Server, until

KEYS = HistoryKeys("default", "math")
OTHER = HistoryKeys("team", "code")
WINDOW = 4
DAY_S = 86400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(params=["server", "cluster"])
def client(request: pytest.FixtureRequest) -> Redis:
    """Of an empty Redis of either kind."""
    if request.param == "server":
        return connect_history(request.getfixturevalue("redis_url"))
    running: Cluster = request.getfixturevalue("cluster")
    for server in running.servers:
        server.client().flushall()
    return connect_history(running.url)


@pytest.fixture
def server(redis_url: str) -> Any:
    return connect_history(redis_url)


def opened(client: Redis, keys: HistoryKeys = KEYS, max_bytes: int | None = None, window: int = WINDOW) -> HistoryStore:
    store = HistoryStore(client, keys, window=window)
    store.open("tokenizer", "model", max_bytes=max_bytes)
    return store


def record(rollout_id: str, generation: int = 1, tokens: int = 400) -> HistoryRecord:
    ids = np.random.default_rng(abs(hash(rollout_id))).integers(0, 60000, tokens).astype(np.uint32)
    return HistoryRecord(rollout_id, "run", generation, generation, ids, "stop")


def fill(store: HistoryStore, problems: list[str], rollouts: int = 4, generation: int = 1) -> None:
    for problem in problems:
        some = [(problem, record(f"{problem}-{generation}-{number}", generation)) for number in range(rollouts)]
        store.append_all(some, newest=generation)


def names(store: HistoryStore) -> list[str]:
    return [problem.problem for problem in store.problems()]


def make_old(client: Redis, keys: HistoryKeys, by: float) -> None:
    """Let every use and change of a history lie further back, in seconds."""
    for problem in HistoryStore(client, keys, window=WINDOW).problems():
        shard = keys.shard(problem.problem)
        client.zincrby(keys.used(shard), -by, problem.problem)
        client.zincrby(keys.changed(shard), -by * 1e6, problem.problem)


def rollouts(store: HistoryStore, problem: str) -> list[str]:
    return [one.rollout_id for one in store.read({problem: START})[problem].records]


@pytest.mark.parametrize("command", ["xlen", "hgetall"])
def test_what_a_keeper_may_not_look_at_is_not_taken_for_done(server: Any, command: str) -> None:
    store = opened(server)
    fill(store, ["p"])
    make_old(server, KEYS, REST_S + 1)
    keeper = HistoryMaintainer(server, KEYS, token="a")
    server.execute_command("ACL", "SETUSER", "default", f"-{command}")
    try:
        with pytest.raises(redis.exceptions.NoPermissionError):
            keeper.plan()
    finally:
        server.execute_command("ACL", "SETUSER", "default", "+@all")
    assert ["p"] == [one.problem for one in keeper.plan().compacted]


def test_versions_of_long_ago_are_forgotten_and_young_ones_keep_their_generations(client: Redis) -> None:
    store = opened(client)
    made = 2 * VERSIONS_KNOWN
    fields = {f"{PUBLISHED}old-run:{number}": number for number in range(1, made + 1)}
    client.hset(KEYS.meta, mapping=fields | {"generation": made})
    assert made + 1 == store.publish("run", 0)
    assert HistoryMaintainer(client, KEYS, token="a").run_once().finished
    left = {field.decode() for field in client.hkeys(KEYS.meta) if field.startswith(PUBLISHED.encode())}
    assert {f"{PUBLISHED}old-run:{number}" for number in range(made + 2 - VERSIONS_KNOWN, made + 1)} == left - {
        f"{PUBLISHED}run:0"
    }
    assert made == store.publish("old-run", made)
    assert made + 1 == store.publish("run", 0)
    assert made + 2 == store.publish("run", 1)


def test_the_cap_evicts_what_was_used_least_recently(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = opened(client)
    fill(store, [f"p{number}" for number in range(10)])
    store.use(["p0", "p3"])  # drafted from: used last
    total = sum(problem.bytes for problem in store.problems())
    store = opened(client, max_bytes=int(total * 0.75))
    done = HistoryMaintainer(client, KEYS, token="a").run_once()
    by_use = ["p1", "p2", "p4", "p5", "p6", "p7", "p8", "p9", "p0", "p3"]
    assert by_use[done.evicted :] == names(store)
    assert done.problems == len(names(store)) == 10 - done.evicted
    left = sum(problem.bytes for problem in store.problems())
    assert done.bytes == left <= 0.95 * 0.75 * total
    assert left + max(problem.bytes for problem in store.problems()) > 0.95 * 0.75 * total  # and no more of them
    assert done.evicted_bytes == total - left
    assert f"{done.evicted} of its 10 problems were evicted" in caplog.text
    for gone in ("p1", "p2"):
        assert 0 == sum(client.exists(key) for key in KEYS.of_problem(gone))
    # once it is within its cap, nothing more goes
    assert 0 == HistoryMaintainer(client, KEYS, token="a").run_once().evicted


def test_generations_leave_at_the_cap_before_problems_do(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Of those used least recently first, and from blocks too."""
    caplog.set_level(logging.INFO)
    store = opened(client)
    names_ = [f"p{number}" for number in range(8)]
    for generation in range(1, 5):
        fill(store, names_, generation=generation)
        if generation == 3:
            for problem in names_:
                store.compact(problem)
    fill(store, ["new"], generation=4)
    total = sum(problem.bytes for problem in store.problems())
    store = opened(client, max_bytes=int(total * 0.7))
    keeper = HistoryMaintainer(client, KEYS, token="a")
    plan = keeper.plan()
    assert ((), {2, 3}) == (plan.evicted, {most for _, most in plan.narrowed})
    done = keeper.run_once()
    while done.narrowed:  # the first went by estimates
        done = keeper.run_once()
    left = store.problems()
    assert 9 == len(left)
    assert done.bytes == sum(problem.bytes for problem in left) <= 0.7 * total
    kept = store.generations_of([*names_, "new"])
    assert [4] == kept.pop("new")
    lengths = [len(kept[problem] or ()) for problem in names_]
    assert sorted(lengths) == lengths
    assert lengths[-1] - lengths[0] <= 1 < lengths[-1]
    for problem in names_:
        assert set(kept[problem] or ()) == {int(one.split("-")[1]) for one in rollouts(store, problem)}
    assert "of its 9 problems lost their oldest rollouts" in caplog.text
    # where there is no room for one generation of each, problems leave
    store.open("tokenizer", "model", max_bytes=int(0.15 * total))
    while (done := keeper.run_once()).narrowed:
        pass
    last = names(store)
    assert [*names_, "new"][-len(last) :] == last
    assert 0 < len(last) < 9


def test_a_full_server_is_made_room_on(tmp_path: Path) -> None:
    with Server(tmp_path) as running:
        client = connect_history(running.url)
        store = opened(client)
        fill(store, [f"p{number}" for number in range(300)])
        total = sum(problem.bytes for problem in store.problems())
        store.open("tokenizer", "model", max_bytes=total // 2)
        used = running.client().info("memory")["used_memory"]
        running.client().config_set("maxmemory", int(used - total * 0.1))
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            store.append("p", record("late"))
        keeper = HistoryMaintainer(client, KEYS, token="a")
        until(lambda: keeper.run_once().bytes <= total // 2, "the history is within its cap")
        until(lambda: store.append("p", record("late")), "there is room")


def test_a_full_server_is_trimmed_and_packed_too(tmp_path: Path) -> None:
    with Server(tmp_path) as running:
        client = connect_history(running.url)
        store = opened(client)
        old = [f"old{number}" for number in range(20)]
        for generation in range(1, WINDOW + 2):
            assert generation == store.publish("run", generation)
            fill(store, old, rollouts=1, generation=generation)
        fill(store, [f"p{number}" for number in range(40)], generation=WINDOW + 1)
        opened(client, window=1)
        make_old(client, KEYS, REST_S + 1)
        running.client().config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            store.append("p0", record("late"))
        keeper = HistoryMaintainer(client, KEYS, token="a")
        done = keeper.run_once()
        assert (20, 60, 0) == (done.trimmed, done.compacted, done.failed)
        assert [[f"{problem}-{WINDOW + 1}-0"] for problem in old] == [rollouts(store, problem) for problem in old]


def test_a_problem_that_was_expected_in_vain_is_forgotten(client: Redis) -> None:
    store = opened(client)
    fill(store, ["p"])
    store.use(["asked for, never made"])
    HistoryMaintainer(client, KEYS, token="a").run_once()
    assert {"p", "asked for, never made"} == {problem.problem for problem in store.problems()}
    later = client.time()[0] + 2 * 3600.0
    HistoryMaintainer(client, KEYS, token="a", clock=lambda: later).run_once()
    assert {"p"} == {problem.problem for problem in store.problems()}


def test_rested_problems_are_packed_and_others_are_not(client: Redis) -> None:
    store = opened(client)
    fill(store, ["rested"])
    make_old(client, KEYS, REST_S + 1)
    fill(store, ["changing"])
    keeper = HistoryMaintainer(client, KEYS, token="a")
    assert 1 == keeper.run_once().compacted
    assert [0, 4] == [client.xlen(KEYS.log(problem)) for problem in ("rested", "changing")]
    assert [f"rested-1-{number}" for number in range(4)] == rollouts(store, "rested")
    assert 0 == keeper.run_once().compacted
    # it rested again
    fill(store, ["rested"], generation=2)
    make_old(client, KEYS, REST_S + 1)
    assert 2 == keeper.run_once().compacted
    assert 8 == len(rollouts(store, "rested"))


def test_what_left_the_window_is_dropped_though_nobody_appends_to_it(client: Redis) -> None:
    store = opened(client)
    for generation in range(1, WINDOW + 1):
        assert generation == store.publish("run", generation)
        fill(store, ["p"], 1, generation)
    fill(store, ["q"], 1)
    keeper = HistoryMaintainer(client, KEYS, token="a")
    assert (0, 0) == ((done := keeper.run_once()).trimmed, done.empty)
    # nothing leaves as time goes by
    for version in range(WINDOW + 1, 3 * WINDOW):
        store.publish("run", version)
    assert 0 == keeper.run_once().trimmed
    assert [f"p-{generation}-0" for generation in range(1, WINDOW + 1)] == rollouts(store, "p")
    # the horizon comes nearer, then a job keeps less
    store.set_horizon(WINDOW)
    assert 1 == keeper.run_once().trimmed
    assert ([f"p-{generation}-0" for generation in (WINDOW - 1, WINDOW)], ["q-1-0"]) == (
        rollouts(store, "p"),
        rollouts(store, "q"),
    )
    opened(client, window=1)
    assert 1 == keeper.run_once().trimmed
    assert ([f"p-{WINDOW}-0"], ["q-1-0"]) == (rollouts(store, "p"), rollouts(store, "q"))
    assert 0 == keeper.run_once().trimmed


def test_the_horizon_follows_what_is_accepted_by_age(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = opened(client, window=8)
    for version in range(10):
        store.publish("run", version)
    store.report_ages({age: (100_000.0, 60_000.0 if age < 4 else 1_000.0) for age in range(8)})
    keeper = HistoryMaintainer(client, KEYS, token="a")
    assert 4 == keeper.plan().horizon
    keeper.run_once()
    about = store.about()
    assert about is not None
    assert (8, 4) == (about.window, about.horizon)
    assert "keeps rollouts of the last 4 generations from now on, not of any age" in caplog.text
    assert {} == store.ages()  # what is reported next is of the new horizon


def test_counts_by_age_fade_with_each_generation_and_once(client: Redis) -> None:
    store = opened(client)
    store.publish("run", 0)
    store.report_ages({0: (100.0, 50.0)})
    for _ in range(2):
        HistoryMaintainer(client, KEYS, token="a").run_once()
    first = store.ages()[0][0]
    for version in range(1, 1 + WINDOW):
        store.publish("run", version)
    for _ in range(2):
        HistoryMaintainer(client, KEYS, token="a").run_once()
    assert first / 2 == pytest.approx(store.ages()[0][0], rel=1e-4)


@pytest.mark.parametrize("client_time", [0.0, 4e9], ids=["the client lives in 1970", "the client lives in 2096"])
def test_an_abandoned_history_expires_by_the_servers_clock(
    client: Redis, monkeypatch: pytest.MonkeyPatch, client_time: float
) -> None:
    for keys, unused in ((KEYS, 30.5), (OTHER, 29.5)):
        fill(opened(client, keys), ["p", "q"])
        make_old(client, keys, unused * DAY_S)
    monkeypatch.setattr(time, "time", lambda: client_time)
    done = [HistoryMaintainer(client, keys, token="a", retention=30 * DAY_S).run_once() for keys in (KEYS, OTHER)]
    assert [True, False] == [one.expired for one in done]
    assert [OTHER] == histories(client)
    HistoryMaintainer(client, KEYS, token="a").resign()
    # nothing of it is left, and all of the other
    pattern = KEYS.patterns()
    left: Any = [key for one in pattern for key in client.scan_iter(one.replace("{", "[{]"))]
    assert [] == left
    assert ["p", "q"] == sorted(names(HistoryStore(client, OTHER, window=WINDOW)))


def test_drafting_from_a_history_keeps_it(client: Redis) -> None:
    store = opened(client)
    fill(store, ["p", "q"])
    make_old(client, KEYS, 40 * DAY_S)
    store.use(["q"])
    done = HistoryMaintainer(client, KEYS, token="a").run_once()
    assert not done.expired
    assert {"p", "q"} == set(names(store))


def test_a_history_without_problems_expires_too_but_not_at_once(client: Redis) -> None:
    opened(client)
    now = float(client.time()[0])
    ticking = [now]
    for keeper in (HistoryMaintainer(client, KEYS, token="a", clock=lambda: ticking[0]) for _ in range(2)):
        assert not keeper.run_once().expired
        ticking[0] += 20 * DAY_S
    # by then none of the first keepers lives
    assert HistoryMaintainer(client, KEYS, token="a", clock=lambda: ticking[0]).run_once().expired
    assert [] == histories(client)


def test_a_history_that_got_problems_again_is_not_taken_for_empty(client: Redis) -> None:
    store = opened(client)
    now = float(client.time()[0])
    HistoryMaintainer(client, KEYS, token="a", clock=lambda: now - 40 * DAY_S).run_once()
    fill(store, ["p"])
    HistoryMaintainer(client, KEYS, token="a").run_once()
    store.drop(store.problems())
    assert not HistoryMaintainer(client, KEYS, token="a").run_once().expired


def test_a_name_without_a_history_is_removed_when_it_stays_so(client: Redis) -> None:
    client.sadd(HISTORIES, KEYS.full_name)
    now = float(client.time()[0])
    keeper = HistoryMaintainer(client, KEYS, token="a", clock=lambda: now)
    assert not keeper.run_once().expired
    assert not client.exists(KEYS.meta)
    now += REST_S + 1
    assert keeper.run_once().expired
    assert [] == histories(client)


def test_one_of_two_keepers_works_until_it_resigns(client: Redis) -> None:
    fill(opened(client), ["p"])
    first, second = HistoryMaintainer(client, KEYS, token="a"), HistoryMaintainer(client, KEYS, token="b")
    assert first.run_once().plan is not None
    assert second.run_once().plan is None
    assert [True, False] == [first.leading, second.leading]
    assert 10_000 < client.pttl(KEYS.keeper) <= 15_000
    second.resign()  # not its lease to give up
    assert first.lead()
    first.resign()
    assert second.run_once().plan is not None


def test_two_keepers_at_once_do_no_harm(client: Redis, redis_url: str) -> None:
    """As when a lease was lost to a pause of a process that then goes on."""
    store = opened(client)
    problems = [f"p{number}" for number in range(60)]
    fill(store, problems, rollouts=2)
    make_old(client, KEYS, REST_S + 1)
    total = sum(problem.bytes for problem in store.problems())
    store.open("tokenizer", "model", max_bytes=total // 2)
    failures: list[BaseException] = []

    def work(token: str) -> None:
        try:
            keeper = HistoryMaintainer(client, KEYS, token=token)
            for _ in range(3):
                keeper.run_once(unasked=True)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures
    left = names(store)
    # no more went than one keeper alone would have let go: compaction made room as well
    assert 60 * 0.95 / 2 - 2 <= len(left) <= 60 / 2
    assert set(problems[-len(left) :]) == set(left)
    for problem in left:
        assert 0 == client.xlen(KEYS.log(problem))
        assert [f"{problem}-1-0", f"{problem}-1-1"] == rollouts(store, problem)
    assert sum(one.bytes for one in store.problems()) == sum(
        client.memory_usage(key) or 0 for problem in left for key in KEYS.of_problem(problem)
    )


def test_another_goes_on_where_a_keeper_was_killed(redis_url: str, server: Any) -> None:
    store = opened(server)
    problems = [f"p{number}" for number in range(300)]
    for at in range(0, 300, 50):
        store.append_all([(problem, record(problem)) for problem in problems[at : at + 50]], newest=1)
    make_old(server, KEYS, REST_S + 1)
    program = (
        "import sys; from rollout_api.protocol.keys import HistoryKeys\n"
        "from rollout_worker.history.connection import connect_history\n"
        "from rollout_worker.history.maintenance import HistoryMaintainer\n"
        "HistoryMaintainer(connect_history(sys.argv[1]), HistoryKeys('default', 'math'), token='killed').run_once()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, redis_url])
    try:
        until(lambda: packed(server, problems), "some are packed")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 0 < packed(server, problems) < 300, "it was to be killed in between"
    keeper = HistoryMaintainer(server, KEYS, token="next")
    assert keeper.run_once().plan is None  # the lease is not over
    server.pexpire(KEYS.keeper, 100)
    until(lambda: keeper.run_once().plan is not None, "the lease has ended")
    until(lambda: packed(server, problems) == 300, "all are packed")
    assert [[problem] for problem in problems] == [rollouts(store, problem) for problem in problems]


def packed(client: Any, problems: list[str]) -> int:
    pipeline = client.pipeline(transaction=False)
    for problem in problems:
        pipeline.xlen(KEYS.log(problem))
    return pipeline.execute().count(0)


def test_a_problem_with_a_wrong_key_is_left_alone_and_the_others_are_not(
    client: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(client)
    fill(store, ["good", "poisoned", "worse"])
    client.set(KEYS.blocks("poisoned"), "not a hash")
    client.delete(KEYS.lengths("worse"))
    client.set(KEYS.lengths("worse"), "not a hash")
    make_old(client, KEYS, REST_S + 1)
    keeper = HistoryMaintainer(client, KEYS, token="a")
    done = keeper.run_once()
    assert 1 == done.failed
    assert 0 == client.xlen(KEYS.log("good"))
    assert "'poisoned' of history default/math is left as it is" in caplog.text
    assert 0 == keeper.run_once().failed  # nor is it tried again
    # it goes like any other when the history is full
    store.open("tokenizer", "model", max_bytes=1)
    assert 3 == keeper.run_once().evicted
    assert not client.exists(KEYS.blocks("poisoned"))


def test_counts_by_age_that_cannot_be_read_do_not_keep_the_history_from_its_cap(client: Redis) -> None:
    store = opened(client, max_bytes=1)
    fill(store, ["p"])
    client.hset(KEYS.ages, "nonsense", "?")
    done = HistoryMaintainer(client, KEYS, token="a").run_once()
    assert 1 == done.evicted
    assert done.plan is not None
    assert done.plan.horizon is None


def test_a_plan_changes_nothing(client: Redis) -> None:
    store = opened(client)
    fill(store, ["p", "q"])
    make_old(client, KEYS, REST_S + 1)
    store.open("tokenizer", "model", max_bytes=int(store.problems()[0].bytes * 1.2))
    before = store.problems()
    plan = HistoryMaintainer(client, KEYS, token="a").plan()
    assert (["p"], ["q"]) == ([one.problem for one in plan.evicted], [one.problem for one in plan.compacted])
    assert before == store.problems()
    assert not client.exists(KEYS.keeper)


def test_a_job_keeps_its_own_history_within_bounds(server: Any) -> None:
    store = opened(server, max_bytes=1)
    fill(store, ["p"])
    thread = MaintenanceThread(server, KEYS)
    thread.start()
    until(lambda: names(store) == [], "it is evicted")
    assert server.exists(KEYS.keeper)
    thread.stop()
    assert thread.failure is None
    assert not server.exists(KEYS.keeper)


# the service


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, appendonly=True) as one:
        yield one


def served(url: str) -> tuple[HistoryService, threading.Thread]:
    service = HistoryService(lambda: connect_history(url), token="service")
    thread = threading.Thread(target=service.run)
    thread.start()
    return service, thread


def ended(service: HistoryService, thread: threading.Thread) -> None:
    service.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_service_looks_after_all_histories_but_those_that_it_cannot_read(running: Server) -> None:
    client: Any = connect_history(running.url)
    fill(opened(client, max_bytes=1), ["p"])
    poisoned = HistoryKeys("default", "a-poisoned-one")
    fill(opened(client, poisoned), ["p"])
    client.hset(poisoned.meta, "generation", "many")
    worse = HistoryKeys("default", "b/with{braces}/and spaces")
    client.sadd(HISTORIES, worse.full_name)
    client.set(worse.used(0), "not a sorted set")
    service, thread = served(running.url)
    try:
        until(lambda: [one for one in service.state.histories if one.evicted], "it works")
        figures = {one.history: one for one in service.state.histories}
        assert [1, 1, 0] == [
            figures[keys.full_name].failed_passes for keys in (poisoned, worse, KEYS)
        ]  # and they wait for their next try
        assert service.state.redis_up
    finally:
        ended(service, thread)
    assert 0 == sum(client.exists(keys.keeper) for keys in (KEYS, poisoned, worse))


def test_a_service_lives_through_redis_being_away(running: Server, caplog: pytest.LogCaptureFixture) -> None:
    client: Any = connect_history(running.url)
    store = opened(client, max_bytes=1)
    service, thread = served(running.url)
    try:
        until(lambda: service.state.redis_up and service.state.histories, "it is up")
        running.kill()
        until(lambda: not service.state.redis_up, "it says that Redis is away")
        assert "ConnectionError" in service.state.failure
        assert not service.state.histories[0].leading
        running.start()
        fill(store, ["p"])
        until(lambda: service.state.redis_up and names(store) == [], "it goes on", seconds=40)
        assert 1 == service.state.histories[0].evicted
    finally:
        ended(service, thread)
    assert "Histories are not looked after: ConnectionError" in caplog.text


def test_a_service_begins_before_redis_does_and_ends_though_it_hangs(running: Server) -> None:
    running.kill()
    service, thread = served(running.url)
    try:
        until(lambda: "ConnectionError" in service.state.failure, "it says that Redis is away")
        running.start()
        opened(connect_history(running.url))
        until(lambda: any(one.leading for one in service.state.histories), "it works")
        running.pause()
    finally:
        service.stop()
        began = time.monotonic()
        thread.join(20)
        running.resume()
    assert not thread.is_alive()
    assert time.monotonic() - began < 15


def test_a_service_forgets_deleted_histories_and_removes_expired_ones(running: Server) -> None:
    client: Any = connect_history(running.url)
    fill(opened(client), ["p"])
    fill(opened(client, OTHER), ["p"])
    make_old(client, OTHER, 31 * DAY_S)
    service, thread = served(running.url)
    try:
        until(lambda: service.state.expired == 1, "one has expired")
        assert ["default/math"] == [one.history for one in service.state.histories]
        HistoryStore(client, KEYS, window=WINDOW).delete()
        until(lambda: service.state.histories == (), "the other is forgotten")
    finally:
        ended(service, thread)
    assert [] == histories(client)
    assert 0 == client.exists(KEYS.keeper, OTHER.keeper)


def test_of_two_services_one_takes_over_when_the_other_ends(running: Server) -> None:
    client: Any = connect_history(running.url)
    opened(client)
    first, first_thread = served(running.url)
    until(lambda: any(one.leading for one in first.state.histories), "the first leads")
    second = HistoryService(lambda: connect_history(running.url), token=f"second-{os.getpid()}")
    second_thread = threading.Thread(target=second.run)
    second_thread.start()
    try:
        until(lambda: second.state.redis_up, "the second waits")
        assert not any(one.leading for one in second.state.histories)
        ended(first, first_thread)
        until(lambda: any(one.leading for one in second.state.histories), "the second leads")
    finally:
        ended(first, first_thread)
        ended(second, second_thread)
