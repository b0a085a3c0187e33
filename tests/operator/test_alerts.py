"""The chart's alerts, evaluated by Prometheus' own test tool on made-up series."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster.chart import CHART
from tests.support.prometheus_server import needs_prometheus

ALERTS: list[dict[str, Any]] = yaml.safe_load(
    (CHART / "files" / "alerts.yaml").read_text().replace("RELEASE_NAMESPACE", "rollouts")
)
JOB = '{namespace="a", job="a/math"}'
ENGINE = '{namespace="a", job="a/math", engine="engine-0"}'
OPERATOR = '{namespace="rollouts"}'

HEALTHY = {
    f"rollout_operator_leading{OPERATOR}": "1x120",
    f"rollout_operator_reconciles_total{OPERATOR}": "0+60x120",
    f"rollout_operator_reconcile_errors_total{OPERATOR}": "0+3x120",
    'rollout_operator_job_state{namespace="a", job="a/earlier", state="Failed"}': "1x120",
    'rollout_operator_job_state{namespace="a", job="a/math", state="Starting"}': "1x40 _x80",
    'rollout_operator_job_state{namespace="a", job="a/math", state="Running"}': "_x41 1x79",
    f"rollout_operator_job_gpus{JOB}": "8x120",
    f"rollout_rollouts_total{JOB}": "0+9x120",
    f"rollout_requests_open{JOB}": "5x120",
    f"rollout_tokens_per_second{JOB}": "0x20 900x100",
    f"rollout_status_age_seconds{JOB}": "1x120",
    f"rollout_history_redis_up{OPERATOR}": "1x120",
    f"rollout_engines_failed{JOB}": "0x120",
    f"rollout_engines_lost_total{JOB}": "0x30 1x90",
    f"rollout_weight_version{JOB}": "7x120",
    f"rollout_engine_weight_version{ENGINE}": "6x10 7x110",
    f"rollout_engine_drafting_failures_total{ENGINE}": "2x120",
    f"rollout_distribution_drift{JOB}": "0x120",
    f"rollout_dead_letters_total{JOB}": "4x120",
}
"""Series of a healthy installation, one value per minute."""

FIRING = {
    "RolloutOperatorDown": {f"rollout_operator_leading{OPERATOR}": "0x120"},
    "RolloutReconcilesFail": {f"rollout_operator_reconcile_errors_total{OPERATOR}": "0+7x120"},
    "RolloutJobFailed": {'rollout_operator_job_state{namespace="a", job="a/math", state="Failed"}': "_x70 1x50"},
    "RolloutJobNotRunning": {
        'rollout_operator_job_state{namespace="a", job="a/math", state="Pending"}': "1x10 _x110",
        'rollout_operator_job_state{namespace="a", job="a/math", state="Starting"}': "_x11 1x109",
        'rollout_operator_job_state{namespace="a", job="a/math", state="Running"}': "_x120",
    },
    "RolloutGpusIdle": {f"rollout_requests_open{JOB}": "0x120", f"rollout_rollouts_total{JOB}": "100x120"},
    "RolloutJobStalled": {f"rollout_tokens_per_second{JOB}": "900x20 0x100"},
    "RolloutJobRedisUnreachable": {f"rollout_status_age_seconds{JOB}": "1x20 121+60x100"},
    "RolloutHistoryRedisUnreachable": {f"rollout_history_redis_up{OPERATOR}": "1x20 0x100"},
    "RolloutEnginesFailed": {f"rollout_engines_failed{JOB}": "0x20 2x100"},
    "RolloutEnginesLost": {f"rollout_engines_lost_total{JOB}": "0x60 1+1x59"},
    "RolloutWeightsOutdated": {f"rollout_engine_weight_version{ENGINE}": "6x120"},
    "RolloutDraftingFails": {f"rollout_engine_drafting_failures_total{ENGINE}": "2x80 3x40"},
    "RolloutDistributionDrift": {f"rollout_distribution_drift{JOB}": "0x20 1x100"},
    "RolloutDeadLetters": {f"rollout_dead_letters_total{JOB}": "4x80 5x40"},
}
"""Alert → the series that differ when it fires."""


def check(directory: Path, series: dict[str, str], expected: dict[str, list[dict[str, Any]]], minute: int) -> None:
    """Check with promtool which alerts fire at *minute*."""
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": ALERTS}]}))
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert["alert"], "exp_alerts": expected.get(alert["alert"], [])}
            for alert in ALERTS
        ],
    }
    file = directory / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    result = subprocess.run(["promtool", "test", "rules", file.name], cwd=directory, capture_output=True, text=True)
    assert 0 == result.returncode, result.stdout + result.stderr


@needs_prometheus
def test_no_alert_fires_while_all_is_well(tmp_path: Path) -> None:
    for minute in (45, 60, 115):
        check(tmp_path, HEALTHY, {}, minute)


def test_each_alert_is_tested() -> None:
    assert FIRING.keys() == {alert["alert"] for alert in ALERTS}


@needs_prometheus
@pytest.mark.parametrize("name", FIRING)
def test_an_alert_fires_alone_and_names_what_is_wrong(name: str, tmp_path: Path) -> None:
    rule = next(alert for alert in ALERTS if alert["alert"] == name)
    of_installation = re.search("rollout_operator_(leading|reconcile)|history", rule["expr"]) is not None
    labels = {"namespace": "rollouts"} if of_installation else {}
    if not labels:
        labels = {"namespace": "a", "job": "a/math"} | (
            {"engine": "engine-0"} if "rollout_engine_" in rule["expr"] else {}
        )
    value = {"RolloutGpusIdle": "8", "RolloutEnginesFailed": "2", "RolloutWeightsOutdated": "6"}.get(name, "")
    annotations = {key: rendered(text, labels, value) for key, text in rule["annotations"].items()}
    assert "a/a/math" not in "".join(annotations.values())
    assert labels.get("job", "") in annotations["summary"]
    alert = {"exp_labels": labels | rule["labels"], "exp_annotations": annotations}
    check(tmp_path, HEALTHY | FIRING[name], {name: [alert]}, 90)


def rendered(text: str, labels: dict[str, str], value: str) -> str:
    """Return an annotation with its template filled in."""
    for label, content in labels.items():
        text = text.replace(f"{{{{ $labels.{label} }}}}", content)
    text = text.replace("{{ $value }}", value)
    assert "{{" not in text, text
    return text
