"""Users of jobs' own on a Redis server: a process apart from the operator, which knows no password.

For each RolloutJob with ``redis.managed`` there is a user on the server who may do what
:func:`rollout_api.redis_client.access_rules.access_rules` says, and a Secret ``<job>-redis`` with its URL,
which ends with the job.
Passwords are made from a key and the job's uid (HMAC-SHA256), so nothing has to be read back: to create Secrets is all
that this process may do with them.
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

import kopf
import redis.asyncio

from rollout_api.asyncio_tasks import end
from rollout_api.manifest.rollout_job import API_VERSION, GROUP, KIND, PLURAL, VERSION, ManifestError, parse_job
from rollout_api.redis_client.access_rules import access_rules
from rollout_operator import handlers, logs, names
from rollout_operator.api import ApiError, KubernetesApi
from rollout_operator.observed import Manifest

logger = logging.getLogger("rollout_redis_users")

_LOOK_S = 5.0
_CLEAR_S = 60.0
"""How often users and Secrets that were made are looked after."""
_TIMEOUT_S = 5.0
_PAGE = 500


@dataclass(frozen=True)
class JobUser:
    """The user of one job."""

    namespace: str
    job: str
    uid: str
    history: str

    @property
    def rules(self) -> list[str]:
        """What the user may do."""
        return access_rules(self.namespace, self.job, self.uid, self.history)


def user_of(body: Manifest) -> JobUser | None:
    """The user that a RolloutJob is to have; None if it wants none, or is refused anyway."""
    metadata = body["metadata"]
    named = {"name": metadata["name"], "namespace": metadata["namespace"]}
    try:
        job = parse_job({"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": body.get("spec")})
    except ManifestError:
        return None
    if not job.spec.redis.managed:
        return None
    return JobUser(metadata["namespace"], metadata["name"], metadata["uid"], job.history_name)


def prefix_of(key: bytes) -> str:
    """What the names of this installation's users begin with: others on the server, of other keys, are left alone."""
    return f"rollout-{hashlib.sha256(key).hexdigest()[:12]}-"


def password_of(key: bytes, user: JobUser) -> str:
    """The same for each user, always; not to be guessed without the key."""
    return hmac.new(key, user.uid.encode(), hashlib.sha256).hexdigest()


def secret_of(user: JobUser, admin_url: str, key: bytes) -> dict[str, Any]:
    """The Secret from which the job's pods and its trainers take the URL."""
    parts = urlsplit(admin_url)
    host = parts.netloc.rpartition("@")[2]
    credentials = f"{prefix_of(key)}{user.uid}:{password_of(key, user)}"
    url = urlunsplit(parts._replace(netloc=f"{credentials}@{host}"))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": names.redis_secret(user.job),
            "namespace": user.namespace,
            "labels": names.labels(user.job, "redis"),
            "ownerReferences": [names.owner({"name": user.job, "uid": user.uid}, API_VERSION, KIND)],
        },
        "type": "Opaque",
        "stringData": {"url": url},
    }


