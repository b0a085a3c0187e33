"""Compaction: rollouts take less memory, and no reader misses one, whatever happens at the same time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_store.history.maintenance.run import MaintenanceOperations
from rollout_store.history.records import START, HistoryRecord, decode_records
from rollout_store.history.store import AppendResult, HistoryStore

KEYS = HistoryKeys("default", "math")
COMPACT = Function("compact")
WINDOW = 3


def record(rollout_id: str, generation: int = 1, tokens: int = 5) -> HistoryRecord:
    return HistoryRecord(rollout_id, "run", generation, generation, np.arange(tokens, dtype=np.uint32), "stop")


def ids(store: HistoryStore, problem: str = "p", cursor: str = START) -> list[str]:
    """Return the ids of a problem's rollouts."""
    return [r.rollout_id for r in store.read({problem: cursor})[problem].records]


@pytest.fixture
def store(history_url: str) -> HistoryStore:
    return HistoryStore(connect_history(history_url), KEYS, window=WINDOW)


def test_compacted_problem_is_smaller_and_has_the_same_rollouts(store: HistoryStore, history_url: str) -> None:
    client = connect_history(history_url)
    for number in range(200):
        store.append("p", record(str(number), tokens=300), newest=1)
    (before,) = store.catalog.problems()
    assert MaintenanceOperations(store).compact("p")
    (after,) = store.catalog.problems()
    assert [str(number) for number in range(200)] == ids(store)
    assert 0 == client.xlen(KEYS.log("p"))
    assert after.bytes < before.bytes / 10
    assert after.bytes == sum(client.memory_usage(key) or 0 for key in KEYS.problem_keys("p"))
    assert not MaintenanceOperations(store).compact("p")  # nothing is left to compact
    assert AppendResult.DUPLICATE == store.append("p", record("7", tokens=300), newest=1)


def test_much_larger_block_is_not_rewritten(store: HistoryStore, history_url: str) -> None:
    client = connect_history(history_url)
    rng = np.random.default_rng(0)
    for number in range(50):
        noise = rng.integers(0, 50_000, 500).astype(np.uint32)
        store.append("p", HistoryRecord(str(number), "run", 1, 1, noise, "stop"), newest=1)
    MaintenanceOperations(store).compact("p")
    (large,) = client.hkeys(KEYS.blocks("p"))
    for number in range(3):
        store.append("p", record(f"late {number}"), newest=1)
        MaintenanceOperations(store).compact("p")
    assert {large} < set(client.hkeys(KEYS.blocks("p")))
    assert 2 == client.hlen(KEYS.blocks("p"))  # the small blocks were merged
    assert 53 == len(ids(store))


def test_rollouts_outside_the_window_are_deleted_from_rewritten_and_whole_blocks(
    store: HistoryStore, history_url: str
) -> None:
    client = connect_history(history_url)
    for generation in range(1, 5):
        store.append("p", record(str(generation), generation), newest=generation)
        MaintenanceOperations(store).compact("p")
    store.metadata.publish("run", 0)
    assert ["2", "3", "4"] == ids(store)
    for generation in range(7, 10):
        store.append("p", record(str(generation), generation), newest=generation)
    assert ["7", "8", "9"] == ids(store)
    assert 0 == client.hlen(KEYS.blocks("p"))


def test_problem_that_is_not_sampled_any_more_can_be_trimmed(store: HistoryStore, history_url: str) -> None:
    for generation in range(1, 4):
        store.append("p", record(str(generation), generation), newest=generation)
    MaintenanceOperations(store).compact("p")
    store.append("q", record("b", 3), newest=3)
    # A job with a smaller window opens the history.
    HistoryStore(connect_history(history_url), KEYS, window=2).metadata.open("tokenizer")
    MaintenanceOperations(store).trim("p")
    assert ([2, 3], [3]) == (store.catalog.generations(["p"])["p"], store.catalog.generations(["q"])["q"])
    store.append("p", record("30", 30), newest=30)
    MaintenanceOperations(store).compact("p")
    assert (["3", "30"], ["b"]) == (ids(store, "p"), ids(store, "q"))


def test_trimming_rewrites_blocks(store: HistoryStore, history_url: str) -> None:
    """Nothing has to be compacted for that, and readers do not read the remaining rollouts again."""
    client = connect_history(history_url)
    for generation in range(1, 4):
        for number in range(2):
            store.append("p", record(f"{generation}-{number}", generation), newest=generation)
    MaintenanceOperations(store).compact("p")
    cursor = store.read({"p": START})["p"].cursor
    before = client.hgetall(KEYS.blocks("p"))
    MaintenanceOperations(store).trim("p")
    assert before == client.hgetall(KEYS.blocks("p")), "no rollout has left the window"
    HistoryStore(client, KEYS, window=1).metadata.open("tokenizer")
    MaintenanceOperations(store).trim("p")
    (after,) = client.hvals(KEYS.blocks("p"))
    assert ["3-0", "3-1"] == [record.rollout_id for record in decode_records(after)]
    assert len(after) < len(next(iter(before.values())))
    assert [] == store.read({"p": cursor})["p"].records
    (known,) = [problem for problem in store.catalog.problems() if problem.problem_id == "p"]
    assert known.bytes == sum(client.memory_usage(key) or 0 for key in KEYS.problem_keys("p"))


