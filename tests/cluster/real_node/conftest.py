"""A cluster whose pods run containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.example_jobs import ExampleJobs
from tests.support.cluster.real_cluster import RealCluster, real_cluster
from tests.support.waiting import wait_for

JOB_DELETION_TIMEOUT_S = 240.0
"""The cleanup of a job whose image cannot be pulled takes its timeout of two minutes."""


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster with the chart installed. At the end, all jobs must have been deleted."""
    with real_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
        wait_for(
            lambda: not cluster.list_objects("rolloutjob"),
            JOB_DELETION_TIMEOUT_S,
            lambda: cluster.kubectl("get", "rolloutjobs,pods"),
        )


@pytest.fixture(scope="package")
def examples(cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExampleJobs]:
    """The example jobs, which tests run when they need them. ``kubectl get rj -w`` watches them."""
    jobs = ExampleJobs(cluster, tmp_path_factory.mktemp("examples") / "watch.log")
    with cluster.watch_jobs(jobs.watch_log):
        yield jobs
    jobs.delete()
