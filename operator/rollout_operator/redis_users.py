"""Creates a Redis user for each job with ``redis.managed``, in a separate process from the operator.

Each such job has a user on the server with the rules of
:func:`rollout_api.protocol.access_rules.access_rules`, and a Secret ``<job>-redis`` with the URL, which is deleted
together with the job. Passwords are derived from a key and the job's uid (HMAC-SHA256), so that they never have to be
read: the only permission on Secrets that this process needs is to create them, and the operator needs no password.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.rollout_job import API_VERSION, KIND, ManifestError
from rollout_api.protocol.access_rules import access_rules
from rollout_operator import logs, names
from rollout_operator.job_context import parse_body
from rollout_operator.kopf_watch import run_kopf
from rollout_operator.kubernetes_api import ApiError, KubernetesApi
from rollout_operator.observed import Manifest
from rollout_operator.resource_kinds import ROLLOUT_JOBS

logger = logging.getLogger("rollout_redis_users")

_CHECK_INTERVAL_S = 5.0
"""Time between two checks for a restarted server and for failed steps to retry."""
_CLEANUP_INTERVAL_S = 60.0
"""Time between two removals of users whose job no longer exists."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class JobUser:
    """The Redis user of one job."""

    namespace: str
    job: str
    uid: str
    history: str

    @property
    def rules(self) -> list[str]:
        """The user's ACL rules."""
        return access_rules(self.namespace, self.job, self.uid, self.history)


def job_user(body: Manifest) -> JobUser | None:
    """Return the user that a RolloutJob needs, or None if it needs none or its manifest is invalid."""
    try:
        job = parse_body(body)
    except ManifestError:
        return None
    if not job.spec.redis.managed:
        return None
    return JobUser(job.metadata.namespace, job.metadata.name, body["metadata"]["uid"], job.history_name)


def user_prefix(key: bytes) -> str:
    """Return the common prefix of the names of all users created with this key.

    Users of other installations on the same server have other prefixes and are left alone.
    """
    return f"rollout-{hashlib.sha256(key).hexdigest()[:12]}-"


def user_password(key: bytes, user: JobUser) -> str:
    """Return the password of a user. It is always the same, and cannot be guessed without the key."""
    return hmac.new(key, user.uid.encode(), hashlib.sha256).hexdigest()


def user_secret(user: JobUser, admin_url: str, key: bytes) -> dict[str, Any]:
    """Return the Secret from which the job's pods and its trainers read the URL."""
    parts = urlsplit(admin_url)
    host = parts.netloc.rpartition("@")[2]
    credentials = f"{user_prefix(key)}{user.uid}:{user_password(key, user)}"
    url = urlunsplit(parts._replace(netloc=f"{credentials}@{host}"))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.redis_secret(user.job),
            "namespace": user.namespace,
            "labels": names.labels(user.job, "redis"),
            "ownerReferences": [names.owner_reference({"name": user.job, "uid": user.uid}, API_VERSION, KIND)],
        },
        "type": "Opaque",
        "stringData": {"url": url},
    }


