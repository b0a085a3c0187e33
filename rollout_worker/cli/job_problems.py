"""Problems of a job that its status shows, each with what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.status import CoordinatorStatus


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

    Args:
        is_local: whether the job runs with ``rollout run``.
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
    for client in status["slow_clients"]:
        unread_mib = status["unread_bytes"].get(client, 0) / 2**20
        yield Problem(
            f"The client {client} has not read {unread_mib:,.1f} MiB of results, so its requests wait",
            "Is this trainer still running? It has to read its results, or its requests have to be cancelled.",
        )
    if status["dead_letters"]:
        stream = MessageKeys(status["uid"]).dead_letters
        yield Problem(
            f"{status['dead_letters']} messages could not be read or processed",
            f"The Redis stream {stream} has them with the reasons. Do trainer and job run the same version?",
        )
