"""The tail of a step."""

from __future__ import annotations

from rollout_worker.report.analysis.steps import Step

TAIL_SHARE = 0.5
"""The tail of a step begins when fewer than this share of its largest number of running rollouts run, for good.

``rollout_api.figures`` defines it likewise."""


def tail_start(step: Step) -> float:
    """Return the Unix time at which the tail of a step begins; its end if no rollout was sampled."""
    counts = step.running
    if not counts:
        return step.end
    limit = TAIL_SHARE * max(one.count for one in counts)
    begin = counts[-1].time
    for one in reversed(counts):
        if one.count >= limit:
            break
        begin = one.time
    return begin


def tail_fraction(step: Step) -> float:
    """Return the share of the makespan that belongs to the tail."""
    return (step.end - tail_start(step)) / step.makespan if step.makespan > 0 else 0.0
