"""Statistics of lengths and rewards as a trainer reads them, from the job's Redis or from the history's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api import (
    AsyncRolloutClient,
    InvalidRequestError,
    LengthStats,
    RedisRefusedError,
    RedisUnreachableError,
    RewardStats,
    RolloutClient,
)
from tests.support.client_tests import run
from tests.support.fake_job import HISTORY, FakeJob, record_lengths, record_rewards
from tests.support.redis_servers import Cluster, Server
from tests.support.waiting import wait_for

PROBLEM_WITH_SPECIAL_CHARACTERS = "a {problem} of 100%"


@pytest.fixture
def history_server(tmp_path: Path) -> Iterator[Server]:
    """The history's own Redis."""
    with Server(tmp_path, password="secret") as server:
        yield server


def announce_own_history_redis(job: FakeJob) -> None:
    """Make the job say that its history has a Redis of its own."""
    job.redis.hset(job.keys.job, "history_redis", "own")


def test_statistics_of_one_problem_and_of_all(redis_url: str, job: FakeJob) -> None:
    record_lengths(job.redis, "p", 4, [(10, False), (20, True)])
    record_lengths(job.redis, PROBLEM_WITH_SPECIAL_CHARACTERS, 8, [(30, False)])
    with RolloutClient.connect(redis_url, job.name) as client:
        assert LengthStats.from_lengths([(4, 10, False), (4, 20, True)]) == client.length_stats("p")
        assert LengthStats.from_lengths([(8, 30, False)]) == client.length_stats(PROBLEM_WITH_SPECIAL_CHARACTERS)
        of_all = LengthStats.from_lengths([(4, 10, False), (4, 20, True), (8, 30, False)], min_rollouts=64)
        assert of_all == client.length_stats()
        assert LengthStats.from_lengths([]) == client.length_stats("never seen")
        assert HISTORY.full_name == client.job.history


def test_async_client_reads_the_current_lengths(redis_url: str, job: FakeJob) -> None:
    async def trainer() -> list[int]:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            counts = [(await client.length_stats()).count, (await client.length_stats("p")).count]
            record_lengths(job.redis, "p", 1, [(10, False), (20, True)])
            return [*counts, (await client.length_stats()).count, (await client.length_stats("p")).count]

    assert [0, 0, 2, 2] == run(trainer())


def test_statistics_of_all_problems_cover_every_shard(redis_url: str, job: FakeJob) -> None:
    for index in range(100):
        record_lengths(job.redis, f"problem {index}", 0, [(index + 1, False)])
    with RolloutClient.connect(redis_url, job.name) as client:
        stats = client.length_stats()
    assert (100, 50, 100) == (stats.count, stats.quantile(0.5), stats.longest)


def test_history_with_its_own_redis(redis_url: str, job: FakeJob, history_server: Server) -> None:
    announce_own_history_redis(job)
    record_lengths(job.redis, "p", 0, [(99, False)])  # lengths from before the history was moved
    own = redis.Redis.from_url(history_server.url)
    record_lengths(own, "p", 0, [(10, False)])
    for target in (history_server.url, own):
        with RolloutClient.connect(redis_url, job.name, history_redis=target) as client:
            assert (10, 10) == (client.length_stats("p").longest, client.length_stats().longest)
    wait_for(lambda: len(own.client_list()) == 1)  # the connection of the test


def test_unknown_history_redis_is_an_error(redis_url: str, job: FakeJob) -> None:
    announce_own_history_redis(job)
    record_lengths(job.redis, "p", 0, [(99, False)])
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(InvalidRequestError, match=r"default/math-history .* connect\(…, history_redis=…\)"),
    ):
        client.length_stats("p")


def test_history_on_the_jobs_redis_is_read_there(redis_url: str, job: FakeJob, history_server: Server) -> None:
    record_lengths(job.redis, "p", 0, [(99, False)])
    with RolloutClient.connect(redis_url, job.name, history_redis=history_server.url) as client:
        assert 99 == client.length_stats("p").longest


