"""Generate the chart's Grafana dashboards, charts/das-rollout/files/dashboards/: ``python scripts/dashboards.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "charts" / "das-rollout" / "files" / "dashboards"
JOB, ENGINE = "{{job}}", "{{job}} {{engine}}"
"""Legends. The label ``job`` is NAMESPACE/NAME."""
_VARIABLES = {"$JOB": '{namespace=~"$namespace", job=~"$job"}', "$RATE": "[$__rate_interval]"}
"""What stands for the selected jobs and for the interval of a rate in queries."""
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One panel: its title, a description for its reader, a unit of Grafana, and queries by their legends."""

    title: str
    description: str
    unit: str
    queries: Mapping[str, str]


def quantiles(metric: str) -> dict[str, str]:
    """Return queries for the 50 %, 90 % and 99 % quantiles of a histogram of a job."""
    rate = f"sum by (le, namespace, job) (rate({metric}_bucket$JOB$RATE))"
    return {f"{round(100 * q)} % {JOB}": f"histogram_quantile({q}, {rate})" for q in (0.5, 0.9, 0.99)}


def ratio(numerator: str, denominator: str, by: str = "namespace, job") -> str:
    """Return a query for the ratio of the rates of two counters of a job."""
    return " / ".join(f"sum by ({by}) (rate({name}$JOB$RATE))" for name in (numerator, denominator))


