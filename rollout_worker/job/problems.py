"""Problems of a dataset source: prompts from reasoning-gym, and the reward of an answer."""

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
class Problem:
    """One prompt and how answers to it are scored."""

    problem_id: str
    prompt_token_ids: list[int]
    _dataset: Any
    _entry: Any

    def reward(self, response: str) -> float:
        """The generator's own score, 0 to 1, of the text between the last ``<answer>`` tags of *response*.

        An answer that the generator cannot read is worth 0: some scorers raise on what they do not expect.
        """
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(response)
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except Exception as error:
            logger.info("Scored 0, since the generator cannot read the answer %r: %s", answer, error)
            return 0.0


def load_problems(source: DatasetSource, tokenizer: Any) -> list[Problem]:
    """Draw the problems of *source*, each once; the same manifest always gives the same.

    Args:
        source: which problems.
        tokenizer: a transformers tokenizer; its chat template, if it has one, makes the prompt.

    Raises:
        ManifestError: naming each task that its generator does not accept.
    """
    problems: list[Problem] = []
    errors: list[FieldError] = []
    for number, task in enumerate(source.tasks):
        where = f"spec.source.dataset.tasks[{number}]"
        try:
            problems += _draw(task, source.seed, tokenizer)
        except _UnknownGeneratorError as error:
            errors.append(FieldError(f"{where}.generator", str(error)))
        except (AssertionError, TypeError, ValueError, KeyError) as error:
            message = f"{task.generator} does not accept it: {error or type(error).__name__}"
            errors.append(FieldError(f"{where}.config", message))
    if errors:
        raise ManifestError(errors)
    # a generator may draw one question twice; it is one problem
    return list({problem.problem_id: problem for problem in problems}.values())


class _UnknownGeneratorError(ValueError):
    pass


def _draw(task: Task, seed: int, tokenizer: Any) -> list[Problem]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task.generator not in DATASETS:
        close = difflib.get_close_matches(task.generator, DATASETS, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise _UnknownGeneratorError(f"reasoning-gym has no dataset {task.generator!r}{hint}")
    dataset = reasoning_gym.create_dataset(task.generator, seed=seed, size=task.problems, **task.config)
    problems = []
    for entry in dataset:
        prompt = _prompt(entry["question"], tokenizer)
        problems.append(Problem(problem_id_of(prompt), prompt, dataset, entry))
    return problems


def _prompt(question: str, tokenizer: Any) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(question)["input_ids"])
    messages = [{"role": "user", "content": question}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
