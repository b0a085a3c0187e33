"""Access rules in a real Redis: what a job's user and the history service's user may do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import redis

from rollout_api.protocol.access_rules import access_rules, main, service_rules
from rollout_api.protocol.keys import HISTORY_NAMES, HistoryKeys, MessageKeys
from rollout_api.redis_client.server_functions import Call, Function, libraries, load, run
from rollout_store.history.catalog import StoredProblem
from rollout_store.history.maintenance.maintainer import HistoryMaintainer
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.metadata import list_histories
from rollout_store.history.records import START, HistoryRecord
from rollout_store.history.store import AppendResult, HistoryStore

UID = "the-uid"
OWN, OTHER = HistoryKeys("rl", "math"), HistoryKeys("rl", "math-2")
PROBLEMS = ["p", "a}b{c*%[x]?", "{}"]
Connect = Callable[[str, list[str]], redis.Redis]


@pytest.fixture
def admin(redis_url: str) -> redis.Redis:
    admin = redis.Redis.from_url(redis_url)
    load(admin)  # as rollout-redis-users does
    return admin


@pytest.fixture
def connect(admin: redis.Redis, redis_url: str) -> Iterator[Connect]:
    """Return a function that connects as a user with the given rules."""
    users = []

    def as_user(name: str, rules: list[str]) -> redis.Redis:
        admin.execute_command("ACL", "SETUSER", name, "reset", "on", ">secret", *rules)
        users.append(name)
        return redis.Redis.from_url(f"redis://{name}:secret@{redis_url.rpartition('@')[2]}")

    yield as_user
    admin.execute_command("ACL", "DELUSER", *users)


def record(rollout_id: str, generation: int) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(9, dtype=np.uint32), "stop")


def use_history(store: HistoryStore) -> None:
    """Use every operation that the processes of a job use."""
    store.metadata.open("a-tokenizer", "a/model", max_bytes=10**6)
    for version in range(2):
        generation = store.metadata.publish(UID, version)
        rollouts = [(problem, record(f"{problem}/{version}", generation)) for problem in PROBLEMS]
        assert {AppendResult.APPENDED} == set(store.append_all(rollouts, newest=generation))
    store.catalog.mark_used(PROBLEMS)
    store.set_rewards("p", {"p/0": 0.5, "p/1": 1.0})
    store.save_drafter_state(b"state")
    assert store.drafter_state() == b"state"
    found = store.read(dict.fromkeys(PROBLEMS, START), with_rewards=PROBLEMS)
    assert dict.fromkeys(PROBLEMS, 2) == {problem: len(part.records) for problem, part in found.items()}
    assert [2, 6] == [store.statistics.length_stats(problem).count for problem in ("p", None)]


def assert_denied(*calls: Callable[[], object]) -> None:
    for number, call in enumerate(calls):
        with pytest.raises(redis.exceptions.NoPermissionError):
            call()
            pytest.fail(f"call {number} was executed")


def test_user_of_a_job_may_use_and_list_its_history(admin: redis.Redis, connect: Connect) -> None:
    user = connect("job", access_rules("rl", "job", UID, OWN.name))
    use_history(HistoryStore(user, OWN, window=4))
    maintainer = HistoryMaintainer(user, OWN, token="the job's")
    assert 3 == maintainer.run_once().problems
    maintainer.lease.release()
    assert {OWN.full_name.encode()} == admin.smembers(HISTORY_NAMES)


def test_user_of_a_job_has_no_access_to_other_histories(admin: redis.Redis, connect: Connect) -> None:
    use_history(HistoryStore(admin, OTHER, window=4))
    user = connect("job", access_rules("rl", "job", UID, OWN.name))
    other = HistoryStore(user, OTHER, window=4)
    assert_denied(
        other.metadata.info,
        lambda: other.metadata.open("a-tokenizer", "a/model"),
        lambda: other.append("p", record("new", 2), newest=2),
        lambda: other.statistics.length_entries("p"),
        lambda: other.statistics.length_stats(None),
        lambda: other.catalog.mark_used(["p"]),
        HistoryMaintainer(user, OTHER, token="the job's").lease.acquire,
        lambda: user.xrange(HistoryKeys("other", OWN.name).log("p")),
        # It can neither read nor remove the names of other histories.
        lambda: list_histories(user),
        lambda: user.srem(HISTORY_NAMES, OTHER.full_name),
        lambda: user.delete(HISTORY_NAMES),
        lambda: user.rename(HISTORY_NAMES, OWN.meta),
        lambda: user.set(HISTORY_NAMES, ""),
    )
    assert {OTHER.full_name.encode()} == admin.smembers(HISTORY_NAMES)
    assert 6 == HistoryStore(admin, OTHER, window=4).statistics.length_stats(None).count


def test_applying_the_rules_again_changes_nothing(admin: redis.Redis, connect: Connect) -> None:
    rules = access_rules("rl", "job", UID, OWN.name)
    connect("job", rules)
    once = admin.execute_command("ACL", "GETUSER", "job")
    admin.execute_command("ACL", "SETUSER", "job", *rules)
    assert once == admin.execute_command("ACL", "GETUSER", "job")


def test_user_of_the_service_may_maintain_every_history(admin: redis.Redis, connect: Connect) -> None:
    for keys in (OWN, OTHER):
        use_history(HistoryStore(admin, keys, window=4))
    user = connect("service", service_rules())
    assert [OWN, OTHER] == list_histories(user)
    store = HistoryStore(user, OWN, window=4)
    assert (info := store.metadata.info()) is not None
    assert ("a/model", 10**6) == (info.model, info.max_bytes)
    assert set(PROBLEMS) == {problem.problem_id for problem in store.catalog.problems()}
    operations = MaintenanceOperations(store)
    assert operations.compact("p")
    operations.trim("p")
    maintainer = HistoryMaintainer(user, OWN, token="the service's")
    assert 3 == maintainer.run_once().problems
    maintainer.lease.release()
    assert ["p"] == delete_problem(store, "p")
    operations.delete_history()
    assert [OTHER] == list_histories(user)
    assert {b"history:names"} | keys_of_the_other(admin) == set(admin.keys("*"))
    assert user.info("memory")["used_memory"] > 0
    assert user.memory_usage(OTHER.meta) > 0


def delete_problem(store: HistoryStore, problem: str) -> list[str]:
    """Delete a problem and return the ids of the problems that were deleted."""
    chosen: list[StoredProblem] = [stored for stored in store.catalog.problems() if stored.problem_id == problem]
    return [deleted.problem_id for deleted in store.catalog.delete(chosen)]


def keys_of_the_other(admin: redis.Redis) -> set[bytes]:
    return {key for key in admin.keys("*") if OTHER.full_name.encode() in key}


def test_user_of_the_service_can_neither_read_messages_nor_administrate(admin: redis.Redis, connect: Connect) -> None:
    messages = MessageKeys(UID)
    admin.xadd(messages.requests, {"d": b"1"})
    user = connect("service", service_rules())
    assert_denied(
        lambda: user.xrange(messages.requests),
        lambda: user.delete(messages.requests),
        lambda: run(user, Call(Function("even_when_full"), [messages.requests], ["XLEN", messages.requests])),
        user.scan,
        user.randomkey,
        lambda: user.keys("*"),
        user.flushall,
        user.acl_list,
        lambda: user.config_get("maxmemory"),
        lambda: user.publish("channel", "word"),
    )


@pytest.mark.parametrize("rules", [access_rules("rl", "job", UID, OWN.name), service_rules()])
def test_users_call_functions_but_run_no_code_of_their_own(
    admin: redis.Redis, connect: Connect, rules: list[str]
) -> None:
    script, library = "return 1", next(iter(libraries()))
    digest = admin.script_load(script)
    user = connect("user", rules)
    assert_denied(
        lambda: user.eval(script, 0),
        lambda: user.eval_ro(script, 0),
        lambda: user.evalsha(digest, 0),
        lambda: user.evalsha_ro(digest, 0),
        lambda: user.script_load(script),
        user.script_flush,
        user.script_kill,
        lambda: user.function_load(libraries()[library], replace=True),
        lambda: user.execute_command("FUNCTION", "RESTORE", b""),
        lambda: user.function_delete(library),
        user.function_flush,
        user.function_kill,
    )
    assert 1 == run(user, Call(Function("publish"), [OWN.meta], ["run:1", 0]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["service"], service_rules()), (["rl", "job", UID, "math"], access_rules("rl", "job", UID, "math"))],
)
def test_printed_rules_are_accepted_by_redis(
    connect: Connect,
    admin: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["access_rules", *arguments])
    main()
    connect("printed", capsys.readouterr().out.split())
    connect("given", expected)
    assert admin.execute_command("ACL", "GETUSER", "given") == admin.execute_command("ACL", "GETUSER", "printed")


def test_wrong_arguments_are_answered_with_the_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["access_rules", "rl"])
    with pytest.raises(SystemExit, match="NAMESPACE NAME UID HISTORY"):
        main()
