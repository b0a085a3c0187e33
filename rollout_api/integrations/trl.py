"""Rollouts of a job for TRL's ``GRPOTrainer(rollout_func=…)`` (read and run with trl 1.16.0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from rollout_api.client.prompts import Prompt
from rollout_api.client.sync_client import RolloutClient
from rollout_api.client.trajectory import Trajectory
from rollout_api.errors import RolloutClientError
from rollout_api.integrations.version_directories import VersionDirectories
from rollout_api.protocol.messages import Purpose, Rollout

Turn = Callable[[Sequence[Trajectory]], list[Rollout]]
"""Let the model speak next in each trajectory, under the trainer's sampling and the current weights."""
Play = Callable[[Turn, list[Trajectory]], None]
"""Plays trajectories to their end: calls the turn, and ``observe`` of each trajectory with the environment's answer."""

_Rewards = TypeVar("_Rewards", bound=Sequence[float | None])


class JobRollouts:
    """A ``rollout_func``: samples a trainer process's prompts in a rollout job, from the weights that it has by then.

    Every process makes one with a client of its own; names of clients differ::

        with RolloutClient.connect(url, "default/math", name=f"rank-{os.environ.get('RANK', 0)}") as client:
            rollouts = JobRollouts(client, "/weights/math")
            GRPOTrainer(rollout_func=rollouts, reward_funcs=rollouts.reported(reward), …).train()

    Before rollouts of a step that has new weights, the main process saves and publishes them, and all wait until the
    job serves them: the first optimiser step on a batch is on-policy. TRL's own vLLM must be off (``use_vllm=False``),
    with which TRL corrects for no difference in numbers between the engines and the trainer.
    """

    def __init__(
        self,
        client: RolloutClient,
        weights: str | Path,
        *,
        sampling: Mapping[str, Any] | None = None,
        play: Play | None = None,
        kept_versions: int = 2,
        publish_timeout: float = 600.0,
    ) -> None:
        """Sample through *client*.

        Args:
            client: connected; of this process alone.
            weights: directory for published weights, which the job sees under the same path (``spec.weights``).
            sampling: overrides what the trainer's arguments say (temperature, top_p, top_k, min_p, repetition_penalty,
                max_completion_length).
            play: for multi-turn rollouts; default: one response to each prompt.
            kept_versions: how many published versions stay on disk, at least 1.
            publish_timeout: seconds for which the job may be without a coordinator when weights are to be published,
                and for which its engines may load them.
        """
        self._client, self._directories = client, VersionDirectories(weights, kept_versions)
        self._sampling, self._play = dict(sampling or {}), play
        self._publish_timeout = publish_timeout
        self._version, self._at_step = -1, -1
        self._call = -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """One rollout for each entry of *prompts*; a prompt that occurs k times is sampled k times.

        Returns:
            ``prompt_ids``, ``completion_ids``, ``logprobs`` and, of multi-turn rollouts, ``env_mask``; to reward
            functions also ``rollout``, the :class:`~rollout_api.Rollout` of each (multi-turn: the
            :class:`~rollout_api.Trajectory`).

        Raises:
            RolloutClientError: if the job cannot make all of them, or no engine could load the weights.
        """
        _check(trainer)
        token_ids = _tokenize(prompts, trainer)
        self._sync(trainer)
        self._call = max(self._call + 1, trainer.state.global_step)
        purpose = Purpose.TRAIN if trainer.model.training else Purpose.EVAL
        sampling = _sampling(trainer) | self._sampling
        if self._play is not None:
            return _output(token_ids, self._trajectories(token_ids, purpose, sampling, self._play), trainer)
        return _output(token_ids, self._responses(token_ids, purpose, sampling), trainer)

    def reported(self, reward: Callable[..., _Rewards]) -> Callable[..., _Rewards]:
        """The same reward function, which also tells the job the rewards and TRL's log what drafts did."""

        @wraps(reward)
        def reporting(*args: Any, **about: Any) -> _Rewards:
            rewards = reward(*args, **about)
            made = [_turns(one) for one in about["rollout"]]
            given = {
                turn.rollout_id: float(value)
                for turns, value in zip(made, rewards, strict=True)
                if value is not None
                for turn in turns
            }
            if given:
                self._client.report_rewards(given)
            if (log_metric := about.get("log_metric")) is not None:
                steps = sum(turn.steps for turns in made for turn in turns)
                accepted = sum(turn.accepted for turns in made for turn in turns)
                log_metric("rollouts/tokens_per_step", 1 + accepted / max(1, steps))
                log_metric("rollouts/weight_version", float(self._version))
            return rewards

        return reporting

    def _responses(self, token_ids: list[list[int]], purpose: Purpose, sampling: dict[str, Any]) -> list[Rollout]:
        distinct, places = repeats(token_ids)
        asked = [
            Prompt(prompt, sampling={**sampling, "n": len(at)}, purpose=purpose, weight_version=self._version)
            for prompt, at in zip(distinct, places, strict=True)
        ]
        made: list[Rollout | None] = [None] * len(token_ids)
        left = [list(reversed(at)) for at in places]
        with self._client.step(self._call, asked) as step:
            for rollout in step:
                made[left[step.index(rollout)].pop()] = rollout
        return [rollout for rollout in made if rollout is not None]

    def _trajectories(
        self, token_ids: list[list[int]], purpose: Purpose, sampling: dict[str, Any], play: Play
    ) -> list[Trajectory]:
        with self._client.step(self._call) as step:
            trajectories = [step.trajectory(prompt, purpose=purpose) for prompt in token_ids]
            play(
                lambda speaking: step.turn(speaking, sampling=sampling, weight_version=self._version),
                trajectories,
            )
        return trajectories

    def _sync(self, trainer: Any) -> None:
        """Have the job serve the trainer's weights; every process calls it at the same points."""
        from accelerate.utils import broadcast_object_list

        if self._at_step == trainer.state.global_step:
            return
        accelerator = trainer.accelerator
        state = accelerator.get_state_dict(trainer.model_wrapped)  # gathers shards: all processes take part
        if accelerator.is_main_process:
            self._version = self._publish(accelerator.unwrap_model(trainer.model_wrapped), state, trainer)
        # The others need the number, and must not ask before it is served.
        [self._version] = broadcast_object_list([self._version])
        self._at_step = trainer.state.global_step

    def _publish(self, model: Any, state: Mapping[str, Any], trainer: Any) -> int:
        served = self._client.weight_version(timeout=self._publish_timeout)
        version = max(self._version + 1, served + 1, int(trainer.state.global_step))
        written = self._directories.new()
        model.save_pretrained(written, state_dict=state)
        directory = self._directories.number(written, version)
        published = self._client.publish_weights(version, directory, timeout=self._publish_timeout)
        if published.failed:
            raise RolloutClientError(f"weight version {version} is not served everywhere: {published.failed}")
        self._directories.forget_before(version)
        return version


