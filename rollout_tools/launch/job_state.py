"""The state directory of a job that runs on one machine: its lock, the job's identity, and records for other commands.

The records contain the manifest of the job, and the address of its Redis.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import redis

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import HistoryKeys, MessageKeys
from rollout_head.ending import drain_outbox
from rollout_store.history.store import HistoryStore
from rollout_store.job.launcher import LauncherStore

_STATE_LOCK_TIMEOUT_S = 10.0
"""Seconds to wait for the lock of a state directory."""
_STATE_LOCK_POLL_INTERVAL_S = 0.1
"""Seconds between two attempts to take the lock."""
RECORDING_FILE = "recording.json.gz"
"""Name of the file in a state directory with the recording of its job, for making reports."""
_MANIFEST_FILE = "manifest.json"
REDIS_FILE = "redis-server.json"


class StateError(RuntimeError):
    """The state directory cannot be used. The text says why, and what to do."""


class DeadlineError(RuntimeError):
    """The job has exceeded ``lifecycle.activeDeadlineSeconds``."""


@contextmanager
def lock_state_directory(directory: Path) -> Iterator[int]:
    """Hold the lock of a state directory.

    An embedded Redis server inherits the lock, so that the directory stays locked until the server has ended.

    Returns:
        The file descriptor of the lock.

    Raises:
        StateError: if another run of the job holds the lock, or the directory cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise StateError(f"cannot use the state directory {directory}: {error.strerror}") from None
    try:
        deadline = time.monotonic() + _STATE_LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StateError(
                        f"another run of this job holds {directory}; wait until it ends, stop it, or choose another "
                        "directory with --state-dir"
                    ) from None
                time.sleep(_STATE_LOCK_POLL_INTERVAL_S)
        yield lock
    finally:
        os.close(lock)


def log_directory(directory: Path) -> Path:
    """Return the directory of the log files of the job whose state is in *directory*."""
    return directory / "logs"


class RecordedJob(NamedTuple):
    """What a state file says about the last job."""

    uid: str
    finished: bool


def recorded_job(directory: Path) -> RecordedJob | None:
    """Return the last job whose state is in *directory*; None if there was none.

    Raises:
        StateError: if the state file cannot be read.
    """
    path = directory / "job.json"
    try:
        content = json.loads(path.read_text())
        return RecordedJob(content["uid"], content["finished"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise StateError(f"cannot read {path}; remove it to start a new job (the history is kept)") from None


class JobState:
    """The identity of the job that a state directory belongs to, kept in a small file."""

    def __init__(self, path: Path, content: dict[str, Any], *, resumed: bool) -> None:
        self.resumed = resumed
        """Whether an earlier run of the job is continued."""
        self._path, self._content = path, content

    @property
    def uid(self) -> str:
        """The job's uid."""
        return str(self._content["uid"])

    @classmethod
    def open(cls, path: Path, job: RolloutJob, notify: Callable[[str], None]) -> JobState:
        """Continue the unfinished job in *path* if its manifest asks for the same rollouts; otherwise start a new job.

        Args:
            path: the state file, which need not exist.
            job: the manifest.
            notify: receives a message for the user when an unfinished job is abandoned.

        Raises:
            StateError: if the file cannot be read.
        """
        spec = job.spec.model_dump_json(include={"source", "model", "sampling", "history"})
        digest = hashlib.blake2b(spec.encode(), digest_size=16).hexdigest()
        previous: list[dict[str, str]] = []
        if path.is_file():
            try:
                known = json.loads(path.read_text())
                if not known["finished"] and known["digest"] == digest:
                    return cls(path, known, resumed=True)
                previous = [*known["previous"], {"uid": known["uid"], "history": known["history"]}]
                if not known["finished"]:
                    notify(
                        f"The manifest has changed: abandoning job {known['uid']}. "
                        "Its finished rollouts stay in its history."
                    )
            except (ValueError, KeyError, TypeError):
                raise StateError(f"cannot read {path}; remove it to start a new job (the history is kept)") from None
        content = {
            "uid": str(uuid.uuid4()),
            "digest": digest,
            "history": job.history_name,
            "finished": False,
            "previous": previous,
        }
        state = cls(path, content, resumed=False)
        state._save()
        return state

    def clean_up_previous_jobs(
        self, server: redis.Redis, history: redis.Redis | redis.RedisCluster, job: RolloutJob
    ) -> None:
        """Move what earlier jobs left in their outboxes to their histories, then delete their messages."""
        while self._content["previous"]:
            previous = self._content["previous"][0]
            keys = MessageKeys(previous["uid"])
            history_keys = HistoryKeys(job.metadata.namespace, previous["history"])
            drain_outbox(server, keys, HistoryStore(history, history_keys, window=job.spec.speculation.window))
            LauncherStore(server, keys).delete_keys(keep_notice=False)
            del self._content["previous"][0]
            self._save()

    def mark_finished(self) -> None:
        """Record that the job has ended, so that the next run of its manifest starts a new job."""
        self._content["finished"] = True
        self._save()

    def _save(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._content, indent=1))
        temporary.replace(self._path)


def record_manifest(directory: Path, job: RolloutJob) -> None:
    """Write the manifest to a file that only its owner can read, because it may contain a password of Redis."""
    temporary = directory / f"{_MANIFEST_FILE}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(job.model_dump(mode="json", by_alias=True), indent=1))
    temporary.replace(directory / _MANIFEST_FILE)


def read_recorded_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of the last run of the job in *directory*; None if none was recorded.

    Raises:
        StateError: if the file cannot be read.
    """
    path = directory / _MANIFEST_FILE
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"cannot read {path}: {error}") from None
    return manifest


@dataclass(frozen=True)
class RecordedRedis:
    """The Redis server of a job."""

    url: str
    embedded: bool
    """Whether ``rollout run`` has started the server, which then ends with it."""


def record_redis(directory: Path, server: RecordedRedis) -> None:
    """Write the server of the job in *directory* to a file that only its owner can read, because of the password."""
    temporary = directory / f"{REDIS_FILE}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(asdict(server)))
    temporary.replace(directory / REDIS_FILE)


def read_recorded_redis(directory: Path) -> RecordedRedis | None:
    """Return the last server of the job in *directory*; None if the job has not run there.

    Raises:
        StateError: if the file cannot be read.
    """
    path = directory / REDIS_FILE
    try:
        return RecordedRedis(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise StateError(f"cannot read {path}; run the job again, which writes the file anew") from None
