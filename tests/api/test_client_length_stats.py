"""Length statistics as a trainer reads them: from the server of its job, or from the history's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis

from rollout_api import (
    AsyncRolloutClient,
    InvalidRequestError,
    LengthStats,
    RedisAwayError,
    RedisRefusedError,
    RolloutClient,
    VersionMismatchError,
)
from rollout_worker.embedded_redis import EmbeddedRedis
from tests.support.job_side import HISTORY, JobSide, remember, wait_until
from tests.support.redis_servers import Cluster

ODD = "a {problem} of 100%"
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture
def job(redis_url: str) -> JobSide:
    return JobSide(redis_url)


@contextmanager
def server_in(directory: Path) -> Iterator[EmbeddedRedis]:
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    server = EmbeddedRedis(directory, keep_open=lock)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        os.close(lock)


@pytest.fixture
def history_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """The history's own server."""
    with server_in(tmp_path) as server:
        yield server


def on_its_own_server(job: JobSide) -> None:
    job.redis.hset(job.keys.job, "history_redis", "own")


def test_lengths_of_one_problem_and_of_all(redis_url: str, job: JobSide) -> None:
    remember(job.redis, "p", 4, [(10, False), (20, True)])
    remember(job.redis, ODD, 8, [(30, False)])
    with RolloutClient.connect(redis_url, job.name) as client:
        assert LengthStats.of([(4, 10, False), (4, 20, True)]) == client.length_stats("p")
        assert LengthStats.of([(8, 30, False)]) == client.length_stats(ODD)
        assert LengthStats.of([(4, 10, False), (4, 20, True), (8, 30, False)]) == client.length_stats()
        assert LengthStats.of([]) == client.length_stats("never seen")
        assert HISTORY.full_name == client.job.history


def test_an_asynchronous_trainer_reads_what_is_there_now(redis_url: str, job: JobSide) -> None:
    async def trainer() -> list[int]:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            counts = [(await client.length_stats()).count, (await client.length_stats("p")).count]
            remember(job.redis, "p", 1, [(10, False), (20, True)])
            return [*counts, (await client.length_stats()).count, (await client.length_stats("p")).count]

    assert [0, 0, 2, 2] == run(trainer())


def test_lengths_of_all_come_from_every_shard(redis_url: str, job: JobSide) -> None:
    for index in range(100):
        remember(job.redis, f"problem {index}", 0, [(index + 1, False)])
    with RolloutClient.connect(redis_url, job.name) as client:
        stats = client.length_stats()
    assert (100, 50, 100) == (stats.count, stats.quantile(0.5), stats.longest)


def test_a_job_of_an_older_version_does_not_say_its_history(redis_url: str, job: JobSide) -> None:
    job.redis.hdel(job.keys.job, "history")
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(VersionMismatchError, match=r"job default/math does not say .* upgrade the job's image"),
    ):
        client.length_stats()


def test_a_history_on_a_server_of_its_own(redis_url: str, job: JobSide, history_server: EmbeddedRedis) -> None:
    on_its_own_server(job)
    remember(job.redis, "p", 0, [(99, False)])  # of before it was moved
    own = redis.Redis.from_url(history_server.url)
    remember(own, "p", 0, [(10, False)])
    for target in (history_server.url, own):
        with RolloutClient.connect(redis_url, job.name, history_redis=target) as client:
            assert (10, 10) == (client.length_stats("p").longest, client.length_stats().longest)
    wait_until(lambda: len(own.client_list()) == 1)  # that of the test


def test_a_history_on_an_unknown_server_cannot_be_read(redis_url: str, job: JobSide) -> None:
    on_its_own_server(job)
    remember(job.redis, "p", 0, [(99, False)])
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(InvalidRequestError, match=r"default/math-history .* connect\(…, history_redis=…\)"),
    ):
        client.length_stats("p")


def test_a_history_on_the_job_s_server_is_read_there(
    redis_url: str, job: JobSide, history_server: EmbeddedRedis
) -> None:
    remember(job.redis, "p", 0, [(99, False)])
    with RolloutClient.connect(redis_url, job.name, history_redis=history_server.url) as client:
        assert 99 == client.length_stats("p").longest


def test_an_unusable_address_of_the_history_is_refused_at_once(redis_url: str) -> None:
    with pytest.raises(InvalidRequestError, match="'http://here' is no Redis URL"):
        AsyncRolloutClient.connect(redis_url, "default/math", history_redis="http://here")


def test_the_history_s_server_is_named_when_it_is_away(
    redis_url: str, job: JobSide, history_server: EmbeddedRedis
) -> None:
    on_its_own_server(job)
    port = history_server.url.rpartition(":")[2].partition("/")[0]
    with RolloutClient.connect(redis_url, job.name, history_redis=history_server.url, patience=0.5) as client:
        history_server.stop()
        with pytest.raises(RedisAwayError, match=rf"Redis at 127\.0\.0\.1:{port} has been away .* read the lengths"):
            client.length_stats()
        with job.serving():
            assert 2 == len(client.generate([[1]], step=0)[0]), "the job itself is served by another"


def test_missing_rights_are_said(redis_url: str, job: JobSide, history_server: EmbeddedRedis) -> None:
    on_its_own_server(job)
    own = redis.Redis.from_url(history_server.url)
    own.acl_setuser("trainer", enabled=True, passwords=["+secret"], keys=["other:*"], commands=["+@all"])
    port = history_server.url.rpartition(":")[2]
    with (
        RolloutClient.connect(redis_url, job.name, history_redis=f"redis://trainer:secret@127.0.0.1:{port}") as client,
        pytest.raises(RedisRefusedError, match=r"refused to read the lengths of rollouts.* extend the user's ACL"),
    ):
        client.length_stats("p")


@contextmanager
def cluster_in(directory: Path) -> Iterator[tuple[str, redis.Redis]]:
    """URL of a cluster of one node, and a client of that."""
    with Cluster(directory, primaries=1, password="secret") as cluster:
        yield cluster.url, redis.Redis.from_url(cluster.servers[0].url)


def test_a_history_on_a_cluster(redis_url: str, job: JobSide, tmp_path: Path) -> None:
    on_its_own_server(job)
    with (
        cluster_in(tmp_path) as (url, node),
        RolloutClient.connect(redis_url, job.name, history_redis=url, patience=0.5) as client,
    ):
        remember(node, "p", 4, [(10, False)])
        remember(node, ODD, 4, [(30, True)])
        assert (10, 30) == (client.length_stats("p").longest, client.length_stats(ODD).longest)
        assert LengthStats.of([(4, 10, False), (4, 30, True)]) == client.length_stats()
        node.execute_command("CLUSTER", "DELSLOTSRANGE", 0, 16383)
        with pytest.raises(RedisAwayError, match=r"Redis at 127\.0\.0\.1:\d+ has been away"):
            client.length_stats()
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"))
        assert 2 == client.length_stats().count


def test_a_cluster_that_is_away(redis_url: str, job: JobSide, tmp_path: Path) -> None:
    on_its_own_server(job)
    with cluster_in(tmp_path) as (url, _):
        pass
    with (
        RolloutClient.connect(redis_url, job.name, history_redis=url, patience=0.5) as client,
        pytest.raises(RedisAwayError, match=r"Redis at 127\.0\.0\.1:\d+ has been away .* read the lengths"),
    ):
        client.length_stats()
