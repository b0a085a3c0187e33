"""An environment whose functions do what a problem says, and count their calls in a file."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HOG = "blocks = []\nwhile True: blocks.append(bytearray(4_000_000))"


class ScriptedEnvironment:
    """Rewards are determined by the problem's answer, which names an action."""

    def __init__(self, actions: list[str], calls: str | None = None) -> None:
        self._actions, self._calls = actions, None if calls is None else Path(calls)

    def problems(self) -> Iterator[dict[str, Any]]:
        """Return one problem for each action."""
        print("loading the problems")
        os.write(1, b"\x00\xff not a message \n")
        for number, action in enumerate(self._actions):
            yield {"problem_id": f"{number}-{action}", "prompt": f"{number}+4=", "answer": action}

    def reward(self, problem: dict[str, Any], messages: list[dict[str, Any]]) -> Any:
        """Do what the answer says."""
        print("scoring", problem, messages)
        action = problem["answer"]
        if self._calls is not None:
            with self._calls.open("a") as file:
                file.write(f"{os.getpid()} {problem['problem_id']}\n")
        return getattr(self, f"_{action}")()

    def _one(self) -> float:
        return 1.0

    def _raise(self) -> float:
        raise LookupError("the judge is gone")

    def _sys_exit(self) -> float:
        sys.exit("unlicensed")

    def _cancelled(self) -> float:
        raise asyncio.CancelledError

    def _nan(self) -> float:
        return float("nan")

    def _none(self) -> None:
        return None

    def _text(self) -> str:
        return "1.0"

    def _hang(self) -> float:
        time.sleep(1000)
        return 1.0

    def _block(self) -> float:
        return self._hang()

    def _keep_lock(self) -> float:
        return 1.0 if re.match("(a+)+$", "a" * 64 + "b") else 0.0  # takes years, and no other thread runs meanwhile

    def _die(self) -> float:
        os._exit(7)

    def _segfault(self) -> float:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    def _hog(self) -> float:
        blocks = []
        while True:
            blocks.append(bytearray(4_000_000))

    def _child_hog(self) -> float:
        subprocess.run([sys.executable, "-c", _HOG])
        return 1.0

    def _sees_secret(self) -> float:
        return float("OTHER" not in os.environ or "hunter2" in str(os.environ))

    def _close_output(self) -> float:
        os.close(1)
        os.close(2)
        return 1.0

    def _slow(self) -> float:
        time.sleep(1.5)
        return 1.0

    def _nap(self) -> float:
        time.sleep(0.4)
        return 1.0

    def _print(self) -> float:
        for _ in range(20_000):
            print("{}" * 20)
        return 1.0


class AsyncEnvironment(ScriptedEnvironment):
    """The same, with coroutine functions."""

    async def reward(self, problem: dict[str, Any], messages: list[dict[str, Any]]) -> Any:
        """Wait a moment, or forever, before the reward."""
        if problem["answer"] == "hang":
            await asyncio.sleep(1000)
        kept = b"1" * 40_000_000 if problem["answer"] == "keep" else b""
        await asyncio.sleep(0.5)
        if kept:
            return 1.0
        return super().reward(problem, messages)


def make(actions: list[str], calls: str | None = None) -> ScriptedEnvironment:
    """Return the environment."""
    return ScriptedEnvironment(actions, calls)


def make_async(actions: list[str], calls: str | None = None) -> AsyncEnvironment:
    """Return the environment with coroutine functions."""
    return AsyncEnvironment(actions, calls)


def make_nothing() -> object:
    """Return something that is no environment."""
    return object()


def fail() -> None:
    """Raise an exception."""
    raise OSError("the data set is offline")


def die() -> None:
    """End the process."""
    print("out of disk space")
    os._exit(9)


class RepeatedIds(ScriptedEnvironment):
    """Two problems have the same id."""

    def problems(self) -> Iterator[dict[str, Any]]:
        """Return the problems twice."""
        yield from super().problems()
        yield from super().problems()


class StrangePrompts(ScriptedEnvironment):
    """Prompts are not what they should be."""

    def problems(self) -> Iterator[dict[str, Any]]:
        """Return problems with a prompt of fractions."""
        yield {"problem_id": "a", "prompt": [0.5, 1.5]}


class Dialogue(ScriptedEnvironment):
    """A conversation of three turns. Rewards are the number of the model's messages."""

    def reply(self, problem: dict[str, Any], messages: list[dict[str, Any]]) -> str | None:
        """Return the next question."""
        turns = sum(message["role"] == "assistant" for message in messages)
        if problem["answer"] == "die" and turns == 2:
            os._exit(7)
        return f"{turns}+4=" if turns < 3 else None

    def reward(self, problem: dict[str, Any], messages: list[dict[str, Any]]) -> Any:
        """Return the number of turns, or do what the answer says."""
        if problem["answer"] != "one":
            return super().reward(problem, messages)
        assert [message["role"] for message in messages] == ["user", "assistant"] * 3
        return 3.0


class SlowDialogue(Dialogue):
    """The same, with rewards that take a second and are counted."""

    def reward(self, problem: dict[str, Any], messages: list[dict[str, Any]]) -> Any:
        """Return the number of turns."""
        time.sleep(1)
        ScriptedEnvironment.reward(self, problem, messages)
        return 3.0


class Prompts(ScriptedEnvironment):
    """One problem for each given prompt."""

    def problems(self) -> Iterator[dict[str, Any]]:
        """Return the problems."""
        for number, prompt in enumerate(self._actions):
            yield {"problem_id": str(number), "prompt": prompt}