def test_invalid_history_address_is_rejected_at_once(redis_url: str) -> None:
    with pytest.raises(InvalidRequestError, match="this value, which is not shown, is not a Redis URL"):
        AsyncRolloutClient.connect(redis_url, "default/math", history_redis="http://here")


def test_unreachable_history_redis_is_named_in_the_error(redis_url: str, job: FakeJob, history_server: Server) -> None:
    announce_own_history_redis(job)
    with RolloutClient.connect(redis_url, job.name, history_redis=history_server.url, reconnect_timeout=0.5) as client:
        history_server.stop()
        with pytest.raises(
            RedisUnreachableError,
            match=rf"cannot reach Redis at 127\.0\.0\.1:{history_server.port} to read the lengths",
        ):
            client.length_stats()
        with job.serving():
            assert 2 == len(client.generate([[1]], step=0)[0]), "the job's own Redis is still available"


def test_missing_rights_are_reported(redis_url: str, job: FakeJob, history_server: Server) -> None:
    announce_own_history_redis(job)
    own = redis.Redis.from_url(history_server.url)
    own.acl_setuser("trainer", enabled=True, passwords=["+secret"], keys=["other:*"], commands=["+@all"])
    with (
        RolloutClient.connect(redis_url, job.name, history_redis=history_server.url_of("trainer", "secret")) as client,
        pytest.raises(RedisRefusedError, match=r"refused to read the lengths of rollouts.* extend the user's ACL"),
    ):
        client.length_stats("p")


@contextmanager
def cluster_in(directory: Path) -> Iterator[tuple[str, redis.Redis]]:
    """URL of a cluster with one node, and a client of that node."""
    with Cluster(directory, primaries=1, password="secret") as cluster:
        yield cluster.url, redis.Redis.from_url(cluster.servers[0].url)


