"""The problems of an environment, as prompts of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.manifest.rollout_job import FieldError, ManifestError
from rollout_api.manifest.spec import Environment
from rollout_worker.environment.errors import EnvironmentLoadError
from rollout_worker.environment.supervisor import EnvironmentSupervisor
from rollout_worker.job.dataset.problems import encode_prompt

_PATH = "spec.source.dataset.environment"


@dataclass(frozen=True)
class EnvironmentProblem:
    """One problem of an environment."""

    problem_id: str
    prompt_token_ids: list[int]
    """Token ids of the prompt; empty if only the environment knows it."""


@dataclass(frozen=True)
class LoadedSource:
    """An environment that runs, and its problems."""

    environment: EnvironmentSupervisor
    problems: list[EnvironmentProblem]
    samples_itself: bool
    """Whether the environment itself asks for the responses, turn by turn."""
    scores_groups: bool
    """Whether rewards compare the rollouts of a problem."""


def load_environment(spec: Environment, tokenizer: Any) -> LoadedSource:
    """Start the environment's process and read its problems.

    Args:
        spec: the environment.
        tokenizer: a transformers tokenizer. If it has a chat template, the prompts use it.

    Raises:
        ManifestError: if the environment cannot be loaded, or its problems cannot be used.
    """
    environment = EnvironmentSupervisor(spec)
    try:
        loaded = environment.load()
    except EnvironmentLoadError as error:
        raise ManifestError([FieldError(f"{_PATH}.{spec.field}", f"cannot be loaded: {error}")]) from None
    try:
        if not loaded.problems:
            raise ValueError("it has no problems")
        problems = [
            EnvironmentProblem(
                problem["id"], [] if loaded.samples_itself else _encode(problem["id"], problem["prompt"], tokenizer)
            )
            for problem in loaded.problems
        ]
    except ValueError as error:
        environment.close()
        raise ManifestError([FieldError(f"{_PATH}.{spec.field}", f"cannot be used: {error}")]) from None
    return LoadedSource(environment, problems, loaded.samples_itself, loaded.scores_groups)


def _encode(problem_id: str, prompt: Sequence[int] | Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    messages = [one for one in prompt if isinstance(one, Mapping)]
    try:
        if messages:
            return encode_prompt(messages, tokenizer)
        tokens = [token for token in prompt if isinstance(token, int)]
        if outside := [token for token in tokens if not 0 <= token < len(tokenizer)]:
            raise ValueError(f"token id {outside[0]} is outside of the vocabulary, which has {len(tokenizer)} tokens")
        return tokens
    except Exception as error:  # a chat template is a program, which may raise anything
        raise ValueError(f"the prompt of the problem {problem_id!r} cannot be encoded: {error}") from error
