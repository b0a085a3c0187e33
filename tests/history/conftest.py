"""Fixtures: a history must behave alike on one server, on a cluster and on Valkey."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_api.redis_client.connection import connect_history
from tests.support.redis_servers import Cluster, Server


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Redis Cluster of the test run's own."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


VALKEY = Path(sys.prefix) / "valkey-server"


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Valkey server of the test run's own."""
    if not VALKEY.exists():
        pytest.skip("there is no Valkey beside the environment; scripts/get-valkey says why")
    with Server(tmp_path_factory.mktemp("valkey"), program=VALKEY) as server:
        yield server


@pytest.fixture(params=["server", "cluster", "valkey"])
def history_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty Redis server, then of an empty cluster, then of an empty Valkey server."""
    server = request.getfixturevalue("redis_url" if request.param == "server" else request.param)
    url: str = server if isinstance(server, str) else server.url
    connect_history(url).flushall()
    return url
