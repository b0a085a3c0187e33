"""The process that creates a Redis user for each job. A user reaches the keys of its own job only."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from rollout_operator.objects.names import redis_secret
from rollout_operator.redis_users import user_prefix

from rollout_api.protocol.keys import HistoryKeys, MessageKeys, job_uid_key
from rollout_api.redis_client.server_functions import Call, Function, run
from tests.support.cluster.chart import render_chart
from tests.support.cluster.complete_control_plane import GARBAGE_COLLECTION_TIMEOUT_S, CompleteControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

PASSWORD, KEY = "admin-password", "k" * 40
PREFIX = user_prefix(KEY.encode())
USER_TIMEOUT_S = 30.0
"""Seconds within which the user of a new job is created, or created again on a server that has forgotten it."""
CLEANUP_TIMEOUT_S = 90.0
"""Seconds within which the user of a deleted job is removed, and a Secret that somebody deleted is created again."""


class RedisUsersProcess:
    """The process under test, and a Redis server that forgets its users when it is restarted."""

    def __init__(self, directory: Path, kubeconfig: Path, namespace: str) -> None:
        self._directory = directory
        self.server = Server(directory / "redis", password=PASSWORD)
        url = f"{self.server.url}/0"
        self.admin = redis.Redis.from_url(url)
        command = [sys.executable, "-m", "rollout_operator.redis_users", f"--namespace={namespace}"]
        variables = {"KUBECONFIG": str(kubeconfig), "ROLLOUT_REDIS_ADMIN_URL": url, "ROLLOUT_REDIS_USER_KEY": KEY}
        with (directory / "users.log").open("ab") as log:
            self._process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)

    def log(self) -> str:
        """Return the log of the process."""
        return (self._directory / "users.log").read_text()

    def users(self) -> set[str]:
        """Return the names of the users that the process has created."""
        try:
            return {name for name in self.admin.acl_users() if name.startswith(PREFIX)}
        except redis.ConnectionError:
            return set()

    def close(self) -> None:
        """End the process and the server."""
        self._process.terminate()
        self._process.wait(20)
        self.server.close()


@pytest.fixture
def permitted(cluster: CompleteControlPlane, jobs: Jobs) -> Path:
    """A kubeconfig with the permissions that the chart grants the process."""
    objects = render_chart(jobs.namespace, operator={"namespaces": [jobs.namespace]})
    for manifest in objects:
        is_for_users = manifest["metadata"]["name"].endswith("-redis-users")
        if is_for_users and manifest["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            cluster.apply(manifest)
    return cluster.service_account_kubeconfig(jobs.namespace, "das-redis-users")


@pytest.mark.complete_cluster
def test_the_admin_secret_is_created_once_with_the_permissions_of_the_chart(
    cluster: CompleteControlPlane, jobs: Jobs, permitted: Path
) -> None:
    def create(kubeconfig: Path) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "rollout_operator.cluster.admin_secret",
            f"{jobs.namespace}/admin",
            "redis:6379",
        ]
        variables = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    refused = create(cluster.service_account_kubeconfig(jobs.namespace, "default"))
    assert 1 == refused.returncode
    assert "Forbidden" in refused.stderr
    runs = [create(permitted)]
    secret = jobs.core.read_namespaced_secret("admin", jobs.namespace)
    runs.append(create(permitted))
    assert [0, 0] == [run.returncode for run in runs], runs
    assert secret.metadata.uid == jobs.core.read_namespaced_secret("admin", jobs.namespace).metadata.uid
    assert {"password", "url", "user-key"} == set(secret.data)
    password = base64.b64decode(secret.data["password"]).decode()
    assert not any(password in run.stdout + run.stderr for run in runs)


@pytest.fixture
def redis_users(permitted: Path, jobs: Jobs, tmp_path: Path) -> Iterator[RedisUsersProcess]:
    """The process, with the permissions that the chart grants it."""
    process = RedisUsersProcess(tmp_path, permitted, jobs.namespace)
    yield process
    process.close()


def secret_exists(jobs: Jobs, job: str) -> bool:
    """Return whether the Secret of a job's user exists."""
    secrets = jobs.core.list_namespaced_secret(jobs.namespace).items
    return any(secret.metadata.name == redis_secret(job) for secret in secrets)


