"""Which engine passes broadcast weights on to which other one."""

from __future__ import annotations

from typing import Any

from rollout_worker.job.coordinator.weight_passing import (
    Passing,
    PassingPlanner,
    find_engines_without_source,
    find_waiting_engines,
)
from rollout_worker.job.job_store import EngineReport

TIMEOUT_S = 30.0


def report(full_version: int, **fields: Any) -> EngineReport:
    return EngineReport("e", broadcast="gloo", full_version=full_version, version=full_version, **fields)


def pairs(planned: list[Passing]) -> set[tuple[str, str]]:
    """Return source and target of each passing."""
    return {(passing.source, passing.target) for passing in planned}


def test_the_number_of_engines_with_the_weights_doubles_with_each_round() -> None:
    planner = PassingPlanner(TIMEOUT_S)
    engines = {"a": report(5)} | {f"t{number}": report(0, missed=5) for number in range(7)}
    rounds = []
    while any(one.missed is not None for one in engines.values()):
        planned = planner.plan(5, engines, 0.0)
        assert [] == planner.plan(5, engines, 1.0)  # what is in progress is not ordered again
        rounds.append(len(planned))
        assert len(planned) == len({passing.source for passing in planned})
        for passing in planned:
            engines[passing.target] = report(5, loads=1)
    assert [1, 2, 4] == rounds


def test_a_failed_or_unanswered_order_goes_to_another_source() -> None:
    planner = PassingPlanner(TIMEOUT_S)
    engines = {"a": report(5), "b": report(5), "t": report(0, missed=5)}
    [first] = planner.plan(5, engines, 0.0)
    assert [] == planner.plan(5, engines, TIMEOUT_S - 1)
    [second] = planner.plan(5, engines, TIMEOUT_S)  # the first source has not answered
    assert {"a", "b"} == {first.source, second.source}
    engines["t"].loading = 5
    assert [] == planner.plan(5, engines, 1000.0)  # however long receiving takes
    engines["t"].loading, engines["t"].loads = None, 1
    [third] = planner.plan(5, engines, 1001.0)
    del engines[third.source]
    [fourth] = planner.plan(5, engines, 1001.5)  # the source was lost
    assert {third.source, fourth.source} == {"a", "b"}
    del engines[fourth.source]
    assert [] == planner.plan(5, engines, 1002.0)


def test_only_engines_that_have_the_weights_pass_them_on() -> None:
    target = report(0, missed=5)
    for other in (
        report(4),
        report(5, loading=6),
        report(5, draining=True),
        report(0, missed=5),
        EngineReport("e", full_version=5, version=5),  # it takes no part in broadcasts
    ):
        assert [] == PassingPlanner(TIMEOUT_S).plan(5, {"a": other, "t": target}, 0.0)
    with_adapter = EngineReport("e", broadcast="gloo", full_version=5, version=6)
    assert {("a", "t")} == pairs(PassingPlanner(TIMEOUT_S).plan(5, {"a": with_adapter, "t": target}, 0.0))


def test_a_target_first_finishes_rollouts_that_are_pinned_to_its_weights() -> None:
    engines = {"a": report(5), "t": report(4, missed=5, pinned=1)}
    planner = PassingPlanner(TIMEOUT_S)
    assert [] == planner.plan(5, engines, 0.0)
    engines["t"].pinned = 0
    assert {("a", "t")} == pairs(planner.plan(5, engines, 0.0))


def test_an_order_for_an_older_version_is_forgotten() -> None:
    planner = PassingPlanner(TIMEOUT_S)
    assert {("a", "t")} == pairs(planner.plan(5, {"a": report(5), "t": report(0, missed=5)}, 0.0))
    assert [] == planner.plan(6, {"a": report(5, loading=6), "t": report(0, missed=5)}, 1.0)
    assert {("a", "t")} == pairs(planner.plan(6, {"a": report(6), "t": report(0, missed=6)}, 2.0))
    assert [] == planner.plan(None, {"a": report(6), "t": report(0, missed=6)}, 3.0)  # now from a directory


def test_an_engine_waits_for_missed_weights_only_while_another_one_has_them() -> None:
    waiting = {"t": report(0, missed=5)}
    assert {"t"} == find_waiting_engines(waiting | {"a": report(5)})
    assert {"t"} == find_waiting_engines(waiting | {"a": report(4, loading=5)})
    assert set() == find_waiting_engines(waiting | {"a": report(4)})
    assert set() == find_waiting_engines(waiting | {"a": report(5, draining=True)})
    assert set() == find_waiting_engines({"t": report(0), "a": report(5)})


def test_engines_learn_once_that_no_engine_has_the_weights_that_they_have_missed() -> None:
    engines = {"t": report(0, missed=5), "u": report(0, missed=5), "old": report(4)}
    assert ["t", "u"] == find_engines_without_source(5, engines)
    engines["u"].failed[5] = "no other engine has it"
    assert ["t"] == find_engines_without_source(5, engines)
    assert [] == find_engines_without_source(5, engines | {"source": report(5)})
    assert [] == find_engines_without_source(5, engines | {"source": report(4, loading=5)})
    assert [] == find_engines_without_source(5, {"t": report(0, missed=5, loading=5)})
    assert [] == find_engines_without_source(6, engines)
