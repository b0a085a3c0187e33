"""The commands for a job that runs: ``rollout status``, ``logs`` and ``cancel``."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
from rich.console import Console

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Cancel, Close, CodecError, RolloutRequest, decode, encode
from rollout_api.protocol.status import EXIT_ENGINE, EXIT_INTERRUPTED, EXIT_STATE
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_store.runtime.output import exit_with_error
from rollout_tools.cli.job_address import (
    JobArgument,
    JobManifest,
    JobRedis,
    JobUid,
    StateDirectory,
    find_job,
    find_job_directory,
)
from rollout_tools.cli.output import exit_with_message

app = typer.Typer()
console = Console()

_CANCELLATION_TIMEOUT_S = 10.0
"""Seconds that ``rollout cancel`` waits until the job has done what it is told."""
_PROCESS_COLORS = ("cyan", "green", "yellow", "blue", "magenta")


@app.command()
def status(
    job: JobArgument = None,
    file: JobManifest = None,
    redis: JobRedis = None,
    uid: JobUid = None,
    state_dir: StateDirectory = Path(".rollout"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the coordinator's status as JSON.")] = False,
) -> None:
    """Show the state, the progress and the engines of a job, and what to do if something is wrong.

    The exit code is 4 if the job has failed, or if its coordinator does not run.
    """
    from rollout_tools.cli.job_status import print_snapshot, read_snapshot

    with exit_with_message(file):
        found = find_job(job, file=file, redis_url=redis, uid=uid, state=state_dir)
        with found.connected() as server:
            snapshot = read_snapshot(server, found)
    if as_json:
        typer.echo(snapshot.as_json())
    else:
        print_snapshot(snapshot, console)
    if not snapshot.is_healthy:
        raise typer.Exit(EXIT_ENGINE)


@app.command()
def logs(
    job: JobArgument = None,
    file: JobManifest = None,
    state_dir: StateDirectory = Path(".rollout"),
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new lines until Ctrl-C.")] = False,
    process: Annotated[
        list[str] | None,
        typer.Option(
            help="Show only this process: run, coordinator, relay, redis, engine-0, …, or engine for all engines. The "
            "option can be repeated.",
            show_default="all processes",
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Begin with this number of last lines.", show_default="all lines")
    ] = None,
) -> None:
    """Show the logs of all processes of a job that `rollout run` runs, in the order of their times (UTC).

    The files are in STATE_DIR/NAMESPACE/NAME/logs. Each process keeps its last 24 MiB.
    """
    from rollout_tools.cli.merged_logs import JobLogs, LogLine

    with exit_with_message(file, interrupted="the job continues"):
        directory = find_job_directory(job, file=file, state=state_dir)
        found = JobLogs(directory, process or ())
        known = found.processes()
        for name in process or ():
            if not any(one.startswith(name) for one in known):
                listed = ", ".join(known) or "none"
                exit_with_error(EXIT_STATE, f"{directory} has no log of process {name}; processes with a log: {listed}")
        width = max(map(len, known), default=0)
        colors = {name: _PROCESS_COLORS[number % len(_PROCESS_COLORS)] for number, name in enumerate(known)}

        def show(lines: Iterable[LogLine]) -> None:
            for line in lines:
                prefix = typer.style(f"{line.time} {line.process:<{width}}", fg=colors.get(line.process))
                typer.echo(f"{prefix}  {line.text}")

        show(found.written() if tail is None else deque(found.written(), maxlen=tail))
        if follow:
            sys.stdout.flush()
            show(found.follow())


@app.command()
def cancel(
    job: JobArgument = None,
    requests: Annotated[
        list[str] | None,
        typer.Argument(metavar="REQUEST…", help="Ids of the requests to cancel.", show_default="the whole job"),
    ] = None,
    file: JobManifest = None,
    redis: JobRedis = None,
    uid: JobUid = None,
    state_dir: StateDirectory = Path(".rollout"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for a confirmation.")] = False,
) -> None:
    """End a job now, or cancel some of its requests.

    Running rollouts end with the tokens that they have, and rollouts that have not started end without any; trainers
    receive both with the reason "cancelled". If no requests are named, the job is also closed, and ends. Finished
    rollouts stay in the history.
    """

    with exit_with_message(file, interrupted="what was sent before is still carried out"):
        found = find_job(job, file=file, redis_url=redis, uid=uid, state=state_dir)
        with found.connected() as server:
            state: Any = server.hget(found.keys.job, "state")
            if state in (b"closed", b"failed"):
                exit_with_error(EXIT_STATE, f"job {found.name} (uid {found.uid}) is {state.decode()} already")
            open_now = open_requests(server, found.keys)
            chosen = list(dict.fromkeys(requests)) if requests else list(open_now)
            if unknown := [name for name in chosen if name not in open_now]:
                exit_with_error(
                    EXIT_STATE,
                    f"job {found.name} has no open request {', '.join(unknown)}: it is answered already, or was never "
                    f"sent; {_listed(list(open_now))}",
                )
            rollouts = sum(open_now[name] for name in chosen)
            what = f"{_count(len(chosen), 'open request')} with {_count(rollouts, 'rollout')}"
            question = f"Cancel {what} of job {found.name}" + ("?" if requests else ", and end it?")
            if not yes and not typer.confirm(question):
                raise typer.Exit(EXIT_INTERRUPTED)
            if requests:
                cancel_requests(server, found.keys, chosen)
                done = wait_until_answered(server, found.keys, chosen, _CANCELLATION_TIMEOUT_S)
            else:
                done = end_job(server, found.keys, _CANCELLATION_TIMEOUT_S)
    target = _count(len(chosen), "request") if requests else f"job {found.name}"
    if done:
        console.print(f"{'Cancelled' if requests else 'Ended'} {target}.", markup=False, soft_wrap=True)
        return
    exit_with_error(
        EXIT_ENGINE,
        f"{target} did not end within {_CANCELLATION_TIMEOUT_S:.0f} s. The command is kept in Redis and is carried out "
        "as soon as the coordinator runs; see `rollout status`. If all processes of the job are gone for good, use "
        "`rollout end`",
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _listed(requests: list[str]) -> str:
    if not requests:
        return "no request is open"
    more = f" and {len(requests) - 10:,} more" if len(requests) > 10 else ""
    return f"open requests: {', '.join(requests[:10])}{more}"


_EVEN_WHEN_FULL = Function("even_when_full")
_IDS_PER_MESSAGE = 1000
_ENTRIES_PER_PAGE = 500
_POLL_INTERVAL_S = 0.1


def open_requests(server: redis.Redis, keys: MessageKeys) -> dict[str, int]:
    """Return the open requests of a job with their numbers of samples, in the order of their arrival.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    found: dict[str, int] = {}
    start = "-"
    while True:
        page: Any = server.xrange(keys.requests, min=start, count=_ENTRIES_PER_PAGE)
        for _, fields in page:
            try:
                request = decode(fields.get(MESSAGE_FIELD.encode(), b""))
            except CodecError:
                continue  # the coordinator moves it to the dead letters
            if isinstance(request, RolloutRequest):
                found[request.request_id] = request.sampling.n
        if len(page) < _ENTRIES_PER_PAGE:
            return found
        start = f"({page[-1][0].decode()}"


