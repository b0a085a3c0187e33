"""Creates a Redis user for each job that names no other, in a separate process from the operator.

Each such job has a user on the server with the rules of
:func:`rollout_api.protocol.access_rules.access_rules`, and a Secret ``<job>-redis`` with the URL, which is deleted
together with the job. The history service has a user and a Secret, too. Passwords are derived from a key and the job's
uid (HMAC-SHA256), so that they never have to be read: the only permission on Secrets that this process needs is to
create them, and the operator needs no password.

These users may only call functions that are on the server, so this process also loads all functions of its release.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import logging
import os
import re
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
import redis.asyncio

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.manifest.rollout_job import API_VERSION, KIND, ManifestError
from rollout_api.protocol.access_rules import access_rules, service_rules
from rollout_api.redis_client.address import parse_server_address
from rollout_api.redis_client.connection import connect_async
from rollout_api.redis_client.server_functions import libraries, load_async
from rollout_operator.cluster.informer import Informer, WorkQueue
from rollout_operator.cluster.kopf_watch import run_kopf
from rollout_operator.cluster.kubernetes_api import ROLLOUT_JOBS, ApiError, KubernetesApi
from rollout_operator.cluster.object_cache import NAMESPACES, SelectedNamespaces
from rollout_operator.command_line import configure_logs, namespaced_name, refuse_both
from rollout_operator.objects import names
from rollout_operator.objects.job_context import has_managed_user, parse_body
from rollout_operator.objects.observed import Manifest, parse_timestamp

logger = logging.getLogger("rollout_redis_users")

_CHECK_INTERVAL_S = 5.0
"""Time between two checks for a restarted server and for failed steps to retry."""
_CLEANUP_INTERVAL_S = 60.0
"""Time between two removals of users whose job no longer exists."""
_HISTORY_SERVICE = "history"
"""The history service's user has this in place of a job's uid."""
_MAX_CA_BYTES = 32 * 1024
"""Maximum size of a CA certificate, which becomes part of URLs in environment variables; Linux limits their size."""


@dataclass(frozen=True)
class RedisUser:
    """A Redis user, and the Secret with its URL."""

    uid: str
    """Uid of the job that the user belongs to, or another unique name."""
    rules: tuple[str, ...]
    """The user's ACL rules."""
    namespace: str
    """Namespace of the Secret."""
    secret: str
    """Name of the Secret."""
    job: str | None = None
    """Name of the job, which owns the Secret; None if no job does."""
    job_created: float = field(default=0.0, compare=False)
    """When the job was created, as Unix time."""


def job_user(body: Manifest, *, by_default: bool = True) -> RedisUser | None:
    """Return the user that a RolloutJob needs, or None if it needs none or its manifest is invalid.

    *by_default* says whether a job whose manifest names no Redis server has a user.
    """
    try:
        job = parse_body(body)
    except ManifestError:
        return None
    if not has_managed_user(job.spec.redis, by_default=by_default):
        return None
    namespace, name, uid = job.metadata.namespace, job.metadata.name, body["metadata"]["uid"]
    return RedisUser(
        uid,
        tuple(access_rules(namespace, name, uid, job.history_name)),
        namespace,
        names.redis_secret(name),
        name,
        parse_timestamp(body["metadata"].get("creationTimestamp")) or 0.0,
    )


def history_service_user(namespace: str, secret: str) -> RedisUser:
    """Return the history service's user, whose URL is stored in the given Secret."""
    return RedisUser(_HISTORY_SERVICE, tuple(service_rules()), namespace, secret)


def user_prefix(key: bytes) -> str:
    """Return the common prefix of the names of all users created with this key.

    Users of other installations on the same server have other prefixes and are left alone.
    """
    return f"rollout-{hashlib.sha256(key).hexdigest()[:12]}-"


def user_password(key: bytes, user: RedisUser) -> str:
    """Return the password of a user. It is always the same, and cannot be guessed without the key."""
    return hmac.new(key, user.uid.encode(), hashlib.sha256).hexdigest()


def with_ca(url: str, certificate: str) -> str:
    """Return a URL that contains the certificate of the CA that signed the server's certificate.

    Pods and trainers thus need no file with it.
    """
    return f"{url}{'&' if '?' in url else '?'}ssl_ca_data={quote(certificate, safe='')}"


def user_secret(user: RedisUser, admin_url: str, key: bytes) -> dict[str, Any]:
    """Return the Secret with the URL for the pods and the trainers of a job."""
    credentials = f"{user_prefix(key)}{user.uid}:{user_password(key, user)}"
    # Not with urllib.parse, because a URL of Sentinels has several hosts.
    url = re.sub(r"://(?:[^/?#]*@)?", f"://{credentials}@", admin_url, count=1)
    metadata: dict[str, Any] = {"name": user.secret, "namespace": user.namespace}
    if user.job is None:
        metadata["labels"] = names.labels_outside_release("redis")
    else:
        metadata["labels"] = names.labels(user.job, "redis")
        owner = {"name": user.job, "uid": user.uid}
        metadata["ownerReferences"] = [names.owner_reference(owner, API_VERSION, KIND)]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {"url": url},
    }


