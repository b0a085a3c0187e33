"""The interface of a dataset source's Python environment: problems, rewards, and replies to the model's turns.

``spec.source.dataset.environment.entryPoint`` names a function that returns an :class:`Environment`. This module only
describes it: an environment need not import it, and may use mappings with the same keys in place of :class:`Problem`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, runtime_checkable

from typing_extensions import NotRequired


class ChatMessage(TypedDict):
    """One message of a conversation, in OpenAI's form."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str
    token_ids: NotRequired[list[int]]
    """Token ids of a response in a conversation of one turn."""


@dataclass(frozen=True)
class Problem:
    """One problem of an environment."""

    problem_id: str
    """Id under which the history keeps the rollouts, the same in each epoch; unique within the environment."""
    prompt: str | Sequence[ChatMessage] | Sequence[int]
    """The user's message, the messages of the conversation so far, or token ids of the whole prompt."""
    answer: Any = None
    """What the environment needs to compute rewards. It never leaves the environment's process."""


@runtime_checkable
class Environment(Protocol):
    """Problems and the rewards of their rollouts.

    The job calls the environment in a process of its own. Functions are called one at a time, in the main thread;
    coroutine functions run concurrently. An exception or a result that is no number is recorded as an error of the
    rollout, which gets no reward.
    """

    def problems(self) -> Iterable[Any]:
        """Return the problems: each a :class:`Problem`, an object with the same attributes, or a mapping.

        It is called again whenever the process is restarted, and must return the same problems.
        """

    def reward(self, problem: Any, messages: list[ChatMessage], /) -> float | Awaitable[float]:
        """Return the reward of a rollout.

        Args:
            problem: the object that :meth:`problems` has returned.
            messages: the conversation. Its last message is the model's. If the prompt consists of token ids,
                it is left out.
        """


class MultiTurnEnvironment(Environment, Protocol):
    """An environment that answers the model's turns."""

    def reply(
        self, problem: Any, messages: list[ChatMessage], /
    ) -> Sequence[Mapping[str, Any]] | str | Awaitable[Sequence[Mapping[str, Any]] | str | None] | None:
        """Return the messages that follow the model's last one, or the text of a user's message; None ends the rollout.

        The prompts of such an environment are texts or messages, and not token ids.
        """
