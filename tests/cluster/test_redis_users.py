"""A Redis user for each job: made by a process with its own rights, kept to its job's keys, gone with the job."""

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
from kubernetes import client
from rollout_operator.redis_users import prefix_of

from rollout_api.protocol.keys import HistoryKeys, MessageKeys, named
from tests.support.cluster.chart import render
from tests.support.cluster.control_plane import ControlPlane, wait_for
from tests.support.cluster.jobs import Jobs
from tests.support.ports import free_port

PASSWORD, KEY = "the-admins-own", "k" * 40
PREFIX = prefix_of(KEY.encode())


class Users:
    """The process, and the server that it administers, which keeps nothing when it ends."""

    def __init__(self, directory: Path, access: Path, namespace: str) -> None:
        self._directory, self._port = directory, free_port()
        url = f"redis://:{PASSWORD}@127.0.0.1:{self._port}/0"
        self.admin = redis.Redis.from_url(url)
        self.start_server()
        command = [sys.executable, "-m", "rollout_operator.redis_users", f"--namespace={namespace}"]
        variables = {"KUBECONFIG": str(access), "ROLLOUT_REDIS_ADMIN_URL": url, "ROLLOUT_REDIS_USER_KEY": KEY}
        with (directory / "users.log").open("ab") as log:
            self._process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)

    def start_server(self) -> None:
        command = ["redis-server", "--port", str(self._port), "--requirepass", PASSWORD, "--save", ""]
        self._server = subprocess.Popen(command, cwd=self._directory, stdout=subprocess.DEVNULL)

    def kill_server(self) -> None:
        self._server.kill()
        self._server.wait()

    def log(self) -> str:
        return (self._directory / "users.log").read_text()

    def names(self) -> set[str]:
        try:
            return {name for name in self.admin.acl_users() if name.startswith(PREFIX)}
        except redis.ConnectionError:
            return set()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self.kill_server()


@pytest.fixture
def users(cluster: ControlPlane, jobs: Jobs, tmp_path: Path) -> Iterator[Users]:
    for one in render(jobs.namespace, operator={"namespaces": [jobs.namespace]}, redis={"users": True}):
        ours = one["metadata"]["name"].endswith("-redis-users")
        if ours and one["kind"] in ("ServiceAccount", "Role", "RoleBinding"):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(one))
    made = Users(tmp_path, cluster.access_of(jobs.namespace, "das-redis-users"), jobs.namespace)
    yield made
    made.close()


def url_of(jobs: Jobs, job: str) -> str:
    """From the Secret, once it is there."""

    def there() -> str:
        try:
            data = jobs.core.read_namespaced_secret(f"{job}-redis", jobs.namespace).data
        except client.ApiException as error:
            if error.status == 404:
                return ""
            raise
        return data["url"]

    return base64.b64decode(wait_for(there, 30, "no Secret")).decode()


def test_each_job_reaches_what_is_its_own_and_nothing_else(cluster: ControlPlane, jobs: Jobs, users: Users) -> None:
    uids = {}
    for name in ("ours", "theirs"):
        uids[name] = jobs.make(name, redis={"managed": True}, history={"name": name})["metadata"]["uid"]
    jobs.make("apart")
    ours = redis.Redis.from_url(url_of(jobs, "ours"))
    theirs = redis.Redis.from_url(url_of(jobs, "theirs"))
    wait_for(lambda: {f"{PREFIX}{uid}" for uid in uids.values()} == users.names(), 30, users.log())

    # its own
    keys, history = MessageKeys(uids["ours"]), HistoryKeys(jobs.namespace, "ours")
    ours.xadd(keys.results("rank-0"), {"d": b"1"})
    ours.xadd(history.log("p"), {"d": b"1"})
    ours.hset(history.meta, "generation", 1)
    ours.set(named(f"{jobs.namespace}/ours"), uids["ours"])
    ours.info("server")

    # nobody else's
    denied = [
        lambda: theirs.xrange(keys.results("rank-0")),
        lambda: theirs.xadd(keys.requests, {"d": b"1"}),
        lambda: theirs.xrange(history.log("p")),
        lambda: theirs.hgetall(history.meta),
        lambda: theirs.eval("return redis.call('XRANGE', KEYS[1], '-', '+')", 1, keys.results("rank-0")),
        lambda: theirs.set(named(f"{jobs.namespace}/ours"), uids["theirs"]),
        lambda: theirs.execute_command("FUNCTION", "FLUSH"),
        theirs.script_flush,
        lambda: theirs.xrange(HistoryKeys("elsewhere", "theirs").log("p")),
        lambda: theirs.keys("*"),
        theirs.flushall,
        lambda: theirs.config_set("maxmemory", 1),
        theirs.acl_list,
        lambda: theirs.execute_command("MONITOR"),
    ]
    for number, call in enumerate(denied):
        with pytest.raises((redis.exceptions.NoPermissionError, redis.exceptions.ResponseError)):
            call()
            pytest.fail(f"call {number} was carried out")

    # a server that has forgotten its users
    users.kill_server()
    users.start_server()
    wait_for(lambda: can_read(ours, keys), 30, users.log())

    # a Secret that somebody removed
    jobs.core.delete_namespaced_secret("ours-redis", jobs.namespace)
    wait_for(lambda: there(jobs, "ours-redis"), 90, "the Secret is not made again")

    # with the job goes the user; another installation's on the same server stays
    users.admin.acl_setuser("rollout-other-uid", enabled=True)
    jobs.delete("theirs")
    wait_for(lambda: {f"{PREFIX}{uids['ours']}"} == users.names(), 90, users.log())
    assert "rollout-other-uid" in users.admin.acl_users()
    wait_for(lambda: not there(jobs, "theirs-redis"), 60, "the Secret outlives its job")
    for text in (users.log(), json.dumps(jobs.get("ours"))):
        assert KEY not in text
        assert PASSWORD not in text

    # it may do what it does, and no more
    user = f"system:serviceaccount:{jobs.namespace}:das-redis-users"
    asked = {(one["verb"], one["objectRef"]["resource"]) for one in cluster.asked_by(user) if "objectRef" in one}
    assert asked <= {("list", "rolloutjobs"), ("watch", "rolloutjobs"), ("create", "secrets")}
    assert ("create", "secrets") in asked


def can_read(server: redis.Redis, keys: MessageKeys) -> bool:
    try:
        server.xlen(keys.requests)
    except redis.RedisError:
        return False
    return True


def there(jobs: Jobs, secret: str) -> bool:
    return any(one.metadata.name == secret for one in jobs.core.list_namespaced_secret(jobs.namespace).items)
