"""Who starts next: probes first, then the longest, and nothing is lost or given out twice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.job.scheduler import EngineLoad, Group, Placement, ProbeThenLongest

NOBODY: frozenset[str] = frozenset()


def engine(name: str = "a", slots: int = 4, assigned: int = 0, version: int = 0, plain: bool = False) -> EngineLoad:
    return EngineLoad(name, slots, assigned, version, plain)


def group(name: str, arrival: int, samples: int = 4, predicted: float = 0.0, **more: object) -> Group:
    return Group(name, "trainer", list(range(samples)), arrival, predicted=predicted, **more)  # type: ignore[arg-type]


def placed(
    scheduler: ProbeThenLongest, *engines: EngineLoad, slow: frozenset[str] = NOBODY
) -> list[tuple[str, int, str]]:
    return [(p.request_id, p.sample, p.engine) for p in scheduler.place(engines, slow, NOBODY)]


def filled(*groups: Group) -> ProbeThenLongest:
    scheduler = ProbeThenLongest()
    for one in groups:
        scheduler.add(one)
    return scheduler


def test_one_probe_of_each_group_then_the_longest_predicted() -> None:
    scheduler = filled(group("short", 1, 2, 10), group("long", 2, 2, 500), group("middle", 3, 2, 50))
    assert [
        ("long", 0, "a"),
        ("middle", 0, "a"),
        ("short", 0, "a"),
        ("long", 1, "a"),
        ("middle", 1, "a"),
        ("short", 1, "a"),
    ] == placed(scheduler, engine(slots=8))


def test_a_probe_that_ended_reorders_the_rest() -> None:
    scheduler = filled(group("x", 1, 2, 10), group("y", 2, 2, 20))
    assert [("y", 0, "a"), ("x", 0, "a")] == placed(scheduler, engine(slots=2))
    scheduler.predict("x", 900)
    assert [("x", 1, "a"), ("y", 1, "a")] == placed(scheduler, engine(slots=2))


def test_priority_goes_before_all_else() -> None:
    scheduler = filled(group("long", 1, 1, 1000), group("urgent", 2, 2, 1, priority=5))
    assert [("urgent", 0, "a"), ("urgent", 1, "a")] == placed(scheduler, engine(slots=2))


def test_engines_fill_up_evenly_and_not_beyond_their_slots_unless_much_is_waiting() -> None:
    scheduler = filled(group("g", 1, 6))
    assert Counter(a=3, b=3) == Counter(where for *_, where in placed(scheduler, engine("a"), engine("b")))
    scheduler = filled(group("g", 1, 100))
    assert 5 == len(placed(scheduler, engine("a", slots=4)))


def test_a_pinned_group_waits_for_its_weight_version() -> None:
    scheduler = filled(group("pinned", 1, 1, pinned=3), group("free", 2, 1))
    assert [("free", 0, "a")] == placed(scheduler, engine(version=2))
    assert [("pinned", 0, "a")] == placed(scheduler, engine(version=3))


def test_what_wants_no_drafts_goes_to_plain_engines_where_there_are_any() -> None:
    scheduler = filled(group("off", 1, 1, plain=True), group("on", 2, 1))
    assert [("on", 0, "a")] == placed(scheduler, engine("a"), engine("p", assigned=4, plain=True))
    assert [("off", 0, "p")] == placed(scheduler, engine("a"), engine("p", plain=True))
    scheduler = filled(group("off", 1, 1, plain=True))
    assert [("off", 0, "a")] == placed(scheduler, engine("a"))
    # a job whose speculation is off has plain engines alone
    scheduler = filled(group("on", 1, 1))
    assert [("on", 0, "p")] == placed(scheduler, engine("p", plain=True))


def test_clients_that_do_not_read_start_nothing() -> None:
    scheduler = filled(group("g", 1, 2))
    assert [] == placed(scheduler, engine(), slow=frozenset({"trainer"}))
    assert 2 == len(placed(scheduler, engine()))


def test_a_turn_goes_to_the_engine_that_holds_its_prefix_and_elsewhere_if_that_is_gone() -> None:
    scheduler = filled(group("turn", 1, 1, holder="b"), group("other", 2, 1, holder="gone"))
    assert {("turn", 0, "b"), ("other", 0, "a")} == set(placed(scheduler, engine("a"), engine("b", assigned=2)))


def test_rollouts_that_cost_engines_are_given_out_one_to_an_engine() -> None:
    scheduler = filled(group("suspect", 1, 3, solo=True), group("other", 2, 2))
    given_out = placed(scheduler, engine("a"), engine("b"))
    assert {"a": 1, "b": 1} == Counter(where for name, _, where in given_out if name == "suspect")
    assert 2 == sum(name == "other" for name, *_ in given_out)
    assert [] == scheduler.place([engine("a")], NOBODY, frozenset({"a"}))


groups = st.lists(
    st.builds(
        Group,
        st.integers(0, 9).map(str),
        st.sampled_from(["x", "y"]),
        st.lists(st.integers(0, 5), unique=True, max_size=6),
        st.integers(0, 99),
        priority=st.integers(-1, 1),
        predicted=st.floats(0, 100),
        probed=st.booleans(),
        pinned=st.none() | st.integers(0, 1),
        plain=st.booleans(),
        holder=st.none() | st.sampled_from(["a", "b", "gone"]),
        solo=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda one: one.request_id,
)
engines = st.lists(
    st.builds(
        EngineLoad, st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 6), st.integers(0, 1), st.booleans()
    ),
    max_size=3,
    unique_by=lambda one: one.engine,
)


@given(groups, st.lists(engines, min_size=1, max_size=5), st.sets(st.sampled_from(["x", "y"])))
def test_every_sample_is_given_out_once_and_only_where_it_may_run(
    waiting: list[Group], rounds: list[list[EngineLoad]], slow: set[str]
) -> None:
    known = {one.request_id: (one.client, one.pinned, one.plain) for one in waiting}
    expected = Counter((one.request_id, sample) for one in waiting for sample in one.samples)
    scheduler = filled(*waiting)
    assert expected.total() == scheduler.waiting()
    given_out: list[Placement] = []
    for loads in rounds:
        by_name = {load.engine: load for load in loads}
        new = scheduler.place(loads, frozenset(slow), NOBODY)
        for placement in new:
            client, pinned, plain = known[placement.request_id]
            load = by_name[placement.engine]
            assert client not in slow
            assert pinned in (None, load.version)
            assert load.plain == plain or plain not in {one.plain for one in loads}
        given_out += new
    counts = Counter((p.request_id, p.sample) for p in given_out)
    assert counts <= expected
    assert (expected - counts).total() == scheduler.waiting()
    # nothing that could run is left behind
    final = [EngineLoad("d", 1000, 0, version, plain) for version in (0, 1) for plain in (False, True)]
    final = [EngineLoad(f"d{n}", load.slots, 0, load.version, load.plain) for n, load in enumerate(final)]
    for _ in range(60):
        given_out += scheduler.place(final, NOBODY, NOBODY)
    assert expected == Counter((p.request_id, p.sample) for p in given_out)


@given(groups)
def test_what_comes_back_waits_again(waiting: list[Group]) -> None:
    scheduler = filled(*waiting)
    for one in list(waiting):
        back = scheduler.remove(one.request_id)
        for sample in back:
            scheduler.add(Group(one.request_id, one.client, [sample], one.arrival))
            scheduler.add(Group(one.request_id, one.client, [sample], one.arrival))
    assert sum(len(one.samples) for one in waiting) == scheduler.waiting()
