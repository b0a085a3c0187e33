"""Finds the job that a command line names: its manifest, its Redis and its uid."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import redis
import typer
import yaml

from rollout_api.manifest.rollout_job import KIND, FieldError, ManifestError, RolloutJob, parse_job
from rollout_api.protocol.keys import MessageKeys, job_uid_key
from rollout_api.redis_client.connection import RedisUnusableError, connect, explain_error
from rollout_tools.launch.job_state import LastRedis, last_job


def read_manifest(path: Path) -> RolloutJob:
    """Read the job in a YAML file, and ignore its runtime, which only the operator can read.

    Other documents in the file are ignored.

    Raises:
        ManifestError: as :func:`check_manifest`, and if the job is not valid without the settings of its runtime.
    """
    return check_manifest(path).without_runtime()


def check_manifest(path: Path) -> RolloutJob:
    """Return the job in a YAML file as it is written.

    Raises:
        ManifestError: if the file cannot be read, is not YAML, or does not contain exactly one valid RolloutJob.
    """
    try:
        documents = list(yaml.load_all(path.read_text(), Loader=_UniqueKeyLoader))
    except OSError as error:
        raise ManifestError([FieldError(str(path), error.strerror or str(error))]) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        # PyYAML raises ValueError and TypeError for invalid dates and unhashable keys.
        raise ManifestError([FieldError(str(path), f"not valid YAML: {_describe(error)}")]) from None
    jobs = documents
    if len(documents) > 1:
        jobs = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if len(jobs) != 1:
        message = f"expected one RolloutJob, found {len(jobs)} in {len(documents)} documents"
        raise ManifestError([FieldError(str(path), message)])
    return parse_job(jobs[0])


def _describe(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return str(error)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects duplicate keys; plain YAML silently keeps the last of them."""

    # lm-format-enforcer, a backend of vLLM, replaces the constructor of timestamps in yaml.SafeLoader.
    yaml_constructors = yaml.SafeLoader.yaml_constructors | {
        "tag:yaml.org,2002:timestamp": yaml.SafeLoader.construct_yaml_timestamp
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


DEFAULT_NAMESPACE = "default"
_MAX_LISTED_JOBS = 20

JobArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="Name of the job, or NAMESPACE/NAME.",
        show_default="the only job there is",
    ),
]
JobManifest = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="The job's manifest (YAML), instead of its name.", show_default=False),
]
JobRedis = Annotated[
    str | None,
    typer.Option(
        envvar="ROLLOUT_REDIS_URL",
        help="URL of the job's Redis.",
        show_default="the manifest's, else that of the last rollout run of the job in the state directory",
    ),
]
JobHistoryRedis = Annotated[
    str | None,
    typer.Option(
        "--history-redis",
        envvar="ROLLOUT_HISTORY_REDIS_URL",
        help="URL of the Redis that keeps the history.",
        show_default="the job's Redis",
    ),
]
JobUid = Annotated[str | None, typer.Option(help="Unique id of the job.", show_default="the newest job with its name")]
ModelCache = Annotated[
    Path | None,
    typer.Option(help="Directory of models.", show_default="$ROLLOUT_MODEL_CACHE, else ~/.cache/das-rollout/models"),
]
StateDirectory = Annotated[Path, typer.Option("--state-dir", help="State directory of rollout run.")]


class JobAddressError(RuntimeError):
    """The job cannot be found. The text says where it was looked for, which jobs there are, and what to do."""


@dataclass(frozen=True)
class FoundJob:
    """A job that exists in Redis."""

    name: str
    """``namespace/name``; the uid if the user has given only that."""
    uid: str
    redis_url: str
    directory: Path | None
    """The directory of this job in the state directory; None if it does not run with ``rollout run`` from there."""
    history_url: str = ""
    """URL of the Redis that keeps the history, if the job's manifest names it; otherwise empty."""

    @property
    def keys(self) -> MessageKeys:
        """Redis keys of the job's messages."""
        return MessageKeys(self.uid)

    @contextlib.contextmanager
    def connected(self) -> Iterator[redis.Redis]:
        """Yield a client of the job's Redis.

        Raises:
            RedisUnusableError: in place of errors of Redis within the context; the text says what to do.
        """
        with _connected(self.redis_url) as server:
            yield server


class _Place(NamedTuple):
    """Where to look for a job."""

    redis_url: str
    name: str | None
    directory: Path | None
    embedded: bool


def find_job(
    job: str | None,
    *,
    file: Path | None = None,
    redis_url: str | None = None,
    uid: str | None = None,
    state: Path = Path(".rollout"),
) -> FoundJob:
    """Find a job whose description is in Redis.

    Args:
        job: ``name`` or ``namespace/name``; None for that of the manifest, or the only job there is.
        file: the job's manifest.
        redis_url: URL of the job's Redis; None for the manifest's, or else that of the last local run.
        uid: the job's uid; None for the newest job with its name.
        state: state directory of local runs.

    Raises:
        JobAddressError: if the job cannot be determined or does not exist.
        ManifestError, StateError: if the manifest or the state directory cannot be used.
        RedisUnusableError: if Redis cannot be used.
    """
    manifest = None if file is None else read_manifest(file)
    place = _place(_name(job, file, manifest), manifest, redis_url, state)
    try:
        with _connected(place.redis_url) as server:
            found = _find(server, place, uid)
    except RedisUnusableError as error:
        if place.embedded and isinstance(error.__cause__, redis.ConnectionError):
            raise _ended_error(place) from None
        raise
    return found if manifest is None else replace(found, history_url=manifest.spec.history.redis.url or "")