def cancel_requests(server: redis.Redis, keys: MessageKeys, request_ids: Sequence[str]) -> None:
    """Tell the coordinator to cancel requests.

    Raises:
        redis.RedisError: if Redis cannot be used; some of the cancellations may have been sent.
    """
    for start in range(0, len(request_ids), _IDS_PER_MESSAGE):
        _send(server, keys, encode(Cancel(request_ids=list(request_ids[start : start + _IDS_PER_MESSAGE]))))


def wait_until_answered(server: redis.Redis, keys: MessageKeys, request_ids: Sequence[str], timeout: float) -> bool:
    """Wait until requests are answered, and return whether they were within *timeout* seconds.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    return _wait(lambda: not set(request_ids) & set(open_requests(server, keys)), timeout)


def end_job(server: redis.Redis, keys: MessageKeys, timeout: float) -> bool:
    """Close a job as a trainer's ``close_job`` does, and cancel its requests, also those that are sent meanwhile.

    Returns:
        Whether the job has ended within *timeout* seconds.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    _send(server, keys, encode(Close()))
    cancelled: set[str] = set()

    def has_ended() -> bool:
        found = [request_id for request_id in open_requests(server, keys) if request_id not in cancelled]
        cancel_requests(server, keys, found)
        cancelled.update(found)
        return server.hget(keys.job, "state") in (b"closed", b"failed")

    return _wait(has_ended, timeout)


def _wait(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _send(server: redis.Redis, keys: MessageKeys, message: bytes) -> None:
    # Ending work frees memory, so it must be possible while Redis is full.
    run(server, Call(_EVEN_WHEN_FULL, [keys.control], ["XADD", keys.control, "*", MESSAGE_FIELD, message]))
