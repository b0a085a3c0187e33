"""The scheduler places rollouts in the right order on the right engines, and every sample exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from rollout_head.coordinator.scheduler import EngineLoad, Placement, ProbeThenLongest, VersionBounds, WaitingRequest

NONE: frozenset[str] = frozenset()


def engine(
    name: str = "a",
    max_running: int = 4,
    assigned: int = 0,
    version: int = 0,
    non_speculative: bool = False,
    siblings: Mapping[str, int] | None = None,
) -> EngineLoad:
    return EngineLoad(name, max_running, assigned, version, non_speculative, siblings or {})


def group(name: str, arrival: int, samples: int = 4, predicted: float = 0.0, **more: object) -> WaitingRequest:
    fields: dict[str, object] = {"predicted_length": predicted, **more}
    return WaitingRequest(name, "trainer", list(range(samples)), arrival, **fields)


def place(
    scheduler: ProbeThenLongest, *engines: EngineLoad, slow: frozenset[str] = NONE, newest: int = 0
) -> list[tuple[str, int, str]]:
    placements = scheduler.place(engines, slow, NONE, newest)
    return [(placement.request_id, placement.sample, placement.engine) for placement in placements]


def scheduler_with(*groups: WaitingRequest) -> ProbeThenLongest:
    scheduler = ProbeThenLongest()
    for added in groups:
        scheduler.add(added)
    return scheduler


def test_one_sample_of_each_group_starts_first_then_the_longest_predicted() -> None:
    scheduler = scheduler_with(group("short", 1, 2, 10), group("long", 2, 2, 500), group("middle", 3, 2, 50))
    assert [
        ("long", 0, "a"),
        ("middle", 0, "a"),
        ("short", 0, "a"),
        ("long", 1, "a"),
        ("middle", 1, "a"),
        ("short", 1, "a"),
    ] == place(scheduler, engine(max_running=8))


def test_a_new_prediction_reorders_the_groups() -> None:
    scheduler = scheduler_with(group("x", 1, 2, 10), group("y", 2, 2, 20))
    assert [("y", 0, "a"), ("x", 0, "a")] == place(scheduler, engine(max_running=2))
    scheduler.predict("x", 900)
    assert [("x", 1, "a"), ("y", 1, "a")] == place(scheduler, engine(max_running=2))


def test_an_engine_takes_siblings_of_its_samples_first() -> None:
    scheduler = scheduler_with(group("x", 1, 5, 100, probed=True), group("y", 2, 5, 95, probed=True))
    runs_x, runs_y = engine("a", 3, 1, siblings={"x": 1}), engine("b", 3, 1, siblings={"y": 1})
    placed = place(scheduler, runs_x, runs_y)
    assert {("x", "a"), ("y", "b")} == {(request, name) for request, _, name in placed}
    assert 4 == len(placed)


def test_an_engine_takes_the_group_of_which_it_runs_most_samples() -> None:
    scheduler = scheduler_with(*(group(name, number, 2, 10, probed=True) for number, name in enumerate("xyz")))
    [(request, _, _)] = place(scheduler, engine("a", 9, 8, siblings={"x": 1, "y": 4, "z": 3}))
    assert "y" == request


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_samples_that_are_requested_separately_start_in_the_order_and_on_the_engines_of_a_single_request(
    problems: list[tuple[int, int]], sizes: list[tuple[int, int]]
) -> None:
    """verl requests each sample separately; it must make no difference."""
    single, separate = ProbeThenLongest(), ProbeThenLongest()
    arrivals = 0
    for number, (samples, length) in enumerate(problems):
        single.add(group(f"p{number}", arrivals, samples, 100.0 * length))
        for sample in range(samples):
            separate.add(group(f"p{number}/{sample}", arrivals, 1, 100.0 * length, group=f"p{number}"))
            arrivals += 1
    engines = [engine(f"e{number}", size, assigned) for number, (size, assigned) in enumerate(sizes)]
    for step in range(5):
        placed = [(request, where) for request, _, where in place(single, *engines)]
        assert placed == [(request.partition("/")[0], where) for request, _, where in place(separate, *engines)]
        for scheduler in (single, separate):
            scheduler.predict(f"p{step % len(problems)}", 250.0)
    assert single.waiting() == separate.waiting()


def test_a_request_that_arrives_while_siblings_run_waits_for_the_probes_of_others() -> None:
    scheduler = scheduler_with(group("late", 1, 1, group="p", probed=True), group("other", 2, 1))
    assert ["other", "late"] == [request for request, _, _ in place(scheduler, engine())]


def test_siblings_do_not_start_before_probes_longer_groups_and_higher_priorities() -> None:
    runs_y = engine("a", 2, 1, siblings={"y": 1})
    known = group("y", 2, 4, 80, probed=True)
    for name, other in {
        "probe": group("probe", 1, 1, 0),
        "longer": group("longer", 1, 1, 100, probed=True),
        "urgent": group("urgent", 1, 1, 10, probed=True, priority=1),
    }.items():
        assert (name, 0, "a") == place(scheduler_with(group("y", 2, 4, 80, probed=True), other), runs_y)[0]
    assert ("y", 0, "a") == place(scheduler_with(known, group("similar", 1, 1, 88, probed=True)), runs_y)[0]


def test_siblings_of_another_client_or_version_do_not_start_instead() -> None:
    runs_y = engine("a", 2, 1, version=1, siblings={"y": 1})
    pinned = group("y", 2, 4, 100, probed=True, versions=VersionBounds(pinned=0))
    assert [("x", 0, "a")] == place(scheduler_with(group("x", 1, 1, 100, probed=True), pinned), runs_y)


def test_priority_takes_precedence() -> None:
    scheduler = scheduler_with(group("long", 1, 1, 1000), group("urgent", 2, 2, 1, priority=5))
    assert [("urgent", 0, "a"), ("urgent", 1, "a")] == place(scheduler, engine(max_running=2))


def test_engines_are_filled_evenly_and_beyond_their_slots_only_while_many_samples_wait() -> None:
    scheduler = scheduler_with(group("g", 1, 6))
    assert Counter(a=3, b=3) == Counter(where for *_, where in place(scheduler, engine("a"), engine("b")))
    scheduler = scheduler_with(group("g", 1, 100))
    assert 5 == len(place(scheduler, engine("a", max_running=4)))


def test_requests_without_drafts_run_on_engines_without_speculation_if_there_are_any() -> None:
    scheduler = scheduler_with(group("off", 1, 1, non_speculative=True), group("on", 2, 1))
    assert [("on", 0, "a")] == place(scheduler, engine("a"), engine("n", assigned=4, non_speculative=True))
    assert [("off", 0, "n")] == place(scheduler, engine("a"), engine("n", non_speculative=True))
    scheduler = scheduler_with(group("off", 1, 1, non_speculative=True))
    assert [("off", 0, "a")] == place(scheduler, engine("a"))
    # A job without speculation has only engines without speculation.
    scheduler = scheduler_with(group("on", 1, 1))
    assert [("on", 0, "n")] == place(scheduler, engine("n", non_speculative=True))


def test_a_turn_runs_on_the_engine_that_has_its_prefix_cached_if_that_is_alive() -> None:
    scheduler = scheduler_with(group("turn", 1, 1, preferred_engine="b"), group("other", 2, 1, preferred_engine="lost"))
    assert {("turn", 0, "b"), ("other", 0, "a")} == set(place(scheduler, engine("a"), engine("b", assigned=2)))


def test_an_engine_gets_at_most_one_isolated_rollout() -> None:
    scheduler = scheduler_with(group("suspect", 1, 3, isolated=True), group("other", 2, 2))
    placed = place(scheduler, engine("a"), engine("b"))
    assert {"a": 1, "b": 1} == Counter(where for name, _, where in placed if name == "suspect")
    assert 2 == sum(name == "other" for name, *_ in placed)
    assert [] == scheduler.place([engine("a")], NONE, frozenset({"a"}), 0)


groups = st.lists(
    st.builds(
        WaitingRequest,
        st.integers(0, 9).map(str),
        st.sampled_from(["x", "y"]),
        st.lists(st.integers(0, 5), unique=True, max_size=6),
        st.integers(0, 99),
        priority=st.integers(-1, 1),
        predicted_length=st.floats(0, 100),
        probed=st.booleans(),
        versions=st.builds(
            VersionBounds, st.none() | st.integers(0, 1), st.integers(0, 1), st.none() | st.integers(0, 1)
        ),
        non_speculative=st.booleans(),
        preferred_engine=st.none() | st.sampled_from(["a", "b", "lost"]),
        isolated=st.booleans(),
        group=st.sampled_from(["", "g", "h"]),
    ),
    max_size=8,
    unique_by=lambda waiting: waiting.request_id,
)
engines = st.lists(
    st.builds(
        EngineLoad, st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 6), st.integers(0, 1), st.booleans()
    ),
    max_size=3,
    unique_by=lambda load: load.engine,
)


@given(groups, st.lists(engines, min_size=1, max_size=5), st.sets(st.sampled_from(["x", "y"])))
def test_every_sample_is_placed_once_and_only_where_it_may_run(
    waiting: list[WaitingRequest], rounds: list[list[EngineLoad]], slow: set[str]
) -> None:
    known = {each.request_id: (each.client, each.versions, each.non_speculative) for each in waiting}
    expected = Counter((each.request_id, sample) for each in waiting for sample in each.samples)
    scheduler = scheduler_with(*waiting)
    assert expected.total() == scheduler.waiting()
    placed: list[Placement] = []
    for loads in rounds:
        by_name = {load.engine: load for load in loads}
        new = scheduler.place(loads, frozenset(slow), NONE, 1)
        for placement in new:
            client, versions, non_speculative = known[placement.request_id]
            load = by_name[placement.engine]
            assert client not in slow
            if versions.pinned is not None:
                assert versions.pinned == load.version
            else:
                assert load.version >= versions.minimum
                assert versions.max_staleness is None or load.version >= 1 - versions.max_staleness
            assert load.non_speculative == non_speculative or non_speculative not in {
                other.non_speculative for other in loads
            }
        placed += new
    counts = Counter((placement.request_id, placement.sample) for placement in placed)
    assert counts <= expected
    assert (expected - counts).total() == scheduler.waiting()
    # With engines of every kind that can run enough rollouts, all remaining samples are placed.
    kinds = [(version, non_speculative) for version in (0, 1) for non_speculative in (False, True)]
    unlimited = [EngineLoad(f"u{number}", 1000, 0, *kind) for number, kind in enumerate(kinds)]
    for _ in range(60):
        placed += scheduler.place(unlimited, NONE, NONE, 1)
    assert expected == Counter((placement.request_id, placement.sample) for placement in placed)


@given(groups)
def test_removed_samples_can_be_added_again_and_repetitions_are_ignored(waiting: list[WaitingRequest]) -> None:
    scheduler = scheduler_with(*waiting)
    for each in list(waiting):
        removed = scheduler.remove(each.request_id)
        for sample in removed:
            scheduler.add(WaitingRequest(each.request_id, each.client, [sample], each.arrival))
            scheduler.add(WaitingRequest(each.request_id, each.client, [sample], each.arrival))
    assert sum(len(each.samples) for each in waiting) == scheduler.waiting()