def test_unreadable_entries_and_blocks_are_left_unchanged(store: HistoryStore, history_url: str) -> None:
    client = connect_history(history_url)
    store.append("p", record("a"), newest=1)
    unreadable = client.xadd(KEYS.log("p"), {"g": 1, "d": b"\x04 of a later version"})
    store.append("p", record("b"), newest=1)
    MaintenanceOperations(store).compact("p")
    assert [unreadable] == [entry for entry, _ in client.xrange(KEYS.log("p"))]
    client.hset(KEYS.blocks("p"), "1:99999999999999-0", b"\x04 of a later version, too")
    store.append("p", record("c"), newest=1)
    MaintenanceOperations(store).compact("p")
    found = store.read({"p": START})["p"]
    assert ["a", "b", "c"] == sorted(r.rollout_id for r in found.records)
    assert 2 == len(found.corrupt)


def test_nothing_is_replaced_if_an_entry_or_block_has_changed(store: HistoryStore, history_url: str) -> None:
    client = connect_history(history_url)
    for number in range(4):
        store.append("p", record(str(number)), newest=1)
    entries = [entry for entry, _ in client.xrange(KEYS.log("p"))]
    assert MaintenanceOperations(store).compact("p")
    (block,) = client.hkeys(KEYS.blocks("p"))
    late = Call(COMPACT, KEYS.problem_keys("p"), ["1:1-1", b"x", 0, *entries])
    assert 0 == run(client, late)[0]
    store.append("p", record("4"), newest=1)
    assert MaintenanceOperations(store).compact("p")
    (entry,) = [client.xadd(KEYS.log("p"), {"g": 1, "d": b"x"})]
    late = Call(COMPACT, KEYS.problem_keys("p"), ["1:1-1", b"x", 1, block, entry])
    assert 0 == run(client, late)[0]
    assert [str(number) for number in range(5)] == ids(store)


class HistoryMachine(RuleBasedStateMachine):
    """Appends, compactions and reads in any order, compared with a dictionary of the rollouts that must be there."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        client = connect_history(self.url)
        client.flushall()
        self.store = HistoryStore(client, KEYS, window=WINDOW)
        self.kept: dict[str, int] = {}
        self.generation = 1
        self.number = 0
        self.cursors = [START, START]
        self.read: list[Counter[str]] = [Counter(), Counter()]

    def oldest(self, *more: int) -> int:
        """Return the third newest generation of all that were appended; 0 if there are fewer."""
        return [0, 0, 0, *sorted({*self.kept.values(), *more})][-WINDOW]

    @rule(count=st.integers(1, 5), age=st.integers(0, 3))
    def append(self, count: int, age: int) -> None:
        generation = max(0, self.generation - age)
        for _ in range(count):
            self.number += 1
            result = self.store.append("p", record(str(self.number), generation), newest=self.generation)
            assert (AppendResult.APPENDED if generation >= self.oldest(generation) else AppendResult.TOO_OLD) == result
            if result is AppendResult.APPENDED:
                self.kept[str(self.number)] = generation

    @rule()
    def append_again(self) -> None:
        for name, generation in list(self.kept.items())[-2:]:
            if generation >= self.oldest():
                assert AppendResult.DUPLICATE == self.store.append(
                    "p", record(name, generation), newest=self.generation
                )

    @rule()
    def advance(self) -> None:
        self.generation += 1

    @rule()
    def compact(self) -> None:
        MaintenanceOperations(self.store).compact("p")

    @rule(reader=st.integers(0, 1), count=st.integers(1, 4))
    def continue_reading(self, reader: int, count: int) -> None:
        found = self.store.read({"p": self.cursors[reader]}, count=count)["p"]
        self.cursors[reader] = found.cursor
        self.read[reader].update(record.rollout_id for record in found.records)

    @invariant()
    def is_complete(self) -> None:
        expected = {name for name, generation in self.kept.items() if generation >= self.oldest()}
        found = Counter(ids(self.store))
        assert expected <= set(found) <= set(self.kept)
        assert all(count == 1 for count in found.values())

    def teardown(self) -> None:
        for reader in range(2):
            while True:
                found = self.store.read({"p": self.cursors[reader]}, count=100)["p"]
                self.cursors[reader] = found.cursor
                self.read[reader].update(record.rollout_id for record in found.records)
                if not found.has_more:
                    break
            expected = {name for name, generation in self.kept.items() if generation >= self.oldest()}
            assert expected <= set(self.read[reader])


def test_no_rollout_is_lost_or_duplicated_in_any_order_of_operations(history_url: str) -> None:
    HistoryMachine.url = history_url
    run_state_machine_as_test(
        HistoryMachine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
