"""Generate the chart's Grafana dashboards, charts/das-rollout/files/dashboards/: ``python scripts/dashboards.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parents[1] / "charts" / "das-rollout" / "files" / "dashboards"
_JOB = '{namespace=~"$namespace", job=~"$job"}'
_LEGEND = "{{job}}"
"""The label ``job`` is NAMESPACE/NAME."""
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_MAX_LINE = 120
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One panel: its title, a description for its reader, a unit of Grafana, and queries with their legends."""

    title: str
    description: str
    unit: str
    queries: Sequence[tuple[str, str]]


def quantiles(metric: str, selector: str, by: str = "namespace, job") -> list[tuple[str, str]]:
    """Return queries for the 50 %, 90 % and 99 % quantiles of a histogram."""
    return [
        (
            f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket{selector}[$__rate_interval])))",
            f"{round(100 * q)} % {_LEGEND}",
        )
        for q in (0.5, 0.9, 0.99)
    ]


def ratio(numerator: str, denominator: str, selector: str, by: str) -> str:
    """Return a query for the ratio of the rates of two counters."""
    rates = [f"sum by ({by}) (rate({name}{selector}[$__rate_interval]))" for name in (numerator, denominator)]
    return " / ".join(rates)


JOB_ROWS: dict[str, list[Panel]] = {
    "Progress": [
        Panel(
            "Response tokens per second",
            "Speed of all engines together, over the last ten seconds.",
            "short",
            [(f"rollout_tokens_per_second{_JOB}", _LEGEND)],
        ),
        Panel(
            "Rollouts on engines and waiting",
            "When few are left on the engines and none waits, the step is in its tail.",
            "short",
            [
                (f"rollout_rollouts_assigned{_JOB}", f"on engines {_LEGEND}"),
                (f"rollout_rollouts_waiting{_JOB}", f"waiting {_LEGEND}"),
            ],
        ),
        Panel(
            "Estimated time left",
            "Until all open requests are answered, and until the longest open rollout ends, which more engines do not "
            "shorten.",
            "s",
            [
                (f"rollout_remaining_seconds{_JOB}", f"all {_LEGEND}"),
                (f"rollout_tail_seconds{_JOB}", f"longest {_LEGEND}"),
            ],
        ),
        Panel(
            "Response length",
            "Quantiles of the tokens of rollouts that were not interrupted.",
            "short",
            quantiles("rollout_response_tokens", _JOB),
        ),
        Panel(
            "Latency of a rollout",
            "From the arrival of its request to its end.",
            "s",
            quantiles("rollout_latency_seconds", _JOB),
        ),
        Panel(
            "Wait for an engine",
            "From the arrival of a request until an engine starts the rollout.",
            "s",
            quantiles("rollout_queue_seconds", _JOB),
        ),
    ],
    "Drafting": [
        Panel(
            "Accepted draft tokens per decoding step",
            "Each is a forward pass less for its rollout.",
            "short",
            [
                (
                    ratio("rollout_accepted_tokens_total", "rollout_decoding_steps_total", _JOB, "namespace, job"),
                    _LEGEND,
                )
            ],
        ),
        Panel(
            "Decoding time saved",
            "Share of the decoding time, since the engines began, estimated with their cost models.",
            "percentunit",
            [(f"rollout_saved_ratio{_JOB}", _LEGEND)],
        ),
        Panel(
            "Acceptance rate",
            "Share of the verified draft tokens that was accepted.",
            "percentunit",
            [
                (
                    ratio("rollout_accepted_tokens_total", "rollout_draft_tokens_total", _JOB, "namespace, job"),
                    _LEGEND,
                )
            ],
        ),
        Panel(
            "Acceptance rate by source",
            "The sources are the history, the rollout's own text (self), siblings, and other problems.",
            "percentunit",
            [
                (
                    ratio(
                        "rollout_engine_source_accepted_tokens_total",
                        "rollout_engine_source_draft_tokens_total",
                        _JOB,
                        "source",
                    ),
                    "{{source}}",
                )
            ],
        ),
        Panel(
            "Acceptance rate by position of the draft",
            "Later tokens of a draft are verified only if they are likely to be accepted.",
            "percentunit",
            [
                (
                    ratio(
                        "rollout_engine_position_accepted_tokens_total",
                        "rollout_engine_position_draft_tokens_total",
                        _JOB,
                        "position",
                    ),
                    "{{position}}",
                )
            ],
        ),
        Panel(
            "Accepted draft tokens per step of a rollout",
            "Quantiles over rollouts: 50 % of the rollouts have fewer than the lowest line.",
            "short",
            quantiles("rollout_accepted_tokens_per_step", _JOB),
        ),
        Panel(
            "Engines on which drafting is disabled",
            "By the governor because it did not pay, or because the engine runs without speculation.",
            "short",
            [
                (f"sum by (namespace, job) (rollout_engine_drafting_disabled{_JOB})", f"governor {_LEGEND}"),
                (f"rollout_engines_speculation_disabled{_JOB}", f"no speculation {_LEGEND}"),
            ],
        ),
        Panel(
            "Time of the drafter",
            "Share of each second that the drafter takes on the critical path of an engine.",
            "percentunit",
            [(f"rate(rollout_engine_drafting_seconds_total{_JOB}[$__rate_interval])", "{{job}} {{engine}}")],
        ),
        Panel(
            "Memory of the suffix index",
            "Of each engine.",
            "bytes",
            [(f"rollout_engine_index_bytes{_JOB}", "{{job}} {{engine}}")],
        ),
    ],
    "Weights": [
        Panel(
            "Weight version", "That the engines should serve.", "short", [(f"rollout_weight_version{_JOB}", _LEGEND)]
        ),
        Panel(
            "Staleness of rollouts",
            "Weight versions by which the oldest token of a rollout is behind the newest version at its end.",
            "short",
            quantiles("rollout_staleness_versions", _JOB),
        ),
        Panel(
            "Duration of weight updates",
            "From the order to load weights until an engine serves them, and the part of it in which decoding pauses.",
            "s",
            [
                (f"rollout_engine_weights_update_seconds{_JOB}", "update {{job}} {{engine}}"),
                (f"rollout_engine_weights_gap_seconds{_JOB}", "pause {{job}} {{engine}}"),
            ],
        ),
    ],
    "Engines": [
        Panel(
            "Engines",
            "With a valid lease, lost in ten minutes, and unable to start.",
            "short",
            [
                (f"rollout_engines{_JOB}", f"live {_LEGEND}"),
                (f"increase(rollout_engines_lost_total{_JOB}[10m])", f"lost {_LEGEND}"),
                (f"rollout_engines_failed{_JOB}", f"failed {_LEGEND}"),
            ],
        ),
        Panel(
            "Rollouts that an engine decodes",
            "The size of its batch.",
            "short",
            [(f"rollout_engine_running{_JOB}", "{{job}} {{engine}}")],
        ),
        Panel(
            "KV cache in use",
            "Of each engine. At 100 %, rollouts are preempted and lose their keys and values.",
            "percentunit",
            [(f"rollout_engine_kv_cache_usage{_JOB}", "{{job}} {{engine}}")],
        ),
        Panel(
            "Preemptions in ten minutes",
            "How often a running rollout lost its keys and values.",
            "short",
            [(f"increase(rollout_engine_preemptions_total{_JOB}[10m])", "{{job}} {{engine}}")],
        ),
        Panel(
            "Cached share of prompt tokens",
            "Tokens of prompts and prefixes whose keys and values were cached.",
            "percentunit",
            [
                (
                    ratio(
                        "rollout_engine_cached_tokens_total",
                        "rollout_engine_prompt_tokens_total",
                        _JOB,
                        "namespace, job",
                    ),
                    _LEGEND,
                )
            ],
        ),
        Panel(
            "Failures in ten minutes",
            "Of drafting, each at the cost of one step's drafts, and of reads and writes of the history.",
            "short",
            [
                (f"increase(rollout_engine_drafting_failures_total{_JOB}[10m])", "drafting {{job}} {{engine}}"),
                (f"increase(rollout_engine_history_failures_total{_JOB}[10m])", "history {{job}} {{engine}}"),
            ],
        ),
    ],
    "Messages": [
        Panel(
            "Unread results",
            "Of each client. One that does not read its results gets no new rollouts.",
            "short",
            [(f"rollout_results_unread{_JOB}", "{{job}} {{client}}")],
        ),
        Panel(
            "Dead letters in ten minutes",
            "Messages that the job could not process.",
            "short",
            [(f"increase(rollout_dead_letters_total{_JOB}[10m])", _LEGEND)],
        ),
        Panel(
            "Evidence of distribution drift",
            "An e-value: 1 means none, and 1000 raises the alarm that drafting changes what is sampled.",
            "short",
            [(f"rollout_drift_e_value{_JOB}", _LEGEND)],
        ),
    ],
}

