"""Commands that run ``rollout`` in the pod of a job's head, which has the URL of the job's Redis."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_api.kubectl_plugin.jobs import full_name
from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError
from rollout_api.kubectl_plugin.pods import HEAD, running_head


def exec_arguments(pod: str, job: Mapping[str, Any], command: Sequence[str], *, columns: int, tty: bool) -> list[str]:
    """Return the arguments of ``kubectl`` that run a command of ``rollout`` for a job in its head.

    Args:
        pod: the head's pod.
        job: the job.
        command: name of the command and its further arguments.
        columns: width of the user's terminal.
        tty: whether the command gets the user's terminal.
    """
    name, *arguments = command
    rollout = ["rollout", name, full_name(job), *arguments, f"--uid={job['metadata']['uid']}"]
    # Without a terminal of its own, the command does not know how wide the user's is.
    environment = [] if tty else ["env", f"COLUMNS={columns}"]
    return ["exec", *(["-it"] if tty else []), pod, "-c", HEAD, "--", *environment, *rollout]


def run_in_head(kubectl: Kubectl, job: Mapping[str, Any], *command: str, tty: bool = False) -> int:
    """Run a command of ``rollout`` in the head, and return its exit code.

    Raises:
        PluginError: if no head runs, or kubectl fails.
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    columns = shutil.get_terminal_size((100, 24)).columns
    pod = running_head(kubectl, job)
    return kubectl.show(*exec_arguments(pod, job, command, columns=columns, tty=tty and has_terminal))


def save_report(kubectl: Kubectl, job: Mapping[str, Any], target: Path) -> int:
    """Let the head write the job's report, copy it to *target*, and return the exit code.

    Raises:
        PluginError: if no head runs, or the report cannot be copied.
    """
    pod = running_head(kubectl, job)
    remote = f"/tmp/report-{secrets.token_hex(8)}.html"  # noqa: S108 - a volume of the pod
    code = kubectl.show(*exec_arguments(pod, job, ("report", f"--html={remote}"), columns=100, tty=False))
    if code:
        return code
    try:
        with target.open("wb") as file:
            return kubectl.save(file, "exec", pod, "-c", HEAD, "--", "cat", remote)
    except OSError as error:
        raise PluginError(f"cannot write {target}: {error.strerror}") from None
    finally:
        kubectl.show("exec", pod, "-c", HEAD, "--", "rm", "-f", remote)
