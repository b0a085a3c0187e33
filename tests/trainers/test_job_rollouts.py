"""The adapter for TRL, with a real client and a real Redis. The job and the trainer are fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import (
    FinishReason,
    Purpose,
    Rollout,
    RolloutClient,
    RolloutClientError,
    RolloutRequest,
    Trajectory,
    WeightsError,
    step_metrics,
)
from rollout_api.integrations.trl import JobRollouts, TurnFunction, group_repeats
from tests.support.updating_job import UpdatingJob

PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=20)


class Tokenizer:
    """A tokenizer with one token per character that renders messages as their contents."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in chat] for chat in text]}

    def apply_chat_template(self, conversation: list[list[dict[str, str]]], **_: Any) -> dict[str, list[list[int]]]:
        return self(["".join(message["content"] for message in chat) for chat in conversation])


class Model:
    training = True

    def save_pretrained(self, directory: Path, state_dict: dict[str, Any]) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(state_dict["bytes"])


def trainer(step: int = 0, **settings: Any) -> SimpleNamespace:
    """Return the attributes of a GRPOTrainer that the adapter reads."""
    model = Model()
    accelerator = SimpleNamespace(
        is_main_process=True,
        device=torch.device("cpu"),
        distributed_type="NO",
        get_state_dict=lambda _: {"bytes": b"weights"},
        unwrap_model=lambda model, **_: model,
    )
    defaults: dict[str, Any] = {
        "model": model,
        "model_wrapped": model,
        "accelerator": accelerator,
        "state": SimpleNamespace(global_step=step),
        "processing_class": Tokenizer(),
        "chat_template": None,
        "chat_template_kwargs": {},
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "eos_token_ids": [2],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 8,
        "args": SimpleNamespace(
            use_vllm=False, generation_kwargs=None, vllm_structured_outputs_regex=None, vllm_enable_sleep_mode=False
        ),
    }
    return SimpleNamespace(**(defaults | settings))


@pytest.fixture
def job(redis_url: str) -> Iterator[UpdatingJob]:
    with (job := UpdatingJob(redis_url)).serving():
        yield job


@pytest.fixture
def client(job: UpdatingJob, redis_url: str) -> Iterator[RolloutClient]:
    with RolloutClient.connect(redis_url, job.name, name="rank-0") as client:
        yield client


@given(PROMPTS)
def test_group_repeats_contains_each_position_once_in_order(prompts: list[list[int]]) -> None:
    distinct, positions = group_repeats(prompts)
    assert sorted(position for at in positions for position in at) == list(range(len(prompts)))
    assert all(prompts[position] == prompt for prompt, at in zip(distinct, positions, strict=True) for position in at)
    assert len({tuple(prompt) for prompt in distinct}) == len(distinct)
    assert [at[0] for at in positions] == sorted(at[0] for at in positions)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_group_may_be_split_over_processes(n: int, processes: int, data: st.DataObject) -> None:
    # TRL repeats each prompt n times in a row and then divides the batch into equal parts, in the order of ranks.
    count = processes * data.draw(st.integers(1, 4))
    whole = [[prompt] for prompt in range(count) for _ in range(n)]
    share = len(whole) // processes
    requested: dict[int, int] = dict.fromkeys(range(count), 0)
    for rank in range(processes):
        distinct, positions = group_repeats(whole[rank * share : (rank + 1) * share])
        assert all(at == list(range(at[0], at[0] + len(at))) for at in positions)
        for prompt, at in zip(distinct, positions, strict=True):
            requested[prompt[0]] += len(at)
    assert dict.fromkeys(range(count), n) == requested