class RedisUsers:
    """Level-triggered: each pass makes what is missing, on a server that was started anew everything."""

    def __init__(self, api: KubernetesApi, server: redis.asyncio.Redis, url: str, key: bytes) -> None:
        """Keep users on *server*, which jobs reach at *url*; passwords are made from *key*."""
        self._api, self._server, self._url, self._key = api, server, url, key
        self._prefix = prefix_of(key)
        self._wanted: dict[str, JobUser] = {}
        self._made: set[JobUser] = set()
        self._given: set[str] = set()
        """Uids of jobs whose Secret was made, or is not to be made now."""
        self._run_id = ""
        self._cleared = float("-inf")
        """When the users of jobs that are gone were removed last."""
        self._news = asyncio.Event()

    def put(self, body: Manifest) -> None:
        """A job is so now."""
        user = user_of(body)
        if user is not None and user != self._wanted.get(user.uid):
            self._wanted[user.uid] = user
            self._news.set()

    def drop(self, body: Manifest) -> None:
        """A job is gone."""
        if self._wanted.pop(body["metadata"]["uid"], None) is not None:
            self._cleared = float("-inf")
            self._news.set()

    async def run(self, namespaces: Sequence[str]) -> None:
        """Keep users until cancelled; what fails is tried again."""
        while True:
            self._news.clear()
            try:
                await self.make()
                if (now := time.monotonic()) - self._cleared >= _CLEAR_S:
                    self._cleared = now
                    await self.clear(namespaces)
            except (ApiError, redis.RedisError, OSError) as error:
                logger.warning("Trying again: %s: %s", type(error).__name__, error)
            try:
                await asyncio.wait_for(self._news.wait(), _LOOK_S)
            except TimeoutError:
                continue

    async def make(self) -> None:
        """Make users and Secrets that are missing."""
        run_id = str((await self._server.info("server"))["run_id"])
        if run_id != self._run_id:
            self._run_id = run_id
            self._made.clear()
        missing = [user for user in self._wanted.values() if user not in self._made]
        for user in missing:
            digest = hashlib.sha256(password_of(self._key, user).encode()).hexdigest()
            await self._acl("SETUSER", self._prefix + user.uid, "reset", "on", f"#{digest}", *user.rules)
            self._made.add(user)
        if missing:
            await self._save()
        for user in list(self._wanted.values()):
            if user.uid not in self._given:
                await self._give(user)

    async def _give(self, user: JobUser) -> None:
        """Make a job's Secret. One that is there may be of a job before it, and about to go: tried again later."""
        try:
            await self._api.create(secret_of(user, self._url, self._key))
            logger.info("Job %s/%s has a user.", user.namespace, user.job)
        except ApiError as error:
            if error.passes:
                raise
            # a quota, a namespace that is being deleted: no other job's matter
            if not (error.conflict or error.absent):
                logger.warning("Secret %s/%s: %s", user.namespace, names.redis_secret(user.job), error)
        self._given.add(user.uid)

    async def clear(self, namespaces: Sequence[str]) -> None:
        """Remove the users of jobs that no list of the API server has; see again to those that were made."""
        there = {uid for namespace in namespaces or [""] for uid in await self._uids(namespace)}
        known = await self._acl("USERS")
        users = [name.decode() if isinstance(name, bytes) else str(name) for name in known]
        ours = {name.removeprefix(self._prefix) for name in users if name.startswith(self._prefix)}
        gone = [self._prefix + uid for uid in sorted(ours - there)]
        if gone:
            await self._acl("DELUSER", *gone)
            await self._save()
            logger.info("%d users of jobs that are gone were removed.", len(gone))
        self._made = {user for user in self._made if user.uid in ours & there}
        self._given.clear()

    async def _uids(self, namespace: str) -> list[str]:
        where = f"/namespaces/{namespace}" if namespace else ""
        uids: list[str] = []
        page = ""
        while True:
            query = {"limit": str(_PAGE), **({"continue": page} if page else {})}
            found = await self._api.request("GET", f"/apis/{GROUP}/{VERSION}{where}/{PLURAL}", query=query)
            uids += [item["metadata"]["uid"] for item in found["items"]]
            page = found["metadata"].get("continue", "")
            if not page:
                return uids

    async def _acl(self, *arguments: str) -> Any:
        command: Any = self._server.execute_command
        return await command("ACL", *arguments)

    async def _save(self) -> None:
        try:
            await self._acl("SAVE")
        except redis.ResponseError:
            return  # it keeps no file of users; they are made again when it was started anew


async def _run(namespaces: list[str], url: str, key: bytes) -> int:
    api = await KubernetesApi.connect()
    server = redis.asyncio.Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
    users = RedisUsers(api, server, url, key)
    watching = asyncio.ensure_future(
        kopf.operator(
            registry=handlers.registry(users.put, users.drop),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
    )
    keeping = asyncio.ensure_future(users.run(namespaces))
    try:
        await asyncio.wait({watching, keeping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watching, keeping):
            if task.done() and (error := task.exception()) is not None:
                logger.error("Ending: %s: %s", type(error).__name__, error)
                return 1
        return 0
    finally:
        await end(watching, keeping)
        await server.aclose()
        await api.close()


def main(given: Sequence[str] | None = None) -> None:
    """Run until told to end."""
    parser = argparse.ArgumentParser(
        prog="rollout-redis-users",
        description="Keeps a Redis user for each RolloutJob with redis.managed. ROLLOUT_REDIS_ADMIN_URL is the server, "
        "as somebody who may use ACL; ROLLOUT_REDIS_USER_KEY what passwords are made from.",
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="of jobs, and those given besides; default: all"
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="json", choices=["json", "text"])
    options = parser.parse_args(given)
    missing = [name for name in ("ROLLOUT_REDIS_ADMIN_URL", "ROLLOUT_REDIS_USER_KEY") if not os.environ.get(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} must be set")
    logs.configure(as_json=options.log_format == "json", level=options.log_level)
    url, key = os.environ["ROLLOUT_REDIS_ADMIN_URL"], os.environ["ROLLOUT_REDIS_USER_KEY"].encode()
    sys.exit(asyncio.run(_run(options.namespace, url, key)))


if __name__ == "__main__":
    main()
