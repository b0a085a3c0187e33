"""The benchmark of the message path."""

from __future__ import annotations

from benchmarks.load import Workload, figures_of, measure, running_job


def test_stub_engines_take_part_in_the_protocol() -> None:
    workload = Workload(num_engines=2, tokens=8, generation_s=0.2, http_trajectories=0, model="/model")
    with running_job(workload) as job:
        load = measure(job, workload, trajectories=4, seconds=1.0)
    assert load.rollouts_per_s > 4
    values = {figure.name: figure.value for figure in figures_of({}, [load])}
    assert values["CPU time per rollout, all processes, 4 trajectories"] > 0
    assert values["added by the message path, p50, 4 trajectories"] > 0
    assert values["memory of Redis, 4 trajectories"] > 0