def test_each_entry_receives_a_sample_of_its_prompt(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    rollouts = JobRollouts(client, tmp_path)
    output = rollouts(["a", "bc", "a", "a"], trainer())
    assert [[97], [98, 99], [97], [97]] == output["prompt_ids"]
    assert {(97,): 3, (98, 99): 1} == {tuple(request.prompt_token_ids): request.sampling.n for request in job.received}
    assert 4 == len({rollout.rollout_id for rollout in output["rollout"]})
    by_prompt = {tuple(request.prompt_token_ids): request.request_id for request in job.received}
    for prompt, tokens, logprobs, rollout in zip(
        output["prompt_ids"], output["completion_ids"], output["logprobs"], output["rollout"], strict=True
    ):
        assert by_prompt[tuple(prompt)] in rollout.rollout_id
        assert rollout.token_ids == tokens
        assert len(tokens) == len(logprobs)
    assert "env_mask" not in output


def test_messages_are_rendered_by_the_chat_template(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert [[97, 98]] == JobRollouts(client, tmp_path)([chat], trainer())["prompt_ids"]


def test_trainers_sampling_settings_are_used_and_can_be_overridden(
    job: UpdatingJob, client: RolloutClient, tmp_path: Path
) -> None:
    arguments = SimpleNamespace(
        use_vllm=False, generation_kwargs=None, vllm_structured_outputs_regex="a+", vllm_enable_sleep_mode=False
    )
    JobRollouts(client, tmp_path, sampling={"stop": ["x"], "top_p": 0.5})(["a"], trainer(args=arguments))
    [request] = job.received
    assert (0.7, 0.5, 8, True, ["x"]) == (
        request.sampling.temperature,
        request.sampling.top_p,
        request.sampling.max_tokens,
        request.sampling.logprobs,
        request.sampling.stop,
    )
    assert {"regex": "a+"} == request.sampling.structured_outputs
    assert "min_p" not in request.sampling.model_fields_set


def test_weights_are_published_once_per_step_and_pinned(
    job: UpdatingJob, client: RolloutClient, tmp_path: Path
) -> None:
    rollouts = JobRollouts(client, tmp_path)
    for step in (0, 0, 1, 5, 6):
        rollouts(["a"], trainer(step))
    assert [1, 2, 5, 6] == [update.weight_version for update in job.updates]
    assert [1, 1, 2, 5, 6] == [request.weight_version for request in job.received]
    assert ["version-000005", "version-000006"] == sorted(path.name for path in tmp_path.iterdir())


def test_restarted_trainer_continues_from_the_served_version(redis_url: str, tmp_path: Path) -> None:
    with (
        (job := UpdatingJob(redis_url, version=12)).serving(),
        RolloutClient.connect(redis_url, job.name, name="rank-0") as client,
    ):
        JobRollouts(client, tmp_path)(["a"], trainer(10))
        for _ in range(3):
            JobRollouts(client, tmp_path)(["a"], trainer(10))
    assert [13, 14, 15, 16] == [update.weight_version for update in job.updates]
    assert ["version-000015", "version-000016"] == sorted(path.name for path in tmp_path.iterdir())


def test_no_version_is_chosen_while_the_served_version_is_unknown(redis_url: str, tmp_path: Path) -> None:
    job = UpdatingJob(redis_url)  # without a coordinator
    with (
        RolloutClient.connect(redis_url, job.name, name="rank-0") as client,
        pytest.raises(RolloutClientError, match=r"default/math has had no coordinator for 0\.3 s"),
    ):
        JobRollouts(client, tmp_path, publish_timeout=0.3)(["a"], trainer())
    assert [] == job.control_messages()
    assert [] == list(tmp_path.iterdir())


def test_publish_timeout_limits_the_wait_for_engines(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    job.report_engine("engine-1", version=0)  # an engine that never loads weights
    with pytest.raises(WeightsError, match="weight version 1 is not served after 1 s"):
        JobRollouts(client, tmp_path, publish_timeout=1)(["a"], trainer())


def test_evaluation_is_requested_with_its_purpose(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    evaluating = trainer()
    evaluating.model.training = False
    rollouts = JobRollouts(client, tmp_path)
    rollouts(["a"], evaluating)
    rollouts(["a"], evaluating)
    rollouts(["a"], trainer())
    assert [Purpose.EVAL, Purpose.EVAL, Purpose.TRAIN] == [request.purpose for request in job.received]


def test_tokens_of_the_environment_are_masked(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    def play(turn: TurnFunction, trajectories: list[Trajectory]) -> None:
        turn(trajectories)
        trajectories[1].observe([7, 8])
        turn(trajectories[1:])

    output = JobRollouts(client, tmp_path, play=play)(["a", "a"], trainer())
    assert [[1, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1]] == output["env_mask"]
    assert [[1, 1, 1], [1, 1, 1, 7, 8, 1, 1, 1]] == output["completion_ids"]
    assert [3, 8] == [len(logprobs) for logprobs in output["logprobs"]]
    assert {1} == {request.weight_version for request in job.received}


def test_rewards_are_reported_and_figures_logged(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    rollouts = JobRollouts(client, tmp_path)
    sampled: list[Rollout] = rollouts(["a", "b", "c"], trainer())["rollout"]
    logged: dict[str, float] = {}

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [1.0, None, 0.25]

    reporting = rollouts.wrap_reward(reward)
    assert "reward" == reporting.__name__  # TRL logs the reward under this name
    rewards = reporting(completions=["", "", ""], rollout=sampled, log_metric=logged.__setitem__)
    assert [1.0, None, 0.25] == rewards
    assert {sampled[0].rollout_id: 1.0, sampled[2].rollout_id: 0.25} == job.rewards()
    assert step_metrics(sampled, newest_version=1) == logged
    # The fake job samples with version 0 although version 1 is published.
    assert (3, 0, 1) == tuple(logged[f"rollout/{name}"] for name in ("num_rollouts", "weight_version", "staleness_max"))
    assert "rollout/reward_mean" not in logged  # TRL logs the reward itself


def test_one_failed_rollout_is_masked_out_and_has_no_reward(redis_url: str, tmp_path: Path) -> None:
    job = UpdatingJob(redis_url)

    def fail_the_second(request: RolloutRequest) -> None:
        job.answer(request, [0])
        job.answer(request, [1], length=0, finish_reason=FinishReason.FAILED)

    with job.serving(fail_the_second), RolloutClient.connect(redis_url, job.name, name="rank-0") as client:
        rollouts = JobRollouts(client, tmp_path)
        output = rollouts(["a", "a"], trainer(3))
        assert [[1, 1, 1], [2]] == sorted(output["completion_ids"])
        failed = output["completion_ids"].index([2])
        assert [0] == output["env_mask"][failed]
        assert [1, 1, 1] == output["env_mask"][1 - failed]
        assert [1, 3] == sorted(map(len, output["logprobs"]))
        rewards = rollouts.wrap_reward(lambda **_: [1.0, 1.0])(rollout=output["rollout"])
        assert rewards[failed] is None
        assert {output["rollout"][1 - failed].rollout_id: 1.0} == job.rewards()


@pytest.mark.parametrize("correction", [True, False])
def test_trl_corrects_for_the_engines_numerics_if_it_is_configured_to(
    job: UpdatingJob, client: RolloutClient, tmp_path: Path, correction: bool
) -> None:
    rollouts, calling = JobRollouts(client, tmp_path), trainer(vllm_importance_sampling_correction=correction)
    rollouts(["a"], calling)
    assert correction == calling.use_vllm
    if correction:
        calling.vllm_generation.sync_weights()  # TRL calls it before the function
    rollouts(["a"], calling)


@pytest.mark.parametrize(
    ("length", "finish_reason"),
    [(0, FinishReason.FAILED), (3, FinishReason.CANCELLED), (3, FinishReason.DEADLINE), (0, FinishReason.STOP)],
)
def test_incomplete_rollout_is_an_error(
    redis_url: str, tmp_path: Path, length: int, finish_reason: FinishReason
) -> None:
    job = UpdatingJob(redis_url)

    def answer_incompletely(request: RolloutRequest) -> None:
        job.answer(request, length=length, finish_reason=finish_reason)

    with (
        job.serving(answer_incompletely),
        RolloutClient.connect(redis_url, job.name, name="rank-0") as client,
        pytest.raises(
            RolloutClientError, match=rf"2 of 2 rollouts of step 3 cannot be used for training.*{finish_reason}"
        ),
    ):
        JobRollouts(client, tmp_path)(["a", "a"], trainer(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"args": SimpleNamespace(use_vllm=True)}, "use_vllm"),
        ({"tools": [print]}, "play"),
        ({"model": type("Peft", (), {"peft_config": 1})()}, "PEFT"),
        ({"args": SimpleNamespace(use_vllm=False, generation_kwargs={"top_p": 0.5})}, r"top_p.*JobRollouts\(sampling="),
    ],
)
def test_unsupported_settings_are_rejected_before_anything_is_sent(
    job: UpdatingJob, client: RolloutClient, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        JobRollouts(client, tmp_path)(["a"], trainer(**settings))
    assert [] == job.received


def test_images_are_rejected_before_anything_is_sent(job: UpdatingJob, client: RolloutClient, tmp_path: Path) -> None:
    content = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "what is it?"}]
    with pytest.raises(ValueError, match="prompts with image"):
        JobRollouts(client, tmp_path)([[{"role": "user", "content": content}]], trainer())
    assert [] == job.received