JOB_ROWS: dict[str, list[Panel]] = {
    "Progress": [
        Panel(
            "Response tokens per second",
            "Speed of all engines together, over the last ten seconds.",
            "short",
            {JOB: "rollout_tokens_per_second$JOB"},
        ),
        Panel(
            "Rollouts on engines and waiting",
            "When few are left on the engines and none waits, the step is in its tail.",
            "short",
            {"on engines {{job}}": "rollout_rollouts_assigned$JOB", "waiting {{job}}": "rollout_rollouts_waiting$JOB"},
        ),
        Panel(
            "Estimated time left",
            "Until all open requests are answered, and until the longest open rollout ends, which more engines do not "
            "shorten.",
            "s",
            {"all {{job}}": "rollout_remaining_seconds$JOB", "longest {{job}}": "rollout_tail_seconds$JOB"},
        ),
        Panel(
            "Response length",
            "Quantiles of the tokens of rollouts that were not interrupted.",
            "short",
            quantiles("rollout_response_tokens"),
        ),
        Panel(
            "Latency of a rollout",
            "From the arrival of its request to its end.",
            "s",
            quantiles("rollout_latency_seconds"),
        ),
        Panel(
            "Wait for an engine",
            "From the arrival of a request until an engine starts the rollout.",
            "s",
            quantiles("rollout_queue_seconds"),
        ),
    ],
    "Drafting": [
        Panel(
            "Accepted draft tokens per decoding step",
            "Each is a forward pass less for its rollout.",
            "short",
            {JOB: ratio("rollout_accepted_tokens_total", "rollout_decoding_steps_total")},
        ),
        Panel(
            "Decoding time saved",
            "Share of the decoding time, since the engines began, estimated with their cost models.",
            "percentunit",
            {JOB: "rollout_saved_ratio$JOB"},
        ),
        Panel(
            "Acceptance rate",
            "Share of the verified draft tokens that was accepted.",
            "percentunit",
            {JOB: ratio("rollout_accepted_tokens_total", "rollout_draft_tokens_total")},
        ),
        Panel(
            "Acceptance rate by source",
            "The sources are the history, the rollout's own text (self), siblings, and other problems.",
            "percentunit",
            {
                "{{source}}": ratio(
                    "rollout_engine_source_accepted_tokens_total",
                    "rollout_engine_source_draft_tokens_total",
                    by="source",
                )
            },
        ),
        Panel(
            "Acceptance rate by position of the draft",
            "Later tokens of a draft are verified only if they are likely to be accepted.",
            "percentunit",
            {
                "{{position}}": ratio(
                    "rollout_engine_position_accepted_tokens_total",
                    "rollout_engine_position_draft_tokens_total",
                    by="position",
                )
            },
        ),
        Panel(
            "Accepted draft tokens per step of a rollout",
            "Quantiles over rollouts: 50 % of the rollouts have fewer than the lowest line.",
            "short",
            quantiles("rollout_accepted_tokens_per_step"),
        ),
        Panel(
            "Engines on which drafting is disabled",
            "By the governor because it did not pay, or because the engine runs without speculation.",
            "short",
            {
                "governor {{job}}": "sum by (namespace, job) (rollout_engine_drafting_disabled$JOB)",
                "no speculation {{job}}": "rollout_engines_speculation_disabled$JOB",
            },
        ),
        Panel(
            "Time of the drafter",
            "Share of each second that the drafter takes on the critical path of an engine.",
            "percentunit",
            {ENGINE: "rate(rollout_engine_drafting_seconds_total$JOB$RATE)"},
        ),
        Panel("Memory of the suffix index", "Of each engine.", "bytes", {ENGINE: "rollout_engine_index_bytes$JOB"}),
    ],
    "Weights": [
        Panel("Weight version", "That the engines should serve.", "short", {JOB: "rollout_weight_version$JOB"}),
        Panel(
            "Staleness of rollouts",
            "Weight versions by which the oldest token of a rollout is behind the newest version at its end.",
            "short",
            quantiles("rollout_staleness_versions"),
        ),
        Panel(
            "Duration of weight updates",
            "From the order to load weights until an engine serves them, and the part of it in which decoding pauses.",
            "s",
            {
                "update {{job}} {{engine}}": "rollout_engine_weights_update_seconds$JOB",
                "pause {{job}} {{engine}}": "rollout_engine_weights_gap_seconds$JOB",
            },
        ),
    ],
    "Engines": [
        Panel(
            "Engines",
            "With a valid lease, lost in ten minutes, and unable to start.",
            "short",
            {
                "live {{job}}": "rollout_engines$JOB",
                "lost {{job}}": "increase(rollout_engines_lost_total$JOB[10m])",
                "failed {{job}}": "rollout_engines_failed$JOB",
            },
        ),
        Panel(
            "Rollouts that an engine decodes", "The size of its batch.", "short", {ENGINE: "rollout_engine_running$JOB"}
        ),
        Panel(
            "KV cache in use",
            "Of each engine. At 100 %, rollouts are preempted and lose their keys and values.",
            "percentunit",
            {ENGINE: "rollout_engine_kv_cache_usage$JOB"},
        ),
        Panel(
            "Preemptions in ten minutes",
            "How often a running rollout lost its keys and values.",
            "short",
            {ENGINE: "increase(rollout_engine_preemptions_total$JOB[10m])"},
        ),
        Panel(
            "Cached share of prompt tokens",
            "Tokens of prompts and prefixes whose keys and values were cached.",
            "percentunit",
            {JOB: ratio("rollout_engine_cached_tokens_total", "rollout_engine_prompt_tokens_total")},
        ),
        Panel(
            "Failures in ten minutes",
            "Of drafting, each at the cost of one step's drafts, and of reads and writes of the history.",
            "short",
            {
                "drafting {{job}} {{engine}}": "increase(rollout_engine_drafting_failures_total$JOB[10m])",
                "history {{job}} {{engine}}": "increase(rollout_engine_history_failures_total$JOB[10m])",
            },
        ),
    ],
    "Messages": [
        Panel(
            "Unread results",
            "Of each client. One that does not read its results gets no new rollouts.",
            "bytes",
            {"{{job}} {{client}}": "rollout_results_unread_bytes$JOB"},
        ),
        Panel(
            "Dead letters in ten minutes",
            "Messages that the job could not process.",
            "short",
            {JOB: "increase(rollout_dead_letters_total$JOB[10m])"},
        ),
        Panel(
            "Evidence of distribution drift",
            "An e-value: 1 means none, and 1000 raises the alarm that drafting changes what is sampled.",
            "short",
            {JOB: "rollout_drift_e_value$JOB"},
        ),
    ],
}