def test_history_on_a_cluster(redis_url: str, job: FakeJob, tmp_path: Path) -> None:
    announce_own_history_redis(job)
    with (
        cluster_in(tmp_path) as (url, node),
        RolloutClient.connect(redis_url, job.name, history_redis=url, reconnect_timeout=0.5) as client,
    ):
        record_lengths(node, "p", 4, [(10, False)])
        record_lengths(node, PROBLEM_WITH_SPECIAL_CHARACTERS, 4, [(30, True)])
        assert (10, 30) == (
            client.length_stats("p").longest,
            client.length_stats(PROBLEM_WITH_SPECIAL_CHARACTERS).longest,
        )
        assert LengthStats.from_lengths([(4, 10, False), (4, 30, True)]) == client.length_stats()
        node.execute_command("CLUSTER", "DELSLOTSRANGE", 0, 16383)
        with pytest.raises(RedisUnreachableError, match=r"Redis at 127\.0\.0\.1:\d+ has been unreachable"):
            client.length_stats()
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_for(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"))
        assert 2 == client.length_stats().count


def test_unreachable_cluster_is_an_error(redis_url: str, job: FakeJob, tmp_path: Path) -> None:
    announce_own_history_redis(job)
    with cluster_in(tmp_path) as (url, _):
        pass
    with (
        RolloutClient.connect(redis_url, job.name, history_redis=url, reconnect_timeout=0.5) as client,
        pytest.raises(RedisUnreachableError, match=r"cannot reach .*127\.0\.0\.1:\d+ to read the lengths"),
    ):
        client.length_stats()


def test_pass_rates_of_several_problems(redis_url: str, job: FakeJob) -> None:
    record_rewards(job.redis, "p", 1, [0.0, 1.0, None])
    record_rewards(job.redis, "p", 4, [1.0, 1.0])
    record_rewards(job.redis, PROBLEM_WITH_SPECIAL_CHARACTERS, 2, [0.9, 0.2])
    record_rewards(job.redis, "without rewards", 4, [None])
    with RolloutClient.connect(redis_url, job.name) as client:
        stats = client.reward_stats(["p", PROBLEM_WITH_SPECIAL_CHARACTERS, "without rewards", "never seen", "p"])
        stricter = client.reward_stats([PROBLEM_WITH_SPECIAL_CHARACTERS], threshold=0.9)
        newest = client.reward_stats(["p"], generations=1)
        recent = client.reward_stats(["p", PROBLEM_WITH_SPECIAL_CHARACTERS], generations=2)
    assert ["p", PROBLEM_WITH_SPECIAL_CHARACTERS, "without rewards", "never seen"] == list(stats)
    assert RewardStats(num_rollouts=5, count=4, mean=0.75, pass_rate=0.75, newest_generation=4) == stats["p"]
    special = stats[PROBLEM_WITH_SPECIAL_CHARACTERS]
    assert (2, pytest.approx(0.55), 0.5, 2) == (
        special.count,
        special.mean,
        special.pass_rate,
        special.newest_generation,
    )
    assert stricter[PROBLEM_WITH_SPECIAL_CHARACTERS].pass_rate == 0.5
    assert RewardStats(1, 0, None, None, None) == stats["without rewards"]
    assert RewardStats(0, 0, None, None, None) == stats["never seen"]
    assert RewardStats(2, 2, 1.0, 1.0, 4) == newest["p"]
    assert [4, 2] == [one.count for one in recent.values()]


def test_generations_are_counted_per_problem(redis_url: str, job: FakeJob) -> None:
    """With 1,000 weight versions per epoch, the newest versions have sampled only few of the problems."""
    for epoch in range(3):
        for problem in range(4):
            record_rewards(job.redis, f"p{problem}", 1000 * epoch + 250 * problem, [float(epoch)])
    with RolloutClient.connect(redis_url, job.name) as client:
        stats = client.reward_stats([f"p{problem}" for problem in range(4)], generations=2)
    assert [(2, 1.5)] * 4 == [(one.count, one.mean) for one in stats.values()]


async def test_reads_many_problems_in_few_round_trips(redis_url: str, job: FakeJob) -> None:
    for index in range(600):
        record_rewards(job.redis, f"problem {index}", 1, [float(index % 2)])

    async with AsyncRolloutClient.connect(redis_url, job.name) as client:
        before = command_counts(job.redis)
        stats = await client.reward_stats(f"problem {index}" for index in range(600))
        after = command_counts(job.redis)
        used = [name for name in after if name != "info" and after[name] - before.get(name, 0) > 20]
    assert [float(index % 2) for index in range(600)] == [one.pass_rate for one in stats.values()]
    assert used == ["hgetall"]  # in particular, the keys of the server are not scanned


def command_counts(server: redis.Redis) -> dict[str, int]:
    """Return how often the server has executed each command."""
    statistics: Any = server.info("commandstats")
    return {name.removeprefix("cmdstat_"): values["calls"] for name, values in statistics.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"problems": "p"}, "problems = 'p'; pass a list of problem ids"),
        ({"problems": ["p"], "threshold": float("nan")}, "threshold = nan; it must be finite"),
        ({"problems": ["p"], "generations": 0}, "generations = 0; it must be at least 1, or None"),
    ],
)
def test_invalid_arguments(redis_url: str, job: FakeJob, arguments: dict[str, Any], message: str) -> None:
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(InvalidRequestError, match=re.escape(message)),
    ):
        client.reward_stats(**arguments)


def test_history_elsewhere_must_be_passed(redis_url: str, job: FakeJob) -> None:
    job.redis.hset(job.keys.job, "history_redis", "own")
    with (
        RolloutClient.connect(redis_url, job.name) as client,
        pytest.raises(InvalidRequestError, match=r"connect\(…, history_redis=…\) to read rewards"),
    ):
        client.reward_stats(["p"])


def test_rewards_on_a_cluster(redis_url: str, job: FakeJob, tmp_path: Path) -> None:
    announce_own_history_redis(job)
    with (
        Cluster(tmp_path, primaries=3, password="secret") as cluster,
        redis.RedisCluster.from_url(cluster.servers[0].url) as nodes,
        RolloutClient.connect(redis_url, job.name, history_redis=cluster.url) as client,
    ):
        for index in range(20):
            record_rewards(nodes, f"problem {index}", index, [float(index % 2)])
        stats = client.reward_stats([f"problem {index}" for index in range(20)], generations=1)
    assert [1] * 20 == [one.count for one in stats.values()]
