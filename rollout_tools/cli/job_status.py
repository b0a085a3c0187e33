"""The status of a job, and its problems, each with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import redis
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollout_api.client.job_info import parse_status
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.status import CoordinatorStatus, EngineEntry
from rollout_tools.cli.job_address import FoundJob


class Problem(NamedTuple):
    """Something that a person should look at."""

    what: str
    remedy: str


def problems_of_ended_job(state: str, reason: str | None) -> list[Problem]:
    """Return what is wrong with a job that has ended with *state*, ``closed`` or ``failed``."""
    if state == "closed":
        return []
    return [
        Problem(
            f"The job has failed{f': {reason}' if reason else ''}",
            "Its finished rollouts are in its history. Start a new job with the same history to continue.",
        )
    ]


def missing_coordinator(*, is_local: bool) -> Problem:
    """Return what to do about a job whose coordinator publishes no status.

    *is_local* says whether the job runs with ``rollout run``.
    """
    command = "`rollout run`" if is_local else "`rollout head`, or its pod,"
    return Problem(
        "The coordinator does not run, or does not reach Redis, because its status has expired",
        f"Look at `rollout logs`. If {command} has ended, start it again with the same manifest: the job continues, "
        "and requests and finished rollouts are kept in Redis meanwhile.",
    )


def problems(status: CoordinatorStatus) -> list[Problem]:
    """Return what the status of a running job shows to be wrong, the most serious first."""
    return [*_of_engines(status), *_of_drafts(status), *_of_environment(status), *_of_messages(status)]


def _of_engines(status: CoordinatorStatus) -> Iterator[Problem]:
    if status["state"] == "paused":
        yield Problem("The job is paused", "A trainer resumes it with client.resume().")
    for name, reason in status["engine_errors"].items():
        yield Problem(
            f"{name} cannot start: {reason}",
            "Correct the manifest's section `engine`, or what the message names; the start is repeated every 30 s.",
        )
    if not status["engines"] and not status["engine_errors"]:
        yield Problem(
            "No engine serves yet", "Engines load their model for up to some minutes. `rollout logs` shows how far."
        )
    if status["engines_lost"]:
        yield Problem(
            f"{status['engines_lost']} engines were lost since the coordinator has started",
            "Their rollouts continue on other engines. `rollout logs` shows why the processes have ended; often the "
            "memory was exhausted.",
        )
    for engine in status["engines"]:
        for version, reason in engine["failed"].items():
            yield Problem(
                f"{engine['name']} could not load weight version {version}: {reason}",
                f"Publish a newer version that the engine can read; until then, it serves version {engine['version']}.",
            )


def _of_drafts(status: CoordinatorStatus) -> Iterator[Problem]:
    if status["distribution_drift"]:
        yield Problem(
            "Drafting changes the output distribution, which it must never do",
            'Create the job with `speculation.policy: "off"`, and report the problem.',
        )
    for name in status["unverified"]:
        yield Problem(
            f"vLLM does not verify the drafts that are proposed on {name}, so drafting costs time and saves none",
            "vLLM's warnings about speculation in `rollout logs` state the reason.",
        )
    if disabled := [engine["name"] for engine in status["engines"] if engine["speculation_disabled"]]:
        yield Problem(
            f"Drafting did not pay on {', '.join(disabled)}, which now run without speculation",
            "Nothing has to be done: the rollouts are as fast as with plain vLLM.",
        )


def _of_environment(status: CoordinatorStatus) -> Iterator[Problem]:
    for kind, errors in status["environment_errors"].items():
        yield Problem(
            f"{errors['count']} rollouts got no reward from the environment ({kind}). The first one is of problem "
            f"{errors['problem']}: {errors['message']}",
            "Correct the environment (source.dataset.environment). The job continues.",
        )


def _of_messages(status: CoordinatorStatus) -> Iterator[Problem]:
    silent = status.get("silent_clients", [])
    for client in silent:
        yield Problem(
            f"The client {client} has not noticed new results for a minute, so other clients' requests come first",
            "Is this process still running? If it is, something blocks the event loop of its AsyncRolloutClient. If it "
            "will not return under this name, nothing has to be done.",
        )
    for client in sorted({*status["slow_clients"]} - {*silent}):
        unread_mib = status["unread_bytes"].get(client, 0) / 2**20
        yield Problem(
            f"The client {client} has not read {unread_mib:,.1f} MiB of results, so its requests wait",
            "Is this trainer still running? It has to read its results, or its requests have to be cancelled.",
        )
    if status["dead_letters"]:
        stream = MessageKeys(status["uid"]).dead_letters
        yield Problem(
            f"{status['dead_letters']} messages could not be read or processed",
            f"The Redis stream {stream} has the beginning of each, with the reason. Do trainer and job run the same "
            "version?",
        )
    if conflicts := status.get("conflicts", 0):  # an earlier release does not count them
        yield Problem(
            f"{conflicts} rewards or rollouts were not recorded, because the job does not know their tokens: Redis "
            "lost rollouts in a crash, and they may have been sampled again, or rewards came more than seven days "
            "later",
            "Redis should write every change to disk at once (appendfsync always), or keep replicas, so that it loses "
            "nothing. The newest dead letters have the refused rewards, and the beginning of each refused rollout.",
        )


ENDED_STATES = ("closed", "failed")
NO_COORDINATOR = "no coordinator"
"""State of a job whose coordinator does not publish a status."""


@dataclass(frozen=True)
class JobSnapshot:
    """What Redis says about a job at one moment."""

    job: FoundJob
    state: str
    """State by the job's status, ``closed``, ``failed``, or :data:`NO_COORDINATOR`."""
    reason: str | None
    """Why the job has failed."""
    done: int
    """Rollouts that have ended."""
    status: CoordinatorStatus | None
    """The coordinator's status; None if no coordinator runs."""

    def as_json(self) -> str:
        """Return the coordinator's status, or the few fields of it that are known without a coordinator."""
        if self.status is not None:
            return json.dumps(self.status)
        known = {"job": self.job.name, "uid": self.job.uid, "state": self.state, "done": self.done}
        return json.dumps(known | ({"reason": self.reason} if self.reason else {}))

    @property
    def is_healthy(self) -> bool:
        """Whether the job runs or was closed, as opposed to one that has failed or has no coordinator."""
        return self.state not in ("failed", NO_COORDINATOR)

    @property
    def state_text(self) -> str:
        """What the job is, as the end of a sentence."""
        if self.state == NO_COORDINATOR:
            return "without a coordinator"
        return {"closing": "closing: it ends when all requests are answered"}.get(self.state, self.state)

    @property
    def problems(self) -> list[Problem]:
        """What is wrong, and what to do."""
        if self.status is not None:
            return problems(self.status)
        if self.state == NO_COORDINATOR:
            return [missing_coordinator(is_local=self.job.directory is not None)]
        return problems_of_ended_job(self.state, self.reason)