class RedisUserManager:
    """Creates and removes users. It is level-triggered: each pass compares the existing users with the jobs."""

    def __init__(
        self,
        api: KubernetesApi,
        server: redis.asyncio.Redis,
        url: str,
        key: bytes,
        *,
        by_default: bool = True,
        history_service: RedisUser | None = None,
        namespaces: Container[str] | None = None,
    ) -> None:
        """Create a manager.

        The users' URLs are derived from *url*, that of *server*, and their passwords from *key*. *by_default* says
        whether jobs whose manifests name no Redis server have users. Only jobs in *namespaces* have users; None means
        all whose jobs are reported.
        """
        self._api, self._server, self._url, self._key = api, server, url, key
        self._by_default, self._namespaces = by_default, namespaces
        self._prefix = user_prefix(key)
        permanent = [] if history_service is None else [history_service]
        self._permanent = {user.uid for user in permanent}
        """Users that belong to no job."""
        self._wanted: dict[str, RedisUser] = {user.uid: user for user in permanent}
        """All users that should exist, by uid."""
        self._created: set[RedisUser] = set()
        """Users that exist on the server."""
        self._without_objects: set[str] = set()
        """Uids of jobs that are being deleted, and whose objects Kubernetes deletes first (foreground deletion)."""
        self._cleaned_up: set[str] = set()
        """Uids of jobs that are being deleted, and whose cleanup pods need the Secrets."""
        self._with_secret: set[str] = set()
        """Uids of users whose Secret exists, or is tried again only after the next cleanup."""
        self._run_id = ""
        self._last_cleanup = float("-inf")
        self._changed = asyncio.Event()

    def update_job(self, body: Manifest) -> None:
        """Record a job that was created or changed, or whose deletion was requested."""
        user = job_user(body, by_default=self._by_default)
        if user is None:
            return
        if user != self._wanted.get(user.uid):
            self._wanted[user.uid] = user
            self._changed.set()
        if not body["metadata"].get("deletionTimestamp"):
            return
        if names.FOREGROUND_FINALIZER in body["metadata"].get("finalizers", ()):
            # Kubernetes would delete a new Secret, too.
            self._without_objects.add(user.uid)
        elif user.uid not in self._cleaned_up:
            self._without_objects.discard(user.uid)
            self._cleaned_up.add(user.uid)
            # Kubernetes may have deleted the Secret.
            self._with_secret.discard(user.uid)
            self._changed.set()

    def remove_job(self, body: Manifest) -> None:
        """Record that a job was deleted."""
        uid = body["metadata"]["uid"]
        self._without_objects.discard(uid)
        self._cleaned_up.discard(uid)
        if self._wanted.pop(uid, None) is not None:
            self._last_cleanup = float("-inf")
            self._changed.set()

    def retry(self) -> None:
        """Create what is missing soon, because a namespace was selected."""
        self._changed.set()

    def _selected(self) -> list[RedisUser]:
        """Return the users that should exist, without those of jobs in other namespaces."""
        namespaces = self._namespaces
        return [
            user
            for user in self._wanted.values()
            if user.job is None or namespaces is None or user.namespace in namespaces
        ]

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
                if isinstance(error, redis.ResponseError) and str(error).startswith("BUSY "):
                    await self._end_function()
                else:
                    logger.warning("Creating users failed and is retried: %s: %s", type(error).__name__, error)
            try:
                await asyncio.wait_for(self._changed.wait(), _CHECK_INTERVAL_S)
            except TimeoutError:
                continue

    async def _end_function(self) -> None:
        """End the call of a function that blocks the server for all jobs.

        Calls take milliseconds, but one that searches much data, which the user of a job can write, takes minutes. The
        server says that it is busy after its ``busy-reply-threshold``, by default five seconds.
        """
        try:
            await self._server.function_kill()
            logger.warning("Ended a function that had blocked the Redis server for all jobs.")
        except redis.ResponseError as error:
            if not str(error).startswith("NOTBUSY"):
                logger.error("Something blocks the Redis server for all jobs and cannot be ended: %s", error)
        except (redis.RedisError, OSError) as error:
            logger.warning("Ending a function failed and is retried: %s: %s", type(error).__name__, error)

    async def create_missing(self) -> None:
        """Load the functions, and create the users and Secrets, that are missing; after a restart, all users."""
        await self._load_functions()
        run_id = str((await self._server.info("server"))["run_id"])
        if run_id != self._run_id:
            self._run_id = run_id
            self._created.clear()
        missing = [user for user in self._selected() if user not in self._created]
        for user in missing:
            digest = hashlib.sha256(user_password(self._key, user).encode()).hexdigest()
            await self._acl("SETUSER", self._prefix + user.uid, "reset", "on", f"#{digest}", *user.rules)
            self._created.add(user)
        if missing:
            await self._save_users()
        for user in self._selected():
            if user.uid not in self._with_secret and user.uid not in self._without_objects:
                await self._create_secret(user)

    async def _load_functions(self) -> None:
        found = await self._server.execute_command("FUNCTION", "LIST", "LIBRARYNAME", "rollout_*")
        # Each entry is a list of names and values, which begins with that of the library.
        if libraries().keys() <= {entry[1].decode() for entry in found}:
            return
        try:
            await load_async(self._server)
            logger.info("Loaded the functions that users may call.")
        except redis.exceptions.OutOfMemoryError as error:  # jobs of earlier releases still need their users
            logger.warning("Loading functions failed and is retried: %s", error)

    async def _create_secret(self, user: RedisUser) -> None:
        """Create a user's Secret.

        If a Secret of this name exists, it may belong to an earlier job and be about to be deleted. It is therefore
        tried again after the next cleanup, and for a new job in the next pass.
        """
        try:
            await self._api.create(user_secret(user, self._url, self._key))
            logger.info("Created a user and the Secret %s/%s.", user.namespace, user.secret)
        except ApiError as error:
            if error.transient:
                raise
            if error.conflict and time.time() - user.job_created < _CLEANUP_INTERVAL_S:
                return
            # Exceeded quotas and namespaces that are being deleted must not delay other jobs.
            if not (error.conflict or error.not_found):
                logger.warning("Secret %s/%s could not be created: %s", user.namespace, user.secret, error)
        self._with_secret.add(user.uid)

    async def remove_unused(self, namespaces: Sequence[str]) -> None:
        """Remove the users of jobs that no longer exist, and let the next pass check all Secrets again."""
        existing = {uid for namespace in namespaces or [""] for uid in await self._job_uids(namespace)}
        existing |= self._permanent
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