class RedisUserManager:
    """Creates and removes users. It is level-triggered: each pass compares the existing users with the jobs."""

    def __init__(self, api: KubernetesApi, server: redis.asyncio.Redis, url: str, key: bytes) -> None:
        """Create a manager.

        Args:
            api: for the Secrets, and to list the jobs.
            server: a connection of a user that may use ACL commands.
            url: the URL of *server*, from which the users' URLs are derived.
            key: the key from which passwords are derived.
        """
        self._api, self._server, self._url, self._key = api, server, url, key
        self._prefix = user_prefix(key)
        self._wanted: dict[str, JobUser] = {}
        """Users of the existing jobs, by the job's uid."""
        self._created: set[JobUser] = set()
        """Users that exist on the server."""
        self._with_secret: set[str] = set()
        """Uids of jobs whose Secret exists, or is tried again only after the next cleanup."""
        self._run_id = ""
        self._last_cleanup = float("-inf")
        self._changed = asyncio.Event()

    def update_job(self, body: Manifest) -> None:
        """Record a job that was created or changed."""
        user = job_user(body)
        if user is not None and user != self._wanted.get(user.uid):
            self._wanted[user.uid] = user
            self._changed.set()

    def remove_job(self, body: Manifest) -> None:
        """Record that a job was deleted."""
        if self._wanted.pop(body["metadata"]["uid"], None) is not None:
            self._last_cleanup = float("-inf")
            self._changed.set()

    async def run(self, namespaces: Sequence[str]) -> None:
        """Create and remove users until cancelled; what fails is retried."""
        while True:
            self._changed.clear()
            try:
                await self.create_missing()
                if (now := time.monotonic()) - self._last_cleanup >= _CLEANUP_INTERVAL_S:
                    self._last_cleanup = now
                    await self.remove_unused(namespaces)
            except (ApiError, redis.RedisError, OSError) as error:
                logger.warning("Creating users failed and is retried: %s: %s", type(error).__name__, error)
            try:
                await asyncio.wait_for(self._changed.wait(), _CHECK_INTERVAL_S)
            except TimeoutError:
                continue

    async def create_missing(self) -> None:
        """Create the users and Secrets that are missing; after a restart of the server, all users."""
        run_id = str((await self._server.info("server"))["run_id"])
        if run_id != self._run_id:
            self._run_id = run_id
            self._created.clear()
        missing = [user for user in self._wanted.values() if user not in self._created]
        for user in missing:
            digest = hashlib.sha256(user_password(self._key, user).encode()).hexdigest()
            await self._acl("SETUSER", self._prefix + user.uid, "reset", "on", f"#{digest}", *user.rules)
            self._created.add(user)
        if missing:
            await self._save_users()
        for user in list(self._wanted.values()):
            if user.uid not in self._with_secret:
                await self._create_secret(user)

    async def _create_secret(self, user: JobUser) -> None:
        """Create a job's Secret.

        If a Secret of this name exists, it may belong to an earlier job and be about to be deleted. It is therefore
        tried again after the next cleanup.
        """
        try:
            await self._api.create(user_secret(user, self._url, self._key))
            logger.info("Created a user for job %s/%s.", user.namespace, user.job)
        except ApiError as error:
            if error.transient:
                raise
            # Exceeded quotas and namespaces that are being deleted must not delay other jobs.
            if not (error.conflict or error.not_found):
                secret = f"{user.namespace}/{names.redis_secret(user.job)}"
                logger.warning("Secret %s could not be created: %s", secret, error)
        self._with_secret.add(user.uid)

    async def remove_unused(self, namespaces: Sequence[str]) -> None:
        """Remove the users of jobs that no longer exist, and let the next pass check all Secrets again."""
        existing = {uid for namespace in namespaces or [""] for uid in await self._job_uids(namespace)}
        reply = await self._acl("USERS")
        users = [name.decode() if isinstance(name, bytes) else str(name) for name in reply]
        own = {name.removeprefix(self._prefix) for name in users if name.startswith(self._prefix)}
        unused = [self._prefix + uid for uid in sorted(own - existing)]
        if unused:
            await self._acl("DELUSER", *unused)
            await self._save_users()
            logger.info("Removed %d users of deleted jobs.", len(unused))
        self._created = {user for user in self._created if user.uid in own & existing}
        self._with_secret.clear()

    async def _job_uids(self, namespace: str) -> list[str]:
        pages = self._api.list_pages(ROLLOUT_JOBS, namespace)
        return [item["metadata"]["uid"] async for page in pages for item in page["items"]]

    async def _acl(self, *arguments: str) -> Any:
        command: Any = self._server.execute_command
        return await command("ACL", *arguments)

    async def _save_users(self) -> None:
        try:
            await self._acl("SAVE")
        except redis.ResponseError:
            # The server has no ACL file. Users are created again after it has restarted.
            return


async def _run(namespaces: list[str], url: str, key: bytes) -> int:
    """Manage users until the process is terminated, and return the exit code."""
    api = await KubernetesApi.connect()
    server = redis.asyncio.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    manager = RedisUserManager(api, server, url, key)
    watch = asyncio.ensure_future(run_kopf(manager.update_job, manager.remove_job, namespaces))
    management = asyncio.ensure_future(manager.run(namespaces))
    try:
        await asyncio.wait({watch, management}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watch, management):
            if task.done() and (error := task.exception()) is not None:
                logger.error("The process ends: %s: %s", type(error).__name__, error)
                return 1
        return 0
    finally:
        await cancel_and_wait(watch, management)
        await server.aclose()
        await api.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Manage users until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="rollout-redis-users",
        description="Create a Redis user for each RolloutJob with redis.managed. ROLLOUT_REDIS_ADMIN_URL is the URL of "
        "the server, with a user that may use ACL commands. ROLLOUT_REDIS_USER_KEY is the key from which passwords are "
        "derived.",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="namespace whose jobs get users; may be repeated; default: all namespaces",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="json", choices=["json", "text"])
    options = parser.parse_args(arguments)
    missing = [name for name in ("ROLLOUT_REDIS_ADMIN_URL", "ROLLOUT_REDIS_USER_KEY") if not os.environ.get(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} must be set")
    logs.configure(as_json=options.log_format == "json", level=options.log_level)
    url, key = os.environ["ROLLOUT_REDIS_ADMIN_URL"], os.environ["ROLLOUT_REDIS_USER_KEY"].encode()
    sys.exit(asyncio.run(_run(options.namespace, url, key)))


if __name__ == "__main__":
    main()
