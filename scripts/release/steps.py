"""Runs the steps of a check and prints one line for each: whether it succeeded, and how long it took."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

_Result = TypeVar("_Result")


class CheckError(Exception):
    """Something is wrong with the release."""


class NotCheckedError(Exception):
    """This machine lacks what a step needs."""


def run(*command: str | Path, cwd: Path | None = None, programs: Path | None = None, timeout_s: float = 1800) -> str:
    """Run a program and return what it wrote to its standard output.

    Args:
        command: the program and its arguments.
        cwd: its working directory.
        programs: a folder with programs that it may run itself.
        timeout_s: seconds that it may take.

    Raises:
        CheckError: if it cannot be started, fails or takes too long; the message contains its output.
    """
    arguments = [str(argument) for argument in command]
    environment = None if programs is None else {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckError(f"{' '.join(arguments)}: {error}") from error
    if done.returncode:
        output = (done.stdout + done.stderr).strip()
        raise CheckError(f"{' '.join(arguments)} failed with exit code {done.returncode}:\n{output}")
    return done.stdout


@dataclass
class Report:
    """The results of all steps so far."""

    failed: list[str] = field(default_factory=list)
    """Names of the steps that failed."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """Names of the steps that cannot run on this machine → why."""

    def step(self, name: str, check: Callable[[], _Result]) -> _Result | None:
        """Run a step and return its result, or None if it failed or cannot run on this machine."""
        started, result, error, outcome = time.monotonic(), None, "", "ok"
        try:
            result = check()
        except NotCheckedError as reason:
            self.not_checked[name] = str(reason)
            outcome = "not checked"
        except CheckError as failure:
            self.failed.append(name)
            outcome, error = "failed", str(failure)
        print(f"{outcome:<11}  {time.monotonic() - started:5.1f} s  {name}", flush=True)
        if error:
            print(error, file=sys.stderr, flush=True)
        return result

    def finish(self, *, strict: bool) -> int:
        """Print a summary and return the exit code: 1 if a step failed, or, if *strict*, was not checked."""
        print()
        for name, reason in self.not_checked.items():
            print(f"not checked: {name}: {reason}")
        for name in self.failed:
            print(f"failed: {name}")
        if not self.failed and not self.not_checked:
            print("Everything was checked.")
        return int(bool(self.failed or (strict and self.not_checked)))
