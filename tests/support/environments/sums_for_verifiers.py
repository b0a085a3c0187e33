"""An environment of ``verifiers`` about sums, with one turn or several.

Its agent is a loop in the process of the environment, which is faster than a program.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["SumsEnvironment", "SumsHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """The first sum of a conversation."""

    @vf.reward
    async def number_of_responses(self, trace: vf.Trace) -> float:
        """Return how many responses there are."""
        return float(sum(message.role == "assistant" for message in trace.branches[-1].messages))


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Three sums. The environment fails for the last one."""

    def load(self) -> Any:
        """See the base class."""
        for number, answer in enumerate(["5", "6", "unanswerable"], start=1):
            yield SumTask(SumData(prompt=f"{number}+4=", answer=answer), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one response."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """See the base class."""
        prompt = data.prompt
        wire = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(m) for m in prompt]
        )
        async with httpx.AsyncClient(timeout=600) as client:
            response = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": wire},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=0 if response.is_success else 1, stdout="", stderr=response.text)


class SumsConfig(vf.EnvConfig):
    """Settings of the environment."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    turns: int = 1
    marker: str = ""
    """File that exists if the process has died once."""


class SumsEnvironment(vf.Env[SumsConfig]):
    """Asks for one sum after the other. It fails for one problem, and its process dies once."""

    async def run(self, task: SumTask, agents: Any) -> None:
        """See the base class."""
        async with agents.agent.interaction(task) as conversation:
            await conversation.turn()
            for number in range(1, self.config.turns):
                if self.config.marker and task.data.answer == "unanswerable":
                    raise LookupError("this sum has no successor")
                if self.config.marker and number == 2 and not Path(self.config.marker).exists():
                    Path(self.config.marker).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                await conversation.turn(f"{number}+4=")
