"""The queries of the chart's dashboards, and which of them show no data on a Prometheus server."""

from __future__ import annotations

import json

from tests.support.cluster.chart import CHART
from tests.support.prometheus_server import PrometheusServer

OPERATOR = "rollout_operator_"
"""Beginning of the names of the operator's metrics."""
_DASHBOARDS = [json.loads(file.read_text()) for file in sorted((CHART / "files" / "dashboards").glob("*.json"))]


def dashboard_queries(namespace: str) -> dict[str, str]:
    """Return the queries of all panels, with values for their variables, by a name that tells where each is from."""
    variables = {"$namespace": namespace, "$job": ".*", "$__rate_interval": "10s"}
    found = {}
    for dashboard in _DASHBOARDS:
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for variable, value in variables.items():
                    expression = expression.replace(variable, value)
                found[f"{dashboard['title']} / {panel['title']} / {target['legendFormat']}"] = expression
    return found


def without_data(server: PrometheusServer, queries: dict[str, str]) -> list[str]:
    """Return the names of the queries that have no number as a result."""
    return [name for name, query in queries.items() if not _has_number(server, query)]


def _has_number(server: PrometheusServer, query: str) -> bool:
    return any(result["value"][1] not in ("NaN", "+Inf") for result in server.query(query))
