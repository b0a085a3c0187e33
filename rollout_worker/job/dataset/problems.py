"""Problems of a dataset source: prompts from reasoning-gym, and the scoring of responses."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import Any

from rollout_api.manifest.rollout_job import FieldError, ManifestError
from rollout_api.manifest.spec import DatasetSource, Task
from rollout_api.protocol.messages import problem_id_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetProblem:
    """One prompt and the scoring of its responses."""

    problem_id: str
    prompt_token_ids: list[int]
    _dataset: Any
    _entry: Any

    def reward(self, response: str) -> float:
        """Score the text between the last ``<answer>`` tags of *response* with the generator's own scorer.

        Returns:
            A score from 0 to 1; 0 for an answer on which the scorer raises an error, as some do.
        """
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(response)
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except Exception as error:
            logger.info("The scorer cannot read the answer %r, which therefore scores 0: %s", answer, error)
            return 0.0


def load_problems(source: DatasetSource, tokenizer: Any) -> list[DatasetProblem]:
    """Generate the distinct problems of *source*. The same manifest always gives the same problems.

    Args:
        source: the tasks of the manifest.
        tokenizer: a transformers tokenizer. If it has a chat template, the prompts use it.

    Raises:
        ManifestError: naming each task that its generator does not accept.
    """
    problems: list[DatasetProblem] = []
    errors: list[FieldError] = []
    for number, task in enumerate(source.tasks):
        path = f"spec.source.dataset.tasks[{number}]"
        try:
            problems += _generate(task, source.seed, tokenizer)
        except _UnknownGeneratorError as error:
            errors.append(FieldError(f"{path}.generator", str(error)))
        except (AssertionError, TypeError, ValueError, KeyError) as error:
            message = f"{task.generator} rejects these settings: {error or type(error).__name__}"
            errors.append(FieldError(f"{path}.config", message))
    if errors:
        raise ManifestError(errors)
    # A generator may generate a question twice, which is one problem.
    return list({problem.problem_id: problem for problem in problems}.values())


class _UnknownGeneratorError(ValueError):
    pass


def _generate(task: Task, seed: int, tokenizer: Any) -> list[DatasetProblem]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task.generator not in DATASETS:
        close = difflib.get_close_matches(task.generator, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise _UnknownGeneratorError(f"reasoning-gym has no dataset {task.generator!r}{hint}")
    dataset = reasoning_gym.create_dataset(task.generator, seed=seed, size=task.problems, **task.config)
    problems = []
    for entry in dataset:
        prompt = _encode_prompt(entry["question"], tokenizer)
        problems.append(DatasetProblem(problem_id_of(prompt), prompt, dataset, entry))
    return problems


def _encode_prompt(question: str, tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(question)["input_ids"])
    messages = [{"role": "user", "content": question}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