CLUSTER_ROWS: dict[str, list[Panel]] = {
    "Jobs": [
        Panel(
            "Jobs by state",
            "All jobs of the operator.",
            "short",
            [("sum by (state) (rollout_operator_jobs)", "{{state}}")],
        ),
        Panel(
            "Response tokens per second",
            "Of each job.",
            "short",
            [("sum by (namespace, job) (rollout_tokens_per_second)", _LEGEND)],
        ),
        Panel("Engines", "Of each job.", "short", [("sum by (namespace, job) (rollout_engines)", _LEGEND)]),
        Panel(
            "GPUs",
            "Of the worker pods of each job, also while they wait for nodes.",
            "short",
            [("max by (namespace, job) (rollout_operator_job_gpus)", _LEGEND)],
        ),
        Panel(
            "Response tokens per second and engine",
            "Of each job. Compare jobs with the same model and the same GPUs.",
            "short",
            [
                (
                    "sum by (namespace, job) (rollout_tokens_per_second) / sum by (namespace, job) (rollout_engines)",
                    _LEGEND,
                )
            ],
        ),
        Panel(
            "Engines without rollouts",
            "Share of each job's engines. They hold GPUs, but decode nothing.",
            "percentunit",
            [("avg by (namespace, job) (rollout_engine_running == bool 0)", _LEGEND)],
        ),
    ],
    "Operator": [
        Panel(
            "Leading operators",
            "One of them should lead. The others wait.",
            "short",
            [("sum by (namespace) (rollout_operator_leading)", "{{namespace}}")],
        ),
        Panel(
            "Reconciles per second",
            "Failed ones are retried at growing intervals, and conflicts at once.",
            "short",
            [
                ("sum by (namespace) (rate(rollout_operator_reconciles_total[$__rate_interval]))", "all"),
                ("sum by (namespace) (rate(rollout_operator_reconcile_errors_total[$__rate_interval]))", "failed"),
                (
                    "sum by (namespace) (rate(rollout_operator_reconcile_conflicts_total[$__rate_interval]))",
                    "conflicts",
                ),
            ],
        ),
        Panel(
            "Requests to the API server per second",
            "By verb and kind.",
            "short",
            [
                (
                    "sum by (verb, kind) (rate(rollout_operator_api_requests_total[$__rate_interval]))",
                    "{{verb}} {{kind}}",
                )
            ],
        ),
    ],
    "Histories": [
        Panel(
            "Size in Redis",
            "Of each history, and its byte cap.",
            "bytes",
            [
                ("max by (history) (rollout_history_bytes)", "{{history}}"),
                ("max by (history) (rollout_history_max_bytes)", "cap of {{history}}"),
            ],
        ),
        Panel(
            "Problems", "Of each history.", "short", [("max by (history) (rollout_history_problems)", "{{history}}")]
        ),
        Panel(
            "Problems evicted in ten minutes",
            "Because of the byte cap.",
            "short",
            [("sum by (history) (increase(rollout_history_evicted_problems_total[10m]))", "{{history}}")],
        ),
        Panel(
            "Duration of the last maintenance",
            "Of each history.",
            "s",
            [("max by (history) (rollout_history_last_maintenance_seconds)", "{{history}}")],
        ),
        Panel(
            "Failed maintenance runs in ten minutes",
            "They are retried.",
            "short",
            [("sum by (history) (increase(rollout_history_maintenance_failures_total[10m]))", "{{history}}")],
        ),
        Panel("Redis reachable", "By the history service.", "short", [("min(rollout_history_redis_up)", "reachable")]),
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
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


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


def _to_json(value: Any, indent: int = 0) -> str:
    """Return a value as JSON that has each object and array on one line if it fits."""
    text = json.dumps(value)
    if not isinstance(value, dict | list) or indent + len(text) <= _MAX_LINE:
        return text
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {_to_json(field, indent + 1)}" for name, field in value.items()]
    else:
        lines = [_to_json(entry, indent + 1) for entry in value]
    spaces = "\n" + " " * indent
    return text[0] + ",".join(f"{spaces} {line}" for line in lines) + spaces + text[-1]


def main() -> None:
    """Write the files."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, content in dashboards().items():
        (DIRECTORY / name).write_text(_to_json(content) + "\n")


if __name__ == "__main__":
    main()