def read_snapshot(server: redis.Redis, job: FoundJob) -> JobSnapshot:
    """Read what Redis says about a job.

    Raises:
        redis.RedisError: if Redis cannot be used.
    """
    keys = MessageKeys(job.uid)
    pipeline = server.pipeline(transaction=False)
    pipeline.hmget(keys.job, ["state", "reason"])
    pipeline.get(keys.status)
    pipeline.hget(keys.totals, "rollouts")
    (state, reason), published, done = pipeline.execute()
    recorded, why = (None if value is None else value.decode() for value in (state, reason))
    if recorded in ENDED_STATES:  # the last status lives on for some seconds
        return JobSnapshot(job, recorded, why, int(done or 0), None)
    status = parse_status(published)
    return JobSnapshot(job, status["state"] if status else NO_COORDINATOR, None, int(done or 0), status)


def print_snapshot(snapshot: JobSnapshot, console: Console) -> None:
    """Show a job on one screen."""
    job, status = snapshot.job, snapshot.status
    of_uid = f" (uid {job.uid})" if job.uid != job.name else ""
    done = snapshot.done if status is None else status["done"]
    console.print(Text(f"Job {job.name}{of_uid} is {snapshot.state_text}; {_progress(done, status)}."), soft_wrap=True)
    if status is not None:
        console.print(Padding(_facts(status), (0, 0, 0, 2)))
        if status["engines"]:
            console.print(Padding(_engines(status["engines"]), (1, 0, 0, 2)))
    if snapshot.problems:
        console.print()
    for problem in snapshot.problems:
        console.print(Text("! ", "bold yellow").append(_sentence(problem.what), "default"), soft_wrap=True)
        console.print(Text(f"  {problem.remedy}"), soft_wrap=True)


def _progress(done: int, status: CoordinatorStatus | None) -> str:
    if status is None or status["total"] is None:
        return f"{done:,} rollouts are done"
    epoch = f", in epoch {status['epoch']}" if status["epoch"] else ""
    return f"{done:,} of {status['total']:,} rollouts are done{epoch}"


def _facts(status: CoordinatorStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    left = status["remaining_seconds"]
    remaining = f"; about {duration(left)} left" if left else ""
    table.add_row("requests", f"{status['requests']:,} open{remaining}")
    table.add_row("rollouts", f"{status['assigned']:,} running, {status['waiting']:,} waiting")
    table.add_row("speed", f"{status['tokens_per_second']:,.0f} tokens/s")
    accepted = f"{status['accepted_per_step']:.2f} tokens accepted per decoding step"
    table.add_row("drafts", accepted + _saving(status["saved"]))
    table.add_row("weights", f"version {status['weight_version']}, served by {engines_with_newest_weights(status)}")
    if unread := unread_results(status):
        table.add_row("unread", unread)
    table.add_row("dead letters", f"{status['dead_letters']:,}")
    return table


def _engines(engines: Sequence[EngineEntry]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("engine", "worker"):
        table.add_column(name, overflow="fold")
    for name in ("version", "rollouts", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state")
    for engine in sorted(engines, key=lambda engine: engine["name"]):
        table.add_row(
            engine["name"],
            engine["worker"] or "–",
            str(engine["version"]),
            f"{engine['assigned']}/{engine['max_running']}",
            f"{engine['tokens_per_second']:,.0f}",
            engine_state(engine),
        )
    return table


def engines_with_newest_weights(status: CoordinatorStatus) -> str:
    """Return how many engines serve the newest weight version."""
    current = sum(engine["version"] == status["weight_version"] for engine in status["engines"])
    return f"{current} of {len(status['engines'])} engines"


def unread_results(status: CoordinatorStatus) -> str:
    """Return how much each client has not read; empty if all have read everything."""
    unread = {client: size for client, size in status["unread_bytes"].items() if size}
    return ", ".join(f"{size / 2**20:,.1f} MiB of {client}" for client, size in unread.items())


def engine_state(engine: EngineEntry) -> str:
    """Return what an engine is doing, in a few words."""
    if engine["draining"]:
        return "leaving the job"
    if engine["non_speculative"] or engine["speculation_disabled"]:
        return "without speculation"
    return "idle" if not engine["assigned"] else "running"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _saving(saved: float | None) -> str:
    """Return what drafting has saved, as the end of a sentence; *saved* is a share of the decoding time."""
    if saved is None:
        return ""
    return f"; {saved:.0%} of the decoding time saved" if saved >= 0 else f"; decoding takes {-saved:.0%} longer"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
