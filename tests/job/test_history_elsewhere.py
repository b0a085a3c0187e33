"""A history on another server than the job's messages: how the command line finds it and reports problems."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from rollout_api.ports import free_port
from rollout_api.protocol.keys import MESSAGE_FIELD, HistoryKeys
from rollout_api.protocol.messages import encode
from rollout_api.protocol.status import EXIT_MANIFEST, EXIT_REDIS
from rollout_api.redis_client.connection import connect
from rollout_store.history.records import START
from rollout_store.history.store import HistoryStore
from rollout_worker.engine_worker.worker_process import warn_if_unusable
from tests.support.job_messages import JOB, request, rollout
from tests.support.redis_servers import Server

HISTORY = HistoryKeys("default", "shared")


@pytest.fixture
def history_url(tmp_path: Path) -> Iterator[str]:
    """URL of another server with the job's history."""
    with Server(tmp_path / "redis") as server:
        HistoryStore(connect(server.url), HISTORY, window=16).metadata.open("tokenizer")
        yield server.url


@pytest.fixture
def server(redis_url: str) -> redis.Redis:
    """A job with a finished rollout that no relay has moved to the history."""
    client = connect(redis_url)
    client.hset(JOB.job, "state", "running")
    client.xadd(JOB.outbox, {MESSAGE_FIELD: encode(rollout(request(), 0))})
    return client


def end(directory: Path, redis_url: str, *options: str, **history: Any) -> subprocess.CompletedProcess[str]:
    """Run ``rollout end`` for a job with *history* in its manifest."""
    manifest = {
        "apiVersion": "das.rollout.dev/v1beta1",
        "kind": "RolloutJob",
        "metadata": {"name": "math"},
        "spec": {
            "source": {"trainer": {}},
            "model": {"uri": "a/b"},
            "history": {"name": HISTORY.name, **({"redis": history} if history else {})},
        },
    }
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    command = [sys.executable, "-m", "rollout_tools.cli", "end", "-f", str(file), "--uid", JOB.uid, *options]
    return subprocess.run(command, env={**os.environ, "ROLLOUT_REDIS_URL": redis_url}, capture_output=True, text=True)


def rollouts(url: str) -> int:
    return len(HistoryStore(connect(url), HISTORY, window=16).read({"p": START})["p"].records)


@pytest.mark.usefixtures("server")
def test_finished_rollouts_are_moved_to_the_history_on_its_own_server(
    redis_url: str, history_url: str, tmp_path: Path
) -> None:
    secret = {"secretKeyRef": {"name": "histories", "key": "url"}}
    done = end(tmp_path, redis_url, "--history-redis", history_url, urlFrom=secret)
    assert 0 == done.returncode, done.stderr
    assert (0, 1) == (rollouts(redis_url), rollouts(history_url))


@pytest.mark.usefixtures("server")
def test_the_url_in_the_manifest_is_used_unless_an_option_overrides_it(
    redis_url: str, history_url: str, tmp_path: Path
) -> None:
    # a URL on which nothing listens shows which one is used
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    done = end(tmp_path, redis_url, url=nobody)
    assert EXIT_REDIS == done.returncode
    assert nobody.removeprefix("redis://").split("/")[0] in done.stderr
    assert 0 == end(tmp_path, redis_url, "--history-redis", history_url, url=nobody).returncode
    assert 1 == rollouts(history_url)


def test_a_url_in_a_secret_is_rejected_with_its_field(server: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    done = end(tmp_path, redis_url, urlFrom={"secretKeyRef": {"name": "histories", "key": "url"}})
    assert EXIT_MANIFEST == done.returncode
    assert "spec.history.redis.urlFrom" in done.stderr
    assert "ROLLOUT_HISTORY_REDIS_URL" in done.stderr
    assert 1 == server.xlen(JOB.outbox)


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_worker_that_cannot_reach_the_history_warns_without_the_password(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    warn_if_unusable(f"{scheme}://user:hunter2@127.0.0.1:{port}")
    (message,) = caplog.messages
    assert f"127.0.0.1:{port}" in message
    assert "without the job's history" in message
    assert "hunter2" not in message


def test_a_worker_that_reaches_the_history_does_not_warn(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_if_unusable(redis_url)
    assert [] == caplog.messages