def connect(jobs: Jobs, job: str) -> redis.Redis:
    """Return a client with the URL of a job's Secret, for which this function waits."""
    jobs.wait(lambda: secret_exists(jobs, job))
    url = jobs.core.read_namespaced_secret(redis_secret(job), jobs.namespace).data["url"]
    return redis.Redis.from_url(base64.b64decode(url).decode())


def can_read(server: redis.Redis, keys: MessageKeys) -> bool:
    """Return whether a client can read a job's messages."""
    try:
        server.xlen(keys.requests)
    except redis.RedisError:
        return False
    return True


@pytest.mark.complete_cluster
def test_each_job_has_a_user_that_reaches_its_own_keys_only(
    cluster: CompleteControlPlane, jobs: Jobs, redis_users: RedisUsersProcess
) -> None:
    uids = {}
    for name in ("math", "code"):
        uids[name] = jobs.create(name, redis={"managed": True}, history={"name": name})["metadata"]["uid"]
    jobs.create("unmanaged", redis={"urlFrom": {"secretKeyRef": {"name": "rollout-redis", "key": "url"}}})
    math, code = connect(jobs, "math"), connect(jobs, "code")
    wait_for(
        lambda: {f"{PREFIX}{uid}" for uid in uids.values()} == redis_users.users(), USER_TIMEOUT_S, redis_users.log
    )

    # A user may access the keys of its own job and history.
    keys, history = MessageKeys(uids["math"]), HistoryKeys(jobs.namespace, "math")
    math.xadd(keys.requests, {"d": b"1"})
    math.xadd(history.log("p"), {"d": b"1"})
    math.hset(history.meta, "generation", 1)
    math.set(job_uid_key(f"{jobs.namespace}/math"), uids["math"])
    math.info("server")

    # It may neither access those of others nor administer the server.
    denied = [
        lambda: code.xrange(keys.requests),
        lambda: code.xadd(keys.control, {"d": b"1"}),
        lambda: code.xrange(history.log("p")),
        lambda: code.hgetall(history.meta),
        lambda: run(code, Call(Function("even_when_full"), [keys.requests], ["XLEN", keys.requests])),
        lambda: code.eval("return 1", 0),
        lambda: code.set(job_uid_key(f"{jobs.namespace}/math"), uids["code"]),
        lambda: code.execute_command("FUNCTION", "FLUSH"),
        code.script_flush,
        lambda: code.xrange(HistoryKeys("elsewhere", "code").log("p")),
        lambda: code.keys("*"),
        code.flushall,
        lambda: code.config_set("maxmemory", 1),
        code.acl_list,
        lambda: code.execute_command("MONITOR"),
    ]
    for number, call in enumerate(denied):
        with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)):
            call()
            pytest.fail(f"Call {number} was permitted.")

    # The users are created again after a restart of the server, which has forgotten them.
    redis_users.server.restart()
    wait_for(lambda: can_read(math, keys), USER_TIMEOUT_S, redis_users.log)

    # The user of a deleted job is removed, but not that of another installation on the same server. At the same time,
    # a Secret that somebody has deleted is created again.
    redis_users.admin.acl_setuser("rollout-other-uid", enabled=True)
    jobs.core.delete_namespaced_secret(redis_secret("math"), jobs.namespace)
    jobs.delete("code")
    wait_for(lambda: {f"{PREFIX}{uids['math']}"} == redis_users.users(), CLEANUP_TIMEOUT_S, redis_users.log)
    assert "rollout-other-uid" in redis_users.admin.acl_users()
    wait_for(lambda: secret_exists(jobs, "math"), CLEANUP_TIMEOUT_S, redis_users.log)
    wait_for(lambda: not secret_exists(jobs, "code"), GARBAGE_COLLECTION_TIMEOUT_S, "The Secret outlives its job.")

    for text in (redis_users.log(), json.dumps(jobs.get("math"))):
        assert KEY not in text
        assert PASSWORD not in text
    user = f"system:serviceaccount:{jobs.namespace}:das-redis-users"
    entries = [entry for entry in cluster.audit_entries(user) if "objectRef" in entry]
    requests = {(entry["verb"], entry["objectRef"]["resource"]) for entry in entries}
    assert ("create", "secrets") in requests
    assert requests <= {("list", "rolloutjobs"), ("watch", "rolloutjobs"), ("create", "secrets")}
