"""The state of engines without a job, in ``rollout top``, in ``rollout history ls`` and among Prometheus metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import connect_history
from rollout_store.history.engine_reports import OwnEngineReport
from rollout_store.history.store import HistoryStore
from rollout_store.history_service.cli import app as history_app
from rollout_tools.cli.main import app
from rollout_worker.drop_in.metrics import ReportCollector
from rollout_worker.drop_in.reporter import DIRECTORY_VARIABLE, EngineReporter, EngineState, read_reports
from tests.support.waiting import wait_for

STATS = {
    "decoding_steps": 100,
    "tokens": 250,
    "timed_seconds": 6.0,
    "timed_seconds_without_drafts": 8.0,
    "drafting_disabled": 0.0,
    "labeled_counters": {
        "source_draft_tokens": {"history": 160, "self": 40},
        "source_accepted_tokens": {"history": 140, "self": 10},
        "class_rollouts": {"long": 2, "medium": 0, "short": 0},
        "class_steps": {"long": 80, "medium": 20, "short": 0},
        "class_budget_tokens": {"long": 1000, "medium": 90, "short": 0},
    },
    "history": {"rollouts": 7},
}


@pytest.fixture
def store(redis_url: str) -> HistoryStore:
    """A history that an engine has opened."""
    store = HistoryStore(connect_history(redis_url), HistoryKeys("default", "math"), window=16)
    store.metadata.open("a tokenizer")
    return store


@pytest.fixture
def reporter(store: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineReporter]:
    """The reporter of an engine, which runs."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    reporter = EngineReporter(lambda: EngineState(3, 2, STATS, recorded=6, lost=1), lambda: store.engines)
    reporter.start()
    wait_for(lambda: bool(read_reports(tmp_path) and store.engines.read()), 60, "The engine does not report.")
    yield reporter
    reporter.stop(60)


@pytest.mark.usefixtures("reporter")
def test_the_metrics_have_those_of_a_jobs_engines(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    registry.register(ReportCollector(tmp_path))
    (report,) = read_reports(tmp_path)
    lines = generate_latest(registry).decode().splitlines()
    for metric, value in (
        ("accepted_tokens_total", 150),
        ("running", 2),
        ("history_rollouts_total", 7),
        ("recorded_rollouts_total", 6),
        ("lost_rollouts_total", 1),
    ):
        assert f'rollout_engine_{metric}{{engine="{report.name}"}} {value}.0' in lines
    assert f'rollout_engine_source_draft_tokens_total{{engine="{report.name}",source="self"}} 40.0' in lines
    assert f'rollout_engine_class_rollouts{{class="long",engine="{report.name}"}} 2.0' in lines


def test_an_engine_is_shown_until_it_ends(reporter: EngineReporter, redis_url: str, tmp_path: Path) -> None:
    def shown() -> str:
        result = CliRunner().invoke(app, ["top", f"{redis_url}/math"])
        assert result.exit_code == 0, result.output
        return result.output

    def listed() -> str:
        result = CliRunner().invoke(history_app, ["ls", "--redis", redis_url, "--json"])
        assert result.exit_code == 0, result.output
        return result.output

    assert "6 rollouts recorded, 1 lost" in shown()
    assert "1.50" in shown()  # accepted tokens per step
    assert "25%" in shown()  # saved time
    assert "12.5" in shown()  # draft tokens that are permitted in a step of a long rollout
    assert '"engines": 1' in listed()
    reporter.stop(60)
    assert "No engine without a job" in shown()
    assert '"engines": 0' in listed()
    assert [] == read_reports(tmp_path)


def test_a_report_that_fails_does_not_prevent_later_ones(store: HistoryStore) -> None:
    states = iter([EngineState(3, 2, {}, recorded=6, lost=1)])  # without statistics, the first report fails
    reporter = EngineReporter(lambda: next(states, EngineState(3, 2, STATS, recorded=6, lost=1)), lambda: store.engines)
    reporter.start()
    wait_for(store.engines.read, 60, "The engine does not report any more.")
    reporter.stop(60)


def test_a_report_of_a_newer_version_can_be_read() -> None:
    report = OwnEngineReport("id", "host-1", 3, 2, 100.0, {"tokens": 250.0}, {})
    assert OwnEngineReport.from_json(json.dumps(asdict(report) | {"temperature": 40})) == report


def test_top_says_what_is_wrong_with_the_url_of_a_history(redis_url: str) -> None:
    result = CliRunner().invoke(app, ["top", redis_url])
    assert result.exit_code == 5
    assert "with the history's name behind it" in result.output
    result = CliRunner().invoke(app, ["top", "redis://localhost:1/math"])
    assert result.exit_code == 3