def find_job_directory(job: str | None, *, file: Path | None = None, state: Path = Path(".rollout")) -> Path:
    """Return the directory of a job that has run with ``rollout run``, whether it still runs or not.

    The arguments are those of :func:`find_job`.

    Raises:
        JobAddressError: if the job cannot be determined or has not run from there.
        ManifestError: if the manifest cannot be used.
    """
    name = _name(job, file, None if file is None else read_manifest(file))
    known = jobs_in_state_directory(state)
    if name is None:
        name = _only(known, f"in the state directory {state}")
    if name not in known:
        raise JobAddressError(
            f"job {name} has not run in the state directory {state} ({_listed(known)}); name another one with "
            "--state-dir. Processes that were started by themselves (rollout head, rollout worker) write their logs to "
            "standard error"
        )
    return job_directory(state, name)


def job_directory(state: Path, name: str) -> Path:
    """Return the directory of the job ``namespace/name`` in the state directory *state*."""
    return state / name


def jobs_in_state_directory(state: Path) -> list[str]:
    """Return ``namespace/name`` of all jobs that have run in the state directory *state*, in order of their names."""
    return sorted(f"{file.parent.parent.name}/{file.parent.name}" for file in state.glob("*/*/job.json"))


def _name(job: str | None, file: Path | None, manifest: RolloutJob | None) -> str | None:
    """Return ``namespace/name`` of the job that the user has named; None if there is no name."""
    if manifest is None:
        return job if job is None or "/" in job else f"{DEFAULT_NAMESPACE}/{job}"
    if job is not None:
        raise JobAddressError(f"pass either the job's name ({job}) or its manifest (-f {file}), but not both")
    return f"{manifest.metadata.namespace}/{manifest.metadata.name}"


def _place(name: str | None, manifest: RolloutJob | None, redis_url: str | None, state: Path) -> _Place:
    url = redis_url or (manifest.spec.redis.url if manifest is not None else None)
    known = jobs_in_state_directory(state)
    if url:
        # A job of the same name in another Redis is another job.
        local = job_directory(state, name) if name is not None and name in known else None
        server = None if local is None else LastRedis.read(local)
        return _Place(url, name, local if server is not None and server.url == url else None, embedded=False)
    if name is None:
        name = _only(known, f"in the state directory {state}")
    directory = job_directory(state, name)
    server = LastRedis.read(directory)
    if server is None:
        raise JobAddressError(
            f"job {name} has not run in the state directory {state} ({_listed(known)}); name its Redis with --redis or "
            "ROLLOUT_REDIS_URL, or its state directory with --state-dir"
        )
    return _Place(server.url, name, directory, server.embedded)


def _find(server: redis.Redis, place: _Place, uid: str | None) -> FoundJob:
    name = place.name
    if uid is None:
        if name is None:
            name = _only(_jobs_in_redis(server), "in this Redis")
        local = None if place.directory is None else last_job(place.directory)
        newest: Any = server.get(job_uid_key(name)) if local is None else local.uid.encode()
        uid = newest.decode() if newest else None
        if uid is None:
            raise JobAddressError(
                f"there is no job {name} in this Redis ({_listed(_jobs_in_redis(server))}); it has not started yet, "
                "was deleted, or is in another Redis (--redis)"
            )
    keys = MessageKeys(uid)
    if not server.exists(keys.job):
        raise JobAddressError(
            f"job {name or uid} (uid {uid}) has no messages in this Redis: either it is still starting, or its "
            "messages were deleted a day after its end; its rollouts are still in its history (`rollout history`)"
        )
    return FoundJob(name or uid, uid, place.redis_url, place.directory)


def _ended_error(place: _Place) -> JobAddressError:
    """Return the error for a local job whose embedded Redis does not answer."""
    job = None if place.directory is None else last_job(place.directory)
    if job is not None and job.finished:
        state, remedy = "has ended", "Its rollouts are in its history, and `rollout logs` shows what happened."
    else:
        state, remedy = "does not run at the moment", "The same `rollout run` continues it."
    return JobAddressError(
        f"job {place.name} {state}, and with it the Redis server that `rollout run` had started for it. {remedy}"
    )


@contextlib.contextmanager
def _connected(url: str) -> Iterator[redis.Redis]:
    server = connect(url)
    try:
        yield server
    except redis.RedisError as error:
        raise explain_error(error, url) from error
    finally:
        server.close()


def _jobs_in_redis(server: redis.Redis) -> list[str]:
    """Return ``namespace/name`` of some jobs on a server, in order of their names; none if the user may not know."""
    prefix, names = job_uid_key(""), []
    with contextlib.suppress(redis.exceptions.NoPermissionError):
        for key in server.scan_iter(f"{prefix}*", count=1000):
            names.append(key.decode().removeprefix(prefix))
            if len(names) >= _MAX_LISTED_JOBS:
                break
    return sorted(names)


def _only(jobs: Sequence[str], where: str) -> str:
    """Return the only job there is.

    Raises:
        JobAddressError: if there is none, or more than one.
    """
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise JobAddressError(
            f"there is no job {where}; start one with `rollout run`, or name its Redis with --redis or its state "
            "directory with --state-dir"
        )
    raise JobAddressError(f"there are several jobs {where}: {', '.join(jobs[:_MAX_LISTED_JOBS])}; name one of them")


def _listed(jobs: Sequence[str]) -> str:
    return f"jobs there: {', '.join(jobs[:_MAX_LISTED_JOBS])}" if jobs else "there are no jobs"
