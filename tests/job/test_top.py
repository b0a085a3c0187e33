"""The views of `rollout top`: computed from made-up states, and rendered by the application itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from textual.widgets import Static

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.status import CoordinatorStatus, EngineEntry
from rollout_api.protocol.timeline import EndedRollout, Measurement
from rollout_store.job import RolloutProgress
from rollout_tools.cli import top_view as view
from rollout_tools.cli.top import LiveJob, acceptance_of, predicted
from rollout_tools.cli.top_view import TopApp
from tests.support.job_messages import request, rollout

NOW = 1000.0
LENGTHS = {"long": LengthStats.from_lengths([(0, length, False) for length in (100, 200, 300, 400)])}
COUNTERS = {
    "tokens": 250.0,
    "decoding_steps": 100.0,
    "draft_tokens": 200.0,
    "accepted_tokens": 150.0,
    "timed_seconds": 6.0,
    "timed_seconds_without_drafts": 8.0,
    "kv_cache_usage": 0.4,
}


def engine(name: str, **fields: Any) -> EngineEntry:
    entry: dict[str, Any] = {
        "id": f"{name}-1a2b",
        "name": name,
        "worker": "",
        "version": 3,
        "non_speculative": False,
        "speculation_disabled": False,
        "draining": False,
        "max_running": 8,
        "assigned": 2,
        "tokens_per_second": 50.0,
        "idle_seconds": 0.0,
        "failed": {},
        "counters": COUNTERS,
        "labeled_counters": {},
    }
    return EngineEntry(**entry | fields)  # type: ignore[typeddict-item]


def live_job(
    *engines: EngineEntry, progress: Mapping[str, list[RolloutProgress]] | None = None, **fields: Any
) -> LiveJob:
    status: dict[str, Any] = {
        "job": "default/math",
        "uid": "u",
        "coordinator": 1,
        "state": "running",
        "weight_version": 3,
        "requests": 2,
        "waiting": 1,
        "assigned": 4,
        "done": 10,
        "total": 40,
        "epoch": 2,
        "tokens": 900,
        "decoding_steps": 100,
        "draft_tokens": 200,
        "accepted_tokens": 150,
        "accepted_per_step": 1.5,
        "saved": 0.25,
        "canaries": 0,
        "drift_e_value": 1.0,
        "distribution_drift": False,
        "unverified": [],
        "tokens_per_second": 100.0,
        "remaining_seconds": 30.0,
        "work_seconds": 20.0,
        "tail_seconds": 12.0,
        "engines": list(engines),
        "engine_errors": {},
        "environment_errors": {},
        "engines_lost": 0,
        "dead_letters": 0,
        "conflicts": 0,
        "unread_bytes": {"trainer": 0},
        "slow_clients": [],
        "silent_clients": [],
        "blocked": {},
    }
    job = LiveJob(CoordinatorStatus(**status | fields))  # type: ignore[typeddict-item]
    job.running = predicted(progress or {}, LENGTHS, engines)
    return job


def progress(tokens: int, problem: str = "long", sample: int = 0, max_tokens: int = 500) -> RolloutProgress:
    return RolloutProgress("r", sample, problem, tokens, max_tokens, 2.0)


def text(renderable: RenderableType, width: int = 160) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_rollouts_that_probably_end_last_come_first() -> None:
    engines = [engine("engine-0"), engine("engine-1")]
    reports = {
        "engine-0-1a2b": [progress(250), progress(10, "unknown"), progress(350)],
        "engine-1-1a2b": [progress(50)],
        "lost-1a2b": [progress(1)],
    }
    running = predicted(reports, LENGTHS, engines)
    # Of the unknown problem's rollout, only the limit is known. The others have the medians 300, 400 and 200.
    assert [(10, 490), (50, 150), (250, 50), (350, 50)] == sorted(
        (one.progress.tokens, one.expected_remaining) for one in running
    )
    assert [490, 150, 50, 50] == [one.expected_remaining for one in running]
    assert [None, 0.0, 0.75, 0.5] == [one.surprise for one in running]
    assert ["engine-0", "engine-1", "engine-0", "engine-0"] == [one.engine for one in running]


def test_a_rollout_beyond_all_earlier_ones_is_expected_to_reach_its_limit() -> None:
    [one] = predicted({"engine-0-1a2b": [progress(450)]}, LENGTHS, [engine("engine-0")])
    assert (None, 1.0, 50.0) == (one.median, one.surprise, one.expected_remaining)


def test_acceptance_is_summed_over_engines() -> None:
    counters = {"source_draft_tokens": {"history": 10, "self": 4}, "source_accepted_tokens": {"history": 7}}
    job = live_job(engine("a", labeled_counters=counters), engine("b", labeled_counters=counters))
    by_source = acceptance_of([counters, counters], "source")
    assert [("history", 20, 14, 0.7), ("self", 8, 0, 0.0)] == [(*row, row.rate) for row in by_source]
    assert [] == acceptance_of([counters, counters], "position")
    assert "own text" in text(view.acceptance(job))


CLASS_COUNTERS = {
    "class_rollouts": {"long": 12, "medium": 3, "short": 0},
    "class_steps": {"long": 1000, "medium": 200, "short": 0},
    "class_budget_tokens": {"long": 15_800, "medium": 1580, "short": 0},
}


def test_the_length_classes_of_an_engine_are_shown_with_their_budgets() -> None:
    without: dict[str, dict[str, int]] = {name: {} for name in CLASS_COUNTERS}
    job = live_job(engine("b", labeled_counters=CLASS_COUNTERS), engine("a", labeled_counters=without), engine("c"))
    table = view.classes_table(job)
    assert table is not None
    header, *rows = [line.split() for line in text(table).splitlines()]
    assert header == ["length", "classes", "long", "budget", "medium", "budget", "short", "budget"]
    assert rows == [["b", "12", "15.8", "3", "7.9", "0", "–"]]
    assert "length classes" in text(view.whole_view(job, NOW))
    other = live_job(engine("a", labeled_counters=without))
    assert view.classes_table(other) is None
    assert "length classes" not in text(view.whole_view(other, NOW))


def test_staleness_is_that_of_rollouts_that_have_ended_lately() -> None:
    job = live_job(engine("a"))
    assert job.staleness(NOW) is None
    base = vars(EndedRollout.of(request(), rollout(request(), 0), 0))
    for version, finished_at in ((0, NOW - 400), (1, NOW - 10), (3, NOW - 5), (None, NOW)):
        job.recent.append(EndedRollout(**base | {"oldest_version": version, "finished_at": finished_at}))
    assert (1.0, 2) == job.staleness(NOW)


@given(st.lists(st.floats(0, 1e9)))
def test_the_highest_value_of_a_sparkline_has_the_highest_block(values: list[float]) -> None:
    line = view.sparkline(values, 20).plain
    assert len(line) == min(20, len(values))
    shown = values[-20:]
    if shown and max(shown) > 0:
        assert "█" == line[shown.index(max(shown))]


@given(st.integers(0, 500), st.floats(1, 1000))
def test_a_bar_has_the_same_width_whatever_it_shows(tokens: int, scale: float) -> None:
    [one] = predicted({"engine-0-1a2b": [progress(tokens)]}, LENGTHS, [engine("engine-0")])
    assert 30 == len(view.length_bar(one, scale))


def test_the_whole_view_names_what_is_shown() -> None:
    counters = {"position_draft_tokens": {"1": 50, "2": 20}, "position_accepted_tokens": {"1": 40, "2": 10}}
    job = live_job(
        engine("engine-0", labeled_counters=counters),
        engine("engine-1", version=1, counters=COUNTERS | {"drafting_disabled": 1.0}),
        progress={"engine-0-1a2b": [progress(250), progress(450, sample=1)]},
        unread_bytes={"trainer": 7 * 2**20},
    )
    job.measurements += [Measurement(NOW, "running", 3, 2, 1, n, 0, 10.0, 0.25, None, 0, []) for n in (8, 4, 2)]
    shown = text(view.whole_view(job, NOW))
    for part in (
        "default/math is running: 10 of 40 rollouts have ended, epoch 2",
        "4 running, 1 waiting",
        "about 30 s for the open requests, 12 s for the longest rollout",
        "25% of the decoding time (4 s)",
        "1.50",
        "version 3, on 1 of 2 engines",
        "7.0 MiB of trainer",
        "1 (−2)",
        "disabled: it did not pay",
        "█▅▃",
        "2 of 2 running rollouts are longer than half of the earlier ones",
        "position 1 80% ▇▅ 50% position 2",
    ):
        assert part in shown, shown


def test_a_job_whose_first_epoch_has_not_begun_is_in_none() -> None:
    shown = text(view.header(live_job(done=0, epoch=0), NOW))
    assert "default/math is running: 0 of 40 rollouts have ended" == shown.splitlines()[0].rstrip()


def test_the_lines_over_time_begin_at_the_same_column() -> None:
    job = live_job()
    job.measurements += [Measurement(NOW, "running", 3, 2, 1, n, 0, 10.0, 0.25, None, 0, []) for n in (8, 4, 2)]
    running, speeds, *_ = text(view.tail(job)).splitlines()
    assert running.index("█") == speeds.index("█")


@pytest.mark.parametrize("width", [60, 160])
async def test_the_application_shows_the_job_and_can_be_frozen(width: int) -> None:
    jobs = [live_job(engine("engine-0"), done=done) for done in range(11, 15)]
    reads = iter(jobs)

    async def read() -> LiveJob | None:
        return next(reads)

    app = TopApp("default/math", read)
    async with app.run_test(size=(width, 40)) as pilot:

        def header() -> str:
            return text(app.query_one("#header", Static).content, width)  # type: ignore[arg-type]

        assert "11 of 40" in header()
        await app.refresh_view()
        assert "12 of 40" in header()
        await pilot.press("space")
        await app.refresh_view()
        assert "12 of 40" in header()
        await pilot.press("space")
        await app.refresh_view()
        assert "13 of 40" in header()
        await pilot.press("q")
    assert app.return_code == 0


async def test_the_application_says_that_no_coordinator_runs() -> None:
    async def read() -> None:
        return None

    app = TopApp("default/math", read)
    async with app.run_test():
        assert "No coordinator runs" in str(app.query_one("#header", Static).content)
