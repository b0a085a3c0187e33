"""Pass rates of problems as a trainer reads them, from the job's Redis or from the history's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_api import AsyncRolloutClient, InvalidRequestError, RewardStats, RolloutClient
from tests.support.client_tests import run
from tests.support.fake_job import FakeJob, record_rewards
from tests.support.redis_servers import Cluster

PROBLEM_WITH_SPECIAL_CHARACTERS = "a {problem} of 100%"


def test_pass_rates_of_several_problems(redis_url: str, job: FakeJob) -> None:
    record_rewards(job.redis, "p", 1, [0.0, 1.0, None])
    record_rewards(job.redis, "p", 4, [1.0, 1.0])
    record_rewards(job.redis, PROBLEM_WITH_SPECIAL_CHARACTERS, 2, [0.9, 0.2])
    record_rewards(job.redis, "without rewards", 4, [None])
    with RolloutClient.connect(redis_url, job.name) as client:
        stats = client.reward_stats(["p", PROBLEM_WITH_SPECIAL_CHARACTERS, "without rewards", "never seen", "p"])
        stricter = client.reward_stats([PROBLEM_WITH_SPECIAL_CHARACTERS], threshold=0.9)
        newest = client.reward_stats(["p"], generations=1)
        recent = client.reward_stats(["p", PROBLEM_WITH_SPECIAL_CHARACTERS], generations=3)
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
    assert [2, 2] == [one.count for one in recent.values()]


def test_reads_many_problems_in_few_round_trips(redis_url: str, job: FakeJob) -> None:
    for index in range(600):
        record_rewards(job.redis, f"problem {index}", 1, [float(index % 2)])

    async def trainer() -> tuple[dict[str, RewardStats], list[str]]:
        async with AsyncRolloutClient.connect(redis_url, job.name) as client:
            before = command_counts(job.redis)
            stats = await client.reward_stats(f"problem {index}" for index in range(600))
            after = command_counts(job.redis)
            return stats, [name for name in after if name != "info" and after[name] - before.get(name, 0) > 20]

    stats, used = run(trainer())
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


def test_history_on_a_cluster(redis_url: str, job: FakeJob, tmp_path: Path) -> None:
    job.redis.hset(job.keys.job, "history_redis", "own")
    with (
        Cluster(tmp_path, primaries=3, password="secret") as cluster,
        redis.RedisCluster.from_url(cluster.servers[0].url) as nodes,
        RolloutClient.connect(redis_url, job.name, history_redis=cluster.url) as client,
    ):
        for index in range(20):
            record_rewards(nodes, f"problem {index}", index, [float(index % 2)])
        stats = client.reward_stats([f"problem {index}" for index in range(20)], generations=10)
    assert [0] * 10 + [1] * 10 == [one.count for one in stats.values()]
