"""An environment of ``verifiers`` with a tool, which verifiers' own program calls."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Sums(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A server of tools."""

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class ToolTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A sum that the model computes with the tool."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """See the base class."""
        return [Sums(vf.ToolsetConfig())]

    @vf.reward
    async def results(self, trace: vf.Trace) -> float:
        """Return how often the tool has computed the sum."""
        return float(sum(message.role == "tool" and message.content == "7" for message in trace.branches[-1].messages))


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    """One sum."""

    def load(self) -> Any:
        """See the base class."""
        yield ToolTask(vf.TaskData(prompt="3+4="), self.config.task)


if __name__ == "__main__":
    Sums.run()
