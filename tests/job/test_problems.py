"""The problems of a dataset source and their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_api.manifest.spec import DatasetSource
from tests.support.random_policies import make_policies


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    cache: Path = tmp_path_factory.mktemp("models")
    (name,) = make_policies(cache, versions=1)
    return AutoTokenizer.from_pretrained(cache / name)


def source(**task: Any) -> DatasetSource:
    return DatasetSource.model_validate({"seed": 3, "tasks": [{"name": "t", "generator": "chain_sum", **task}]})


def test_the_same_source_always_gives_the_same_problems(tokenizer: Any) -> None:
    from rollout_head.dataset.problems import load_problems

    first, second = (load_problems(source(problems=5), tokenizer) for _ in range(2))
    assert [p.problem_id for p in first] == [p.problem_id for p in second]
    assert len({p.problem_id for p in first}) == 5
    other = load_problems(source(problems=5).model_copy(update={"seed": 400}), tokenizer)
    assert not {p.problem_id for p in first} & {p.problem_id for p in other}


def test_the_prompt_is_the_question_in_the_models_chat_template(tokenizer: Any) -> None:
    from rollout_head.dataset.problems import load_problems

    (problem,) = load_problems(source(problems=1), tokenizer)
    text = tokenizer.decode(problem.prompt_token_ids)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")


def test_rewards_are_the_generators_own(tokenizer: Any) -> None:
    import re

    from rollout_head.dataset.problems import load_problems

    for problem in load_problems(source(problems=20), tokenizer):
        question = tokenizer.decode(problem.prompt_token_ids)
        terms = re.search(r"((?:\d+ [+-] )+\d+)", question)
        assert terms is not None
        answer = sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", terms[1]))
        assert problem.reward(f"so it is <answer>{answer}</answer>") == 1.0
        assert problem.reward(f"<answer>{answer + 1}</answer>") < 1.0
        assert problem.reward("no answer") < 1.0


def test_a_question_that_is_generated_twice_is_one_problem(tokenizer: Any) -> None:
    from rollout_head.dataset.problems import load_problems

    few = DatasetSource.model_validate(
        {"tasks": [{"name": "t", "generator": "count_bits", "problems": 40, "config": {"min_n": 1, "max_n": 20}}]}
    )
    problems = load_problems(few, tokenizer)
    assert len(problems) < 40
    assert len(problems) == len({problem.problem_id for problem in problems})


def test_an_answer_on_which_the_scorer_fails_gets_no_reward(tokenizer: Any) -> None:
    from rollout_head.dataset.problems import load_problems

    odd = DatasetSource.model_validate({"tasks": [{"name": "t", "generator": "prime_factorization", "problems": 2}]})
    for problem in load_problems(odd, tokenizer):
        assert problem.reward("<answer>1/0</answer>") < 1.0
        assert problem.reward("<answer>[</answer>") < 1.0
