"""The coordinator's status as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollout_worker.job.coordinator.status import CoordinatorStatus, StatusBoard


class StatusMetrics:
    """A ``prometheus_client`` collector of the last status. Labels name the job, engine or client, never a prompt."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family for each figure."""
        status = self._board.last
        if status is None:
            return
        job = [status["job"]]
        for name, (text, value) in self._gauges(status).items():
            yield _family(GaugeMetricFamily, name, text, ["job"], [(job, value)])
        for name, (text, value) in _counters(status).items():
            yield _family(CounterMetricFamily, name, text, ["job"], [(job, value)])
        unread = [([*job, client], count) for client, count in status["unread"].items()]
        yield _family(
            GaugeMetricFamily, "results_unread", "Results that a client has not read.", ["job", "client"], unread
        )
        for name in sorted({name for engine in status["engines"] for name in engine["counters"]}):
            rows = [
                ([*job, engine["name"]], engine["counters"][name])
                for engine in status["engines"]
                if name in engine["counters"]
            ]
            text = "From the engine's last report."
            yield _family(GaugeMetricFamily, f"engine_{name}", text, ["job", "engine"], rows)

    def _gauges(self, status: CoordinatorStatus) -> dict[str, tuple[str, float]]:
        gauges: dict[str, tuple[str, float]] = {
            "requests_open": ("Requests that are not fully answered.", status["requests"]),
            "rollouts_waiting": ("Rollouts that are not assigned to an engine.", status["waiting"]),
            "rollouts_assigned": ("Rollouts that are assigned to an engine.", status["assigned"]),
            "engines": ("Engines with a valid lease.", len(status["engines"])),
            "engines_failed": ("Engines that cannot start.", len(status["engine_errors"])),
            "status_age_seconds": ("Age of these figures; it grows while Redis is unavailable.", self._board.age_s),
            "weight_version": ("Weight version that the engines should serve.", status["weight_version"]),
            "drift_e_value": (
                "Evidence that drafting changes the output distribution; 1000 raises the alarm.",
                status["drift_e_value"],
            ),
            "distribution_drift": ("Whether that alarm was ever raised.", float(status["distribution_drift"])),
            "engines_speculation_disabled": (
                "Engines without speculation because drafting did not pay.",
                sum(engine["speculation_disabled"] for engine in status["engines"]),
            ),
            "engines_unverified": (
                "Engines on which vLLM does not verify the drafts that are proposed.",
                len(status["unverified"]),
            ),
            "tokens_per_second": ("Response tokens per second over the last seconds.", status["tokens_per_second"]),
        }
        if status["saved"] is not None:
            gauges["saved_ratio"] = ("Fraction of the decoding time that drafting has saved.", status["saved"])
        if status["seconds_left"] is not None:
            gauges["left_seconds"] = ("Estimated time until all open requests are answered.", status["seconds_left"])
        if status["tail_seconds"] is not None:
            gauges["tail_seconds"] = ("Estimated time until the longest open rollout ends.", status["tail_seconds"])
        return gauges


def _counters(status: CoordinatorStatus) -> dict[str, tuple[str, float]]:
    return {
        "rollouts": ("Rollouts that have ended.", status["done"]),
        "tokens": ("Response tokens of rollouts that have ended.", status["tokens"]),
        "steps": ("Decoding steps of rollouts that have ended.", status["steps"]),
        "drafted_tokens": ("Draft tokens of rollouts that have ended.", status["drafted"]),
        "accepted_tokens": ("Accepted draft tokens of rollouts that have ended.", status["accepted"]),
        "canaries": ("Rollouts without drafts that were compared with their siblings.", status["canaries"]),
        "engines_lost": ("Engines that this coordinator has lost.", status["engines_lost"]),
        "rollouts_migrated": ("Rollouts that this coordinator has migrated to idle engines.", status["migrated"]),
        "dead_letters": ("Messages that this coordinator has moved to the dead letters.", status["dead_letters"]),
    }


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: list[str],
    rows: Sequence[tuple[list[str], float]],
) -> Metric:
    family = kind(f"rollout_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
