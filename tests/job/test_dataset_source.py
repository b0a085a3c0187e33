"""The problems of a dataset or an environment as prompts of a job, and their rewards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollout_api import ManifestError
from rollout_api.manifest.spec import DatasetSource, Environment
from rollout_head.dataset.problems import LoadedSource, load_environment, load_problems
from rollout_tools.cli.job_address import read_manifest
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
    first, second = (load_problems(source(problems=5), tokenizer) for _ in range(2))
    assert [p.problem_id for p in first] == [p.problem_id for p in second]
    assert len({p.problem_id for p in first}) == 5
    other = load_problems(source(problems=5).model_copy(update={"seed": 400}), tokenizer)
    assert not {p.problem_id for p in first} & {p.problem_id for p in other}


def test_the_prompt_is_the_question_in_the_models_chat_template(tokenizer: Any) -> None:
    (problem,) = load_problems(source(problems=1), tokenizer)
    text = tokenizer.decode(problem.prompt_token_ids)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")


def test_rewards_are_the_generators_own(tokenizer: Any) -> None:
    for problem in load_problems(source(problems=20), tokenizer):
        question = tokenizer.decode(problem.prompt_token_ids)
        terms = re.search(r"((?:\d+ [+-] )+\d+)", question)
        assert terms is not None
        answer = sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", terms[1]))
        assert problem.reward(f"so it is <answer>{answer}</answer>") == 1.0
        assert problem.reward(f"<answer>{answer + 1}</answer>") < 1.0
        assert problem.reward("no answer") < 1.0


def test_a_question_that_is_generated_twice_is_one_problem(tokenizer: Any) -> None:
    few = DatasetSource.model_validate(
        {"tasks": [{"name": "t", "generator": "count_bits", "problems": 40, "config": {"min_n": 1, "max_n": 20}}]}
    )
    problems = load_problems(few, tokenizer)
    assert len(problems) < 40
    assert len(problems) == len({problem.problem_id for problem in problems})


def test_an_answer_on_which_the_scorer_fails_gets_no_reward(tokenizer: Any) -> None:
    odd = DatasetSource.model_validate({"tasks": [{"name": "t", "generator": "prime_factorization", "problems": 2}]})
    for problem in load_problems(odd, tokenizer):
        assert problem.reward("<answer>1/0</answer>") < 1.0
        assert problem.reward("<answer>[</answer>") < 1.0


ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"
PATH = "spec.source.dataset.environment.entryPoint"


def load(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, prompts: list[Any], **settings: Any) -> LoadedSource:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    spec = Environment(entry_point="scripted:Prompts", args={"actions": prompts}, **settings)
    loaded = load_environment(spec, tokenizer)
    loaded.environment.close()
    return loaded


def test_prompts_are_texts_messages_or_token_ids(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]
    loaded = load(monkeypatch, tokenizer, ["3+4=", messages, [5, 6, 7]])
    text, conversation, tokens = [problem.prompt_token_ids for problem in loaded.problems]
    assert "<|im_start|>user\n3+4=<|im_end|>\n<|im_start|>assistant\n" == tokenizer.decode(text)
    assert "<|im_start|>system\nAdd." in tokenizer.decode(conversation)
    assert [5, 6, 7] == tokens
    assert ["0", "1", "2"] == [problem.problem_id for problem in loaded.problems]


def test_only_the_first_problems_are_used_if_there_is_a_maximum(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    loaded = load(monkeypatch, tokenizer, ["3+4="] * 5, max_problems=2)
    assert ["0", "1"] == [problem.problem_id for problem in loaded.problems]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "cannot be used: it has no problems"),
        ([[5, 100_000]], "problem '0' cannot be encoded: token id 100000 is outside of the vocabulary"),
        ([[]], "cannot be loaded: problem '0': the prompt is empty"),
        ([7], "cannot be loaded"),
    ],
)
def test_unusable_problems_are_errors_of_the_field(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, prompts: list[Any], message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        load(monkeypatch, tokenizer, prompts)
    (error,) = caught.value.errors
    assert PATH == error.path
    assert message in error.message


def test_a_model_without_chat_template_takes_one_users_message(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (problem,) = load(monkeypatch, tokenizer, ["3+4="]).problems
    assert "3+4=" == tokenizer.decode(problem.prompt_token_ids)
    with pytest.raises(ManifestError, match="has no chat template"):
        load(monkeypatch, tokenizer, [[{"role": "system", "content": "Add."}]])


def test_the_examples_environment_rewards_right_sums(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    examples = Path(__file__).parents[2] / "examples"
    monkeypatch.setenv("PYTHONPATH", str(examples))
    job = read_manifest(examples / "environment.yaml")
    spec = job.spec.source.dataset and job.spec.source.dataset.environment
    assert spec is not None
    loaded = load_environment(spec, tokenizer)
    try:
        assert 20 == len(loaded.problems)
        assert not loaded.samples_itself
        question = tokenizer.decode(loaded.problems[3].prompt_token_ids)
        terms = re.search(r"(\d+) \+ (\d+) =", question)
        assert terms is not None
        right = int(terms[1]) + int(terms[2])
        rewards = [
            loaded.environment.call("reward", {"problem": "sum-3", "text": text, "token_ids": []}).result(timeout=30)
            for text in (f"<answer>{right}</answer>", f"<answer>{right + 1}</answer>", "")
        ]
        assert [1.0, 0.0, 0.0] == rewards
    finally:
        loaded.environment.close()