def repeats(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """The distinct prompts in the order of their first occurrence, and for each the places where it stands."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(tuple(prompt), []).append(place)
    return [list(prompt) for prompt in places], list(places.values())


def _check(trainer: Any) -> None:
    if trainer.use_vllm:
        raise ValueError("use_vllm=True makes TRL start vLLM itself; set use_vllm=False to sample in a job")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise ValueError(
            "JobRollouts publishes whole models; train without PEFT, or publish adapters by a loop of yours"
        )
    if getattr(trainer, "tools", None):
        raise ValueError("tools run in TRL's own loop, which calls its own engine; give JobRollouts a play function")
    if trainer.args.generation_kwargs:
        raise ValueError(
            f"generation_kwargs={trainer.args.generation_kwargs} are for TRL's own engine; give what a job has of them "
            "as JobRollouts(sampling={…}), under the names of rollout_api.Sampling"
        )
    if trainer.args.vllm_structured_outputs_regex:
        raise ValueError("vllm_structured_outputs_regex is for TRL's own vLLM; a job samples without a grammar")


def _tokenize(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Token ids of prompts, which are messages, or text; as TRL itself makes them (text only)."""
    if isinstance(prompts[0], str):
        return [list(ids) for ids in trainer.processing_class(text=prompts)["input_ids"]]
    contents = [message["content"] for prompt in prompts for message in prompt if isinstance(message["content"], list)]
    if kinds := {part["type"] for content in contents for part in content} - {"text"}:
        raise ValueError(f"prompts with {', '.join(sorted(kinds))}: a rollout job takes text alone")
    rendered = trainer.processing_class.apply_chat_template(
        conversation=prompts,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [list(ids) for ids in rendered["input_ids"]]


def _sampling(trainer: Any) -> dict[str, Any]:
    sampling = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": max(0, trainer.top_k or 0),
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        "logprobs": True,
    }
    if trainer.min_p:
        sampling["min_p"] = trainer.min_p
    return sampling


def _turns(made: Rollout | Trajectory) -> list[Rollout]:
    return [made] if isinstance(made, Rollout) else made.turns


def _output(
    prompts: list[list[int]], made: Sequence[Rollout] | Sequence[Trajectory], trainer: Any
) -> dict[str, list[Any]]:
    """What TRL takes.

    Raises:
        RolloutClientError: for rollouts without tokens, or broken off: TRL would train on them as if they were whole.
    """
    turns = [turn for one in made for turn in _turns(one)]
    bad = [turn for turn in turns if not turn.finish_reason.complete or not turn.token_ids]
    if bad or not turns:
        raise RolloutClientError(
            f"{len(bad)} of {len(turns)} rollouts of step {trainer.state.global_step} cannot be trained on; "
            + (f"the first, {bad[0].rollout_id}: {bad[0].finish_reason} {bad[0].detail}" if bad else "nothing was said")
        )
    output: dict[str, list[Any]] = {"prompt_ids": prompts, "completion_ids": [], "logprobs": [], "rollout": list(made)}
    for one in made:
        if isinstance(one, Trajectory):
            output["completion_ids"].append(one.response_token_ids)
            output["logprobs"].append(one.logprobs)
            output.setdefault("env_mask", []).append(one.mask)
        else:
            output["completion_ids"].append(one.token_ids)
            output["logprobs"].append(one.logprobs)
    return output