async def _run(options: argparse.Namespace, url: str, key: bytes) -> int:
    """Manage users until the process is terminated, and return the exit code."""
    namespaces: list[str] = options.namespace
    history_service = None
    if options.history_secret:
        history_service = history_service_user(*options.history_secret)
    api = await KubernetesApi.connect()
    server = connect_async(url)
    selected = SelectedNamespaces(lambda _: manager.retry()) if options.namespace_selector else None
    manager = RedisUserManager(
        api,
        server,
        url,
        key,
        by_default=not options.only_managed,
        history_service=history_service,
        namespaces=selected,
    )
    watch = asyncio.ensure_future(run_kopf(manager.update_job, manager.remove_job, namespaces))
    management = asyncio.ensure_future(manager.run(namespaces))
    tasks = [watch, management]
    if selected is not None:
        selection = Informer(api, selected, WorkQueue(), NAMESPACES, "", selector=options.namespace_selector)
        tasks.append(asyncio.ensure_future(selection.run()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                logger.error("The process ends: %s: %s", type(error).__name__, error)
                return 1
        return 0
    finally:
        await cancel_and_wait(*tasks)
        await server.aclose()
        await api.close()


def _parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, str, bytes]:
    """Return the options, the server's URL, and the key for deriving passwords."""
    parser = argparse.ArgumentParser(
        prog="rollout-redis-users",
        description="Create a Redis user for each RolloutJob that names no other. ROLLOUT_REDIS_ADMIN_URL is the URL "
        "of the server or of its Sentinels, with a user that may use ACL and FUNCTION commands. ROLLOUT_REDIS_USER_KEY "
        "is the key from which passwords are derived.",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="namespace whose jobs get users; may be repeated; default: all namespaces",
    )
    parser.add_argument(
        "--namespace-selector",
        default="",
        metavar="LABEL=VALUE,…",
        help="labels of the namespaces whose jobs get users, instead of --namespace",
    )
    parser.add_argument(
        "--only-managed",
        action="store_true",
        help="create users only for jobs with redis.managed, and not for those that name no Redis server",
    )
    parser.add_argument(
        "--history-secret",
        type=namespaced_name,
        metavar="NAMESPACE/NAME",
        help="create a user for the history service, and this Secret with its URL",
    )
    parser.add_argument(
        "--ca-file", type=Path, help="certificate of the CA that has signed the server's; it becomes part of all URLs"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="json", choices=["json", "text"])
    options = parser.parse_args(arguments)
    refuse_both(parser, options)
    missing = [name for name in ("ROLLOUT_REDIS_ADMIN_URL", "ROLLOUT_REDIS_USER_KEY") if not os.environ.get(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} must be set")
    url, key = os.environ["ROLLOUT_REDIS_ADMIN_URL"], os.environ["ROLLOUT_REDIS_USER_KEY"].encode()
    if options.ca_file is not None:
        try:
            certificate = options.ca_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"--ca-file: {error}")
        if len(certificate) > _MAX_CA_BYTES:
            parser.error(f"--ca-file is larger than {_MAX_CA_BYTES} bytes: it must contain only this server's CA")
        url = with_ca(url, certificate)
    try:
        parse_server_address(url)
    except ValueError as error:
        parser.error(f"ROLLOUT_REDIS_ADMIN_URL: {error}")
    return options, url, key


def main(arguments: Sequence[str] | None = None) -> None:
    """Manage users until SIGINT or SIGTERM."""
    options, url, key = _parse_arguments(arguments)
    configure_logs(as_json=options.log_format == "json", level=options.log_level)
    sys.exit(asyncio.run(_run(options, url, key)))


if __name__ == "__main__":
    main()
