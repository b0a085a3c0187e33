"""The dashboard of the operator, on a real Prometheus that scrapes a real operator."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.dashboard_queries import OPERATOR, dashboard_queries, without_data
from tests.support.prometheus_server import needs_prometheus, prometheus_server
from tests.support.waiting import wait_for

QUERIES = {name: query for name, query in dashboard_queries(".*").items() if OPERATOR in query}


@needs_prometheus
@pytest.mark.current_cluster
def test_every_panel_of_the_operator_shows_data(jobs: Jobs, operator: OperatorProcess, tmp_path: Path) -> None:
    jobs.create("dashboards")
    with prometheus_server(tmp_path, {f"127.0.0.1:{operator.port}": {"namespace": "rollouts"}}, []) as server:
        unshown = partial(without_data, server, QUERIES)
        wait_for(lambda: not unshown(), 60, lambda: f"no data: {unshown()}")
