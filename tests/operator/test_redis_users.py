"""The users that rollout-redis-users creates on a Redis server, and their Secrets; without a cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from kubernetes.aio.client import ApiClient
from rollout_operator.cluster.admin_secret import admin_secret
from rollout_operator.cluster.kubernetes_api import ApiError, KubernetesApi, ResourceKind
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import ClusterInfo, Observed
from rollout_operator.redis_users import (
    RedisUserManager,
    history_service_user,
    job_user,
    user_prefix,
    user_secret,
    with_ca,
)

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.protocol.access_rules import service_rules
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_api.redis_client.address import Kind, parse_address, without_password
from rollout_api.redis_client.connection import connect, connect_async
from rollout_api.redis_client.retry import is_transient
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_store.job import JobStore
from rollout_store.job.engines import EngineReport, LeaseState
from tests.support.redis_servers import Certificates, Server
from tests.support.waiting import wait_for_async

KEY = b"k" * 32
PASSWORD = "admin-password"
OLD = "2020-01-01T00:00:00Z"


class StandInApi(KubernetesApi):
    """An API server that stores Secrets and lists the given jobs."""

    def __init__(self) -> None:
        super().__init__(cast(ApiClient, None))
        self.jobs: list[dict[str, Any]] = []
        self.secrets: dict[str, Mapping[str, Any]] = {}
        self.attempts = 0

    async def create(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Store a Secret."""
        self.attempts += 1
        name = "{namespace}/{name}".format(**manifest["metadata"])
        if name in self.secrets:
            raise ApiError(409, "AlreadyExists", name)
        self.secrets[name] = manifest
        return dict(manifest)

    async def list_pages(
        self, kind: ResourceKind, namespace: str, *, selector: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield all jobs as one page."""
        yield {"items": self.jobs}

    def url(self, name: str) -> str:
        """Return the URL in a Secret."""
        return str(self.secrets[name]["stringData"]["url"])


def job(name: str, *, created: str = OLD, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-of-{name}", "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"source": {"trainer": {}}, "model": {"uri": "policy"}, **spec}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "redis", password=PASSWORD) as server:
        yield server


def own_secret(name: str) -> dict[str, Any]:
    return {"urlFrom": {"secretKeyRef": {"name": name, "key": "url"}}}


@pytest.mark.parametrize(
    ("redis_section", "by_default", "expected"),
    [
        ({}, True, "math-redis"),
        ({}, False, "rollout-redis"),
        ({"managed": True}, False, "math-redis"),
        (own_secret("mine"), True, "mine"),
        ({"url": "redis://elsewhere"}, True, None),
    ],
)
def test_a_job_has_a_user_unless_it_names_a_server(
    redis_section: dict[str, Any], by_default: bool, expected: str | None
) -> None:
    body = job("math", redis=redis_section)
    cluster = ClusterInfo(creates_redis_users=by_default)
    observed = Observed(job=body, pods=(), objects={}, now=0.0, cluster=cluster, default_image="worker:1")
    secret = JobContext.from_observed(observed).redis_secret
    assert expected == (None if secret is None else secret.name)
    # The process for users decides in the same way.
    assert (expected == "math-redis") == (job_user(body, by_default=by_default) is not None)


def test_a_job_with_an_invalid_manifest_has_no_user() -> None:
    assert job_user(job("math", workers={"replicas": -1})) is None


async def test_users_have_the_keys_of_their_job_or_of_all_histories(server: Server) -> None:
    api, client = StandInApi(), connect_async(server.url)
    manager = RedisUserManager(
        api, client, server.url, KEY, history_service=history_service_user("das", "das-redis-history-service")
    )
    api.jobs = [job("math"), job("code"), job("own", redis=own_secret("mine"))]
    for body in api.jobs:
        manager.update_job(body)
    await manager.create_missing()
    assert {"rl/math-redis", "rl/code-redis", "das/das-redis-history-service"} == set(api.secrets)
    math_keys = MessageKeys("uid-of-math")
    with connect(api.url("rl/math-redis")) as math, connect(api.url("rl/code-redis")) as code:
        math.xadd(math_keys.requests, {"d": b"1"})
        with pytest.raises(redis.exceptions.NoPermissionError):
            code.xlen(math_keys.requests)
    with connect(api.url("das/das-redis-history-service")) as service:
        service.set("history:x", 1)
        with pytest.raises(redis.exceptions.NoPermissionError):
            service.xlen(math_keys.requests)
    with redis.Redis.from_url(server.url) as admin:
        granted = admin.acl_getuser(f"{user_prefix(KEY)}history")
        admin.acl_setuser("expected", reset=True)
        admin.execute_command("ACL", "SETUSER", "expected", *service_rules())
        assert {name: admin.acl_getuser("expected")[name] for name in ("commands", "keys")} == {
            name: granted[name] for name in ("commands", "keys")
        }

    # The history service's user belongs to no job and is kept when those of deleted jobs are removed.
    api.jobs = [job("math")]
    manager.remove_job(job("code"))
    await manager.remove_unused([])
    with redis.Redis.from_url(server.url) as admin:
        users = {name for name in admin.acl_users() if name.startswith(user_prefix(KEY))}
    assert {f"{user_prefix(KEY)}uid-of-math", f"{user_prefix(KEY)}history"} == users
    await client.aclose()


async def test_a_job_continues_once_functions_that_the_server_has_lost_are_loaded_again(server: Server) -> None:
    api, client = StandInApi(), connect_async(server.url)
    manager = RedisUserManager(api, client, server.url, KEY)
    manager.update_job(job("math"))
    await manager.create_missing()
    job_store = JobStore.connect(api.url("rl/math-redis"), MessageKeys("uid-of-math"))
    report = EngineReport("engine", max_running=4)
    assert LeaseState.LOST is not await job_store.engines.heartbeat("a", report, register=True)
    for lost in (True, False):
        if lost:
            server.client().function_flush()
        else:
            server.restart()
        waiting = asyncio.ensure_future(job_store.engines.heartbeat("a", report, register=True))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await manager.create_missing()
        assert LeaseState.LOST is not await waiting
    await job_store.close()
    await client.aclose()


async def test_a_function_that_searches_too_much_data_is_ended(tmp_path: Path) -> None:
    with Server(tmp_path, password=PASSWORD, settings={"busy-reply-threshold": "100"}) as server:
        api = StandInApi()
        users = RedisUserManager(api, connect_async(server.url), server.url, KEY, by_default=True)
        managing = asyncio.ensure_future(users.run([]))
        users.update_job(job("a"))
        api.jobs = [job("a")]
        url = await wait_for_async(lambda: "rl/a-redis" in api.secrets and api.url("rl/a-redis"))
        history, rewards = HistoryKeys("rl", "a"), [b"\0" * 7 + b"x", b"word"] * 400_000
        with redis.Redis.from_url(url, socket_timeout=60, retry=None) as user:
            user.hset(history.lengths("p"), "1", b"\0" * 16_384)
            call = Call(Function("set_rewards"), [history.lengths("p")], rewards)
            blocking = asyncio.ensure_future(asyncio.to_thread(run, user, call))
            with pytest.raises(redis.ResponseError, match="killed") as killed:
                await asyncio.wait_for(blocking, 60)
        assert is_transient(killed.value)
        assert connect(server.url).ping()
        await cancel_and_wait(managing)


async def test_the_secret_of_an_earlier_job_of_this_name_delays_that_of_a_new_job_only_until_it_is_deleted(
    server: Server,
) -> None:
    api, client = StandInApi(), connect_async(server.url)
    manager = RedisUserManager(api, client, server.url, KEY)
    now = datetime.fromtimestamp(time.time(), UTC).isoformat()
    for name, created in (("new", now), ("old", OLD)):
        api.secrets[f"rl/{name}-redis"] = {}
        manager.update_job(job(name, created=created))
    await manager.create_missing()
    assert 2 == api.attempts
    api.secrets.clear()
    await manager.create_missing()
    assert {"rl/new-redis"} == set(api.secrets)
    await client.aclose()


async def test_the_secret_of_a_job_that_is_deleted_in_the_foreground_is_created_again_for_its_cleanup(
    server: Server,
) -> None:
    api, client = StandInApi(), connect_async(server.url)
    manager = RedisUserManager(api, client, server.url, KEY)
    body = job("math")
    manager.update_job(body)
    await manager.create_missing()
    first = api.secrets.pop("rl/math-redis")
    # Kubernetes would delete a new Secret, too, until it removes its finalizer.
    body["metadata"] |= {"deletionTimestamp": OLD, "finalizers": [names.FINALIZER, names.FOREGROUND_FINALIZER]}
    manager.update_job(body)
    api.jobs = [body]
    await manager.remove_unused([])
    await manager.create_missing()
    assert not api.secrets
    body["metadata"]["finalizers"] = [names.FINALIZER]
    manager.update_job(body)
    await manager.create_missing()
    assert {"rl/math-redis": first} == api.secrets
    with connect(api.url("rl/math-redis")) as user:
        assert 0 == user.xlen(MessageKeys("uid-of-math").requests)
    # Otherwise a deleted job causes no more requests than one.
    attempts = api.attempts
    manager.update_job(body)
    await manager.create_missing()
    assert attempts == api.attempts
    await client.aclose()


async def test_only_the_jobs_of_selected_namespaces_have_users(server: Server) -> None:
    api, client = StandInApi(), connect_async(server.url)
    namespaces: set[str] = set()
    service = history_service_user("das", "das-redis-history-service")
    manager = RedisUserManager(api, client, server.url, KEY, history_service=service, namespaces=namespaces)
    manager.update_job(job("math"))
    await manager.create_missing()
    assert {"das/das-redis-history-service"} == set(api.secrets)
    namespaces.add("rl")
    await manager.create_missing()
    assert {"rl/math-redis", "das/das-redis-history-service"} == set(api.secrets)
    await client.aclose()


async def test_users_recognize_the_server_by_the_certificate_in_their_url(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certificates")
    settings = {"tls-auth-clients": "no"}
    with Server(tmp_path / "redis", password=PASSWORD, certificates=certificates, settings=settings) as server:
        plain_url = server.url.partition("?")[0]
        with (
            connect(plain_url) as stranger,
            pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            stranger.ping()
        url = with_ca(plain_url, certificates.certificate.read_text())
        api, client = StandInApi(), connect_async(url)
        manager = RedisUserManager(api, client, url, KEY)
        manager.update_job(job("math"))
        await manager.create_missing()
        await client.aclose()
        with connect(api.url("rl/math-redis")) as user:
            assert user.set(f"{MessageKeys('uid-of-math').prefix}x", 1)
        assert "CERTIFICATE" not in without_password(url)

        # The chart gives the history service the certificate in this way: the URL in its Secret may lack it.
        script = (
            "import sys; from rollout_api.redis_client.connection import connect_history; "
            "connect_history(sys.argv[1]).ping()"
        )
        variables = {**os.environ, "SSL_CERT_FILE": str(certificates.certificate)}
        process = subprocess.run(
            [sys.executable, "-c", script, plain_url], env=variables, capture_output=True, text=True
        )
        assert not process.returncode, process.stderr


def test_the_urls_of_users_keep_sentinels_and_options() -> None:
    user = history_service_user("rl", "secret")
    admin = "rediss+sentinel://admin:word@a:1,b:2/main/3?sentinel_username=s&sentinel_password=t"
    address = parse_address(user_secret(user, admin, KEY)["stringData"]["url"])
    assert (Kind.SENTINEL, (("a", 1), ("b", 2)), "main") == (address.kind, address.hosts, address.service)
    assert f"{user_prefix(KEY)}history" == address.options["username"]
    assert "word" != address.options["password"]
    assert {"username": "s", "password": "t"} == dict(address.sentinel_options)


def test_the_admin_secret_has_a_new_password_which_its_url_contains() -> None:
    first, second = (admin_secret("rl", "das-redis-admin", "das-redis.rl.svc:6379")["stringData"] for _ in range(2))
    assert first["password"] != second["password"]
    assert f"redis://:{first['password']}@das-redis.rl.svc:6379/0" == first["url"]


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("redis+cluster://a:1,b:2", [], "ROLLOUT_REDIS_ADMIN_URL"),
        ("http://a", [], "ROLLOUT_REDIS_ADMIN_URL"),
        ("redis://h", ["--history-secret=x"], "--history-secret"),
        ("redis://h", ["--ca-file=/missing"], "--ca-file"),
        ("redis://h", ["--namespace=a", "--namespace-selector=b=c"], "--namespace"),
    ],
)
def test_wrong_settings_are_rejected_at_the_start(url: str, options: list[str], named: str) -> None:
    variables = {**os.environ, "ROLLOUT_REDIS_ADMIN_URL": url, "ROLLOUT_REDIS_USER_KEY": "k"}
    command = [sys.executable, "-m", "rollout_operator.redis_users", *options]
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert 2 == process.returncode
    assert named in process.stderr.splitlines()[-1]


def test_argo_cd_does_not_take_created_secrets_for_parts_of_the_release() -> None:
    for secret in (admin_secret("rl", "s", "h:1"), user_secret(history_service_user("rl", "s"), "redis://h", KEY)):
        assert "app.kubernetes.io/instance" not in secret["metadata"]["labels"]


def test_the_secret_of_a_job_is_deleted_with_it() -> None:
    user = job_user(job("math"))
    assert user is not None
    (owner,) = user_secret(user, "redis://h", KEY)["metadata"]["ownerReferences"]
    assert ("math", "uid-of-math") == (owner["name"], owner["uid"])
    assert names.redis_secret("math") == user.secret