CLUSTER_ROWS: dict[str, list[Panel]] = {
    "Jobs": [
        Panel(
            "Jobs by state",
            "All jobs of the operator.",
            "short",
            {"{{state}}": "sum by (state) (rollout_operator_jobs)"},
        ),
        Panel(
            "Response tokens per second",
            "Of each job.",
            "short",
            {JOB: "sum by (namespace, job) (rollout_tokens_per_second)"},
        ),
        Panel("Engines", "Of each job.", "short", {JOB: "sum by (namespace, job) (rollout_engines)"}),
        Panel(
            "GPUs",
            "Of the worker pods of each job, also while they wait for nodes.",
            "short",
            {JOB: "max by (namespace, job) (rollout_operator_job_gpus)"},
        ),
        Panel(
            "Response tokens per second and engine",
            "Of each job. Compare jobs with the same model and the same GPUs.",
            "short",
            {JOB: "sum by (namespace, job) (rollout_tokens_per_second) / sum by (namespace, job) (rollout_engines)"},
        ),
        Panel(
            "Engines without rollouts",
            "Share of each job's engines. They hold GPUs, but decode nothing.",
            "percentunit",
            {JOB: "avg by (namespace, job) (rollout_engine_running == bool 0)"},
        ),
    ],
    "Operator": [
        Panel(
            "Leading operators",
            "One of them should lead. The others wait.",
            "short",
            {"{{namespace}}": "sum by (namespace) (rollout_operator_leading)"},
        ),
        Panel(
            "Reconciles per second",
            "Failed ones are retried at growing intervals, and conflicts at once.",
            "short",
            {
                "all": "sum by (namespace) (rate(rollout_operator_reconciles_total$RATE))",
                "failed": "sum by (namespace) (rate(rollout_operator_reconcile_errors_total$RATE))",
                "conflicts": "sum by (namespace) (rate(rollout_operator_reconcile_conflicts_total$RATE))",
            },
        ),
        Panel(
            "Requests to the API server per second",
            "By verb and kind.",
            "short",
            {"{{verb}} {{kind}}": "sum by (verb, kind) (rate(rollout_operator_api_requests_total$RATE))"},
        ),
    ],
    "Histories": [
        Panel(
            "Size in Redis",
            "Of each history, and its byte cap.",
            "bytes",
            {
                "{{history}}": "max by (history) (rollout_history_bytes)",
                "cap of {{history}}": "max by (history) (rollout_history_max_bytes)",
            },
        ),
        Panel("Problems", "Of each history.", "short", {"{{history}}": "max by (history) (rollout_history_problems)"}),
        Panel(
            "Problems evicted in ten minutes",
            "Because of the byte cap.",
            "short",
            {"{{history}}": "sum by (history) (increase(rollout_history_evicted_problems_total[10m]))"},
        ),
        Panel(
            "Duration of the last maintenance",
            "Of each history.",
            "s",
            {"{{history}}": "max by (history) (rollout_history_last_maintenance_seconds)"},
        ),
        Panel(
            "Failed maintenance runs in ten minutes",
            "They are retried.",
            "short",
            {"{{history}}": "sum by (history) (increase(rollout_history_maintenance_failures_total[10m]))"},
        ),
        Panel("Redis reachable", "By the history service.", "short", {"reachable": "min(rollout_history_redis_up)"}),
    ],
}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": label,
        "datasource": _DATASOURCE,
        "query": query,
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": "timeseries",
        "datasource": _DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": _expression(query), "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _expression(query: str) -> str:
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def dashboard(title: str, uid: str, rows: dict[str, list[Panel]], variables: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a dashboard in Grafana's JSON model, with three panels beside each other under the title of their row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for name, members in rows.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "title": name,
                "type": "row",
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(members):
            x, line = index * _WIDTH % _COLUMNS, index * _WIDTH // _COLUMNS
            panels.append(_panel(panel, len(panels) + 1, x, y + line * _HEIGHT))
        y += -(-len(members) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "title": title,
        "uid": uid,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["das-rollout"],
        "links": [{"type": "dashboards", "tags": ["das-rollout"], "title": "das-rollout", "asDropdown": True}],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *variables,
            ]
        },
        "panels": panels,
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """Return all dashboards by the name of their file."""
    variables = [
        _variable("namespace", "Namespace", "label_values(rollout_tokens_per_second, namespace)"),
        _variable("job", "Job", 'label_values(rollout_tokens_per_second{namespace=~"$namespace"}, job)'),
    ]
    return {
        "job.json": dashboard("RolloutJobs", "das-rollout", JOB_ROWS, variables),
        "cluster.json": dashboard("das-rollout: operator and histories", "das-rollout-cluster", CLUSTER_ROWS, []),
    }


def _as_json(content: dict[str, Any]) -> str:
    """Return a dashboard as JSON with one line for each panel."""
    settings = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items() if name != "panels"]
    panels = ",\n ".join(json.dumps(panel) for panel in content["panels"])
    return "{\n" + ",\n".join([*settings, f'"panels": [\n {panels}\n]']) + "\n}\n"


def main() -> None:
    """Write the files."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, content in dashboards().items():
        (DIRECTORY / name).write_text(_as_json(content))


if __name__ == "__main__":
    main()
