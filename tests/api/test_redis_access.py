"""Users of a real Redis: a job's with the commands of its history, the history service's with those of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis

from rollout_api.protocol.keys import HISTORIES, HistoryKeys, MessageKeys
from rollout_api.redis_client.access_rules import access_rules, service_rules
from rollout_worker.history.maintenance import HistoryMaintainer
from rollout_worker.history.records import HistoryRecord
from rollout_worker.history.store import START, Appended, HistoryStore, Problem, histories

UID = "the-uid"
OURS, THEIRS = HistoryKeys("rl", "math"), HistoryKeys("rl", "math-2")
PROBLEMS = ["p", "a}b{c*%[x]?", "{}"]
Connect = Callable[[str, list[str]], redis.Redis]


@pytest.fixture
def admin(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


@pytest.fixture
def connect(admin: redis.Redis, redis_url: str) -> Iterator[Connect]:
    """A connection as a user with given rules."""
    made = []

    def as_user(name: str, rules: list[str]) -> redis.Redis:
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *rules)
        made.append(name)
        return redis.Redis.from_url(f"redis://{name}:secret@{redis_url.rpartition('@')[2]}")

    yield as_user
    admin.execute_command("ACL", "DELUSER", *made)


def record(rollout_id: str, generation: int) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(9, dtype=np.uint32), "stop")


def keep(store: HistoryStore) -> None:
    """What a job's processes do with their history."""
    store.open("a-tokenizer", "a/model", max_bytes=10**6)
    for version in range(2):
        generation = store.publish(UID, version)
        rollouts = [(problem, record(f"{problem}/{version}", generation)) for problem in PROBLEMS]
        assert {Appended.NEW} == set(store.append_all(rollouts, newest=generation))
    store.use(PROBLEMS)
    store.reward("p", {"p/0": 0.5, "p/1": 1.0})
    store.report_ages({1: (8.0, 4.0)})
    store.keep_learned(b"of drafts")
    assert store.learned() == b"of drafts"
    found = store.read(dict.fromkeys(PROBLEMS, START), rewarded=PROBLEMS)
    assert dict.fromkeys(PROBLEMS, 2) == {problem: len(part.records) for problem, part in found.items()}
    assert [2, 6] == [store.length_stats(problem).count for problem in ("p", None)]


def denied(*calls: Callable[[], object]) -> None:
    for number, call in enumerate(calls):
        with pytest.raises(redis.exceptions.NoPermissionError):
            call()
            pytest.fail(f"call {number} was carried out")


def test_a_jobs_user_may_keep_its_history_and_say_that_it_is_there(admin: redis.Redis, connect: Connect) -> None:
    user = connect("job", access_rules("rl", "job", UID, OURS.name))
    keep(HistoryStore(user, OURS, window=4))
    keeper = HistoryMaintainer(user, OURS, token="the job's")
    assert 3 == keeper.run_once().problems
    keeper.resign()
    assert {OURS.full_name.encode()} == admin.smembers(HISTORIES)


def test_a_jobs_user_knows_nothing_of_other_histories(admin: redis.Redis, connect: Connect) -> None:
    keep(HistoryStore(admin, THEIRS, window=4))
    user = connect("job", access_rules("rl", "job", UID, OURS.name))
    theirs = HistoryStore(user, THEIRS, window=4)
    denied(
        theirs.about,
        lambda: theirs.open("a-tokenizer", "a/model"),
        lambda: theirs.append("p", record("new", 2), newest=2),
        lambda: theirs.lengths("p"),
        lambda: theirs.length_stats(None),
        lambda: theirs.use(["p"]),
        HistoryMaintainer(user, THEIRS, token="the job's").lead,
        lambda: user.xrange(HistoryKeys("other", OURS.name).log("p")),
        # names of others' histories cannot be read, nor taken away from the service
        lambda: histories(user),
        lambda: user.srem(HISTORIES, THEIRS.full_name),
        lambda: user.delete(HISTORIES),
        lambda: user.rename(HISTORIES, OURS.meta),
        lambda: user.set(HISTORIES, ""),
    )
    assert {THEIRS.full_name.encode()} == admin.smembers(HISTORIES)
    assert 6 == HistoryStore(admin, THEIRS, window=4).length_stats(None).count


def test_given_twice_the_rules_are_the_same(admin: redis.Redis, connect: Connect) -> None:
    rules = access_rules("rl", "job", UID, OURS.name)
    connect("job", rules)
    once = admin.execute_command("ACL", "GETUSER", "job")
    admin.execute_command("ACL", "SETUSER", "job", *rules)
    assert once == admin.execute_command("ACL", "GETUSER", "job")


def test_the_services_user_may_look_after_every_history(admin: redis.Redis, connect: Connect) -> None:
    for keys in (OURS, THEIRS):
        keep(HistoryStore(admin, keys, window=4))
    user = connect("service", service_rules())
    assert [OURS, THEIRS] == histories(user)
    store = HistoryStore(user, OURS, window=4)
    assert (about := store.about()) is not None
    assert ("a/model", 10**6) == (about.model, about.max_bytes)
    assert set(PROBLEMS) == {one.problem for one in store.problems()}
    assert {1: (8.0, 4.0)} == store.ages()
    assert store.compact("p")
    store.trim("p")
    store.set_horizon(2)
    keeper = HistoryMaintainer(user, OURS, token="the service's")
    assert 3 == keeper.run_once().problems
    keeper.resign()
    assert ["p"] == dropped(store, "p")
    store.delete()
    assert [THEIRS] == histories(user)
    assert {b"history:names"} | theirs_alone(admin) == set(admin.keys("*"))
    assert user.info("memory")["used_memory"] > 0
    assert user.memory_usage(THEIRS.meta) > 0


def dropped(store: HistoryStore, problem: str) -> list[str]:
    chosen: list[Problem] = [one for one in store.problems() if one.problem == problem]
    return [one.problem for one in store.drop(chosen)]


def theirs_alone(admin: redis.Redis) -> set[bytes]:
    return {key for key in admin.keys("*") if THEIRS.full_name.encode() in key}


def test_the_services_user_knows_nothing_of_messages_and_rules_nothing(admin: redis.Redis, connect: Connect) -> None:
    messages = MessageKeys(UID)
    admin.xadd(messages.requests, {"d": b"1"})
    user = connect("service", service_rules())
    denied(
        lambda: user.xrange(messages.requests),
        lambda: user.delete(messages.requests),
        lambda: user.eval("return redis.call('XLEN', KEYS[1])", 1, messages.requests),
        user.scan,
        user.randomkey,
        lambda: user.keys("*"),
        user.flushall,
        user.script_flush,
        user.acl_list,
        lambda: user.config_get("maxmemory"),
        lambda: user.publish("channel", "word"),
        lambda: user.execute_command("FUNCTION", "FLUSH"),
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["service"], service_rules()), (["rl", "job", UID, "math"], access_rules("rl", "job", UID, "math"))],
)
def test_the_rules_are_printed_as_redis_takes_them(
    connect: Connect, admin: redis.Redis, arguments: list[str], expected: list[str]
) -> None:
    command = [sys.executable, "-m", "rollout_api.redis_client.access_rules", *arguments]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    connect("printed", printed.split())
    connect("given", expected)
    assert admin.execute_command("ACL", "GETUSER", "given") == admin.execute_command("ACL", "GETUSER", "printed")


def test_other_arguments_are_answered_by_the_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollout_api.redis_client.access_rules", "rl"], capture_output=True, text=True
    )
    assert 1 == done.returncode
    assert "NAMESPACE NAME UID HISTORY" in done.stderr
