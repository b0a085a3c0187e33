"""Rollouts from a job for TRL's ``GRPOTrainer(rollout_func=…)``. Tested with trl 1.16.0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from rollout_api.client.prompts import Prompt, Trajectory
from rollout_api.client.sync_client import RolloutClient
from rollout_api.errors import RolloutClientError, WeightsError
from rollout_api.integrations.weight_routes import Route, VersionDirectories, WeightRoutes, why_not_from_memory
from rollout_api.protocol.messages import Purpose, Rollout
from rollout_api.step_metrics import RolloutSummary, step_metrics
from rollout_api.weights.in_memory import ModelInMemory, TensorsInMemory, checkpoint_pieces

TurnFunction = Callable[[Sequence[Trajectory]], list[Rollout]]
"""Samples the model's next turn in each trajectory, with the trainer's sampling settings and the current weights."""
PlayFunction = Callable[[TurnFunction, list[Trajectory]], None]
"""Plays trajectories to their end: calls the turn function, and each trajectory's ``observe`` with the environment's
response."""

logger = logging.getLogger(__name__)
_PUBLISHED, _FAILED = "published", "failed"
"""The main process's message to the others at the end; before, it tells them the route of each attempt."""


class JobRollouts:
    """A ``rollout_func`` that samples a trainer process's prompts in a rollout job, with the trainer's current weights.

    Each process creates one, with its own client under its own name::

        with RolloutClient.connect(url, "default/math", name=f"rank-{os.environ.get('RANK', 0)}") as client:
            rollouts = JobRollouts(client)
            GRPOTrainer(rollout_func=rollouts, reward_funcs=rollouts.wrap_reward(reward), …).train()

    Before the rollouts of a step with new weights, the main process publishes the weights, and all processes wait until
    the job serves them. The first optimizer step on a batch is therefore on-policy. The weights are sent from the
    trainer's memory to the engines (NCCL on GPUs, gloo on CPUs). If that is not possible, they are written to
    *weights*, and a line in the log says why.

    TRL's own vLLM must be off (``use_vllm=False``). TRL nevertheless corrects for numerical differences between the
    engines and the trainer, as ``vllm_importance_sampling_correction`` and ``vllm_importance_sampling_mode`` of its
    configuration say.

    A rollout that the job could not produce is replaced by a completion of one token that is masked out. Its reward
    should be None, which :meth:`wrap_reward` ensures; TRL then excludes it from the advantages of its group.

    Args:
        client: connected client that only this process uses.
        weights: directory for weights that cannot be sent, which the job sees under the same path
            (``spec.weights``); None if there is none.
        sampling: settings that override the trainer's arguments (temperature, top_p, top_k, min_p, repetition_penalty,
            max_completion_length).
        play: function that plays multi-turn rollouts; default: sample one response to each prompt.
        kept_versions: number of published versions to keep on disk, at least 1.
        publish_timeout: seconds that the job may be without a coordinator or an engine when weights are published, and
            seconds that its engines may take to load them.
    """

    def __init__(
        self,
        client: RolloutClient,
        weights: str | Path | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        play: PlayFunction | None = None,
        kept_versions: int = 2,
        publish_timeout: float = 600.0,
    ) -> None:
        self._client = client
        self._weights = TrlWeights(client, weights, kept_versions, publish_timeout)
        self._sampling, self._play = dict(sampling or {}), play
        if not self._sampling.get("logprobs", True):
            raise ValueError("sampling: TRL needs the log-probabilities of the rollouts; remove logprobs=False")
        self._version, self._published_step = -1, -1
        self._call = -1
        self._metrics: dict[str, float] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one rollout for each entry of *prompts*; a prompt that occurs k times is sampled k times.

        Returns:
            ``prompt_ids``, ``completion_ids``, ``logprobs``, and ``env_mask`` for multi-turn rollouts. Reward functions
            also receive ``rollout``: the :class:`~rollout_api.Rollout` of each entry, or its
            :class:`~rollout_api.Trajectory` for multi-turn rollouts.

        Raises:
            RolloutClientError: the job could not produce any rollout, or an engine could not load the weights.
        """
        _check(trainer)
        token_ids = _tokenize(prompts, trainer)
        sleeps = trainer.args.vllm_enable_sleep_mode and trainer.accelerator.is_main_process
        if sleeps:
            self._client.wake()
        self._sync(trainer)
        self._call = max(self._call + 1, trainer.state.global_step)
        purpose = Purpose.TRAIN if trainer.model.training else Purpose.EVAL
        sampling = _sampling(trainer) | self._sampling
        sampled: Sequence[Rollout] | Sequence[Trajectory]
        if self._play is not None:
            sampled = self._trajectories(token_ids, purpose, sampling, self._play)
        else:
            sampled = self._responses(token_ids, purpose, sampling)
        output = _output(token_ids, sampled, trainer)
        self._metrics = _metrics_of_all_processes(sampled, self._version)
        if sleeps:  # all processes have their rollouts
            self._client.sleep()
        if trainer.vllm_importance_sampling_correction:
            _enable_correction(trainer)
        return output

    def wrap_reward(self, reward: Callable[..., Sequence[float | None]]) -> Callable[..., list[float | None]]:
        """Wrap a reward function so that rewards are reported to the job.

        The function also puts the :func:`~rollout_api.step_metrics` of the latest call of the ``rollout_func``, with
        the rollouts of all processes, into TRL's log; those about rewards are missing, because TRL logs rewards itself.
        Rollouts that cannot be used for training have the reward None, whatever the function returns.
        """

        @wraps(reward)
        def reporting_reward(*args: Any, **kwargs: Any) -> list[float | None]:
            turns_of_each = [_turns(sampled) for sampled in kwargs["rollout"]]
            rewards = [
                value if _is_usable(turns) else None
                for turns, value in zip(turns_of_each, reward(*args, **kwargs), strict=True)
            ]
            reported = {
                turn.rollout_id: float(value)
                for turns, value in zip(turns_of_each, rewards, strict=True)
                if value is not None
                for turn in turns
            }
            if reported:
                self._client.report_rewards(reported)
            if (log_metric := kwargs.get("log_metric")) is not None:
                for name, value in self._metrics.items():
                    log_metric(name, value)
            return rewards

        return reporting_reward

    def _responses(self, token_ids: list[list[int]], purpose: Purpose, sampling: dict[str, Any]) -> list[Rollout]:
        distinct, positions = group_repeats(token_ids)
        requested = [
            Prompt(prompt, sampling={**sampling, "n": len(at)}, purpose=purpose, weight_version=self._version)
            for prompt, at in zip(distinct, positions, strict=True)
        ]
        rollouts: list[Rollout | None] = [None] * len(token_ids)
        unfilled = [list(reversed(at)) for at in positions]
        with self._client.step(self._call, requested) as step:
            for rollout in step:
                rollouts[unfilled[step.prompt_index(rollout)].pop()] = rollout
        return [rollout for rollout in rollouts if rollout is not None]

    def _trajectories(
        self, token_ids: list[list[int]], purpose: Purpose, sampling: dict[str, Any], play: PlayFunction
    ) -> list[Trajectory]:
        with self._client.step(self._call) as step:
            trajectories = [step.trajectory(prompt, purpose=purpose) for prompt in token_ids]
            play(
                lambda selected: step.turn(selected, sampling=sampling, weight_version=self._version),
                trajectories,
            )
        return trajectories

    def _sync(self, trainer: Any) -> None:
        """Make the job serve the trainer's current weights. All processes must call this together."""
        step = int(trainer.state.global_step)
        if self._published_step != step:
            self._version = self._weights.publish(trainer, max(self._version + 1, step))
            self._published_step = step


def group_repeats(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the distinct prompts in the order of their first occurrence, and the positions of each in *prompts*."""
    positions: dict[tuple[int, ...], list[int]] = {}
    for position, prompt in enumerate(prompts):
        positions.setdefault(tuple(prompt), []).append(position)
    return [list(prompt) for prompt in positions], list(positions.values())


def _check(trainer: Any) -> None:
    """Reject settings of the trainer that a rollout job cannot honor.

    Raises:
        ValueError: the trainer has such a setting.
    """
    if trainer.args.use_vllm:
        raise ValueError("use_vllm=True makes TRL start vLLM itself; set use_vllm=False to sample in a job")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise ValueError(
            "JobRollouts publishes full models; train without PEFT, or publish adapters in a training loop of your own"
        )
    if getattr(trainer, "tools", None):
        raise ValueError("TRL runs tools in its own loop with its own engine; pass a play function to JobRollouts")
    if trainer.args.generation_kwargs:
        raise ValueError(
            f"generation_kwargs={trainer.args.generation_kwargs} apply to TRL's own engine; pass those settings that a "
            "job supports as JobRollouts(sampling={…}), with the names of rollout_api.Sampling"
        )


def _tokenize(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return the token ids of prompts, which are text or lists of messages, rendered as TRL renders them.

    Raises:
        ValueError: a prompt contains something other than text.
    """
    if isinstance(prompts[0], str):
        return [list(ids) for ids in trainer.processing_class(text=prompts)["input_ids"]]
    contents = [message["content"] for prompt in prompts for message in prompt if isinstance(message["content"], list)]
    if kinds := {part["type"] for content in contents for part in content} - {"text"}:
        raise ValueError(f"prompts with {', '.join(sorted(kinds))}: a rollout job only supports text")
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
    if regex := trainer.args.vllm_structured_outputs_regex:
        sampling["structured_outputs"] = {"regex": regex}
    return sampling


class _PublishedWeights:
    """Stands in for TRL's handle of its own vLLM, whose weights it would update."""

    def sync_weights(self) -> None:
        """Do nothing: the weights are published with the first call for a step."""


def _enable_correction(trainer: Any) -> None:
    """Let TRL weight its loss by the ratio of its own probabilities to those of the engines.

    TRL computes this ratio after each call of a ``rollout_func``, but only if ``use_vllm`` is set, as if its own vLLM
    had produced the log-probabilities (``_generate_and_score_completions`` and ``_compute_loss`` in TRL 1.16). That
    attribute is set here and not by the user, because TRL's constructor would start vLLM.
    """
    trainer.use_vllm, trainer.vllm_generation = True, _PublishedWeights()
    trainer._last_loaded_step = trainer.state.global_step


def _is_usable(turns: Sequence[Rollout]) -> bool:
    """Return whether a rollout can be used for training: it has turns, and none of them is empty or incomplete."""
    return bool(turns) and all(turn.finish_reason.complete and turn.token_ids for turn in turns)


def _turns(sampled: Rollout | Trajectory) -> list[Rollout]:
    return [sampled] if isinstance(sampled, Rollout) else sampled.turns


def _metrics_of_all_processes(sampled: Sequence[Rollout] | Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the metrics of the rollouts of all processes, which must call this together."""
    from accelerate.utils import gather_object

    summaries = [RolloutSummary.of(turn, newest_version=version) for one in sampled for turn in _turns(one)]
    return step_metrics(gather_object(summaries))


def _output(
    prompts: list[list[int]], sampled: Sequence[Rollout] | Sequence[Trajectory], trainer: Any
) -> dict[str, list[Any]]:
    """Return rollouts or trajectories in the form that TRL expects; those that cannot be used are masked out.

    Raises:
        RolloutClientError: all are empty or incomplete.
    """
    unusable = [one for one in sampled if not _is_usable(_turns(one))]
    if unusable:
        bad = next((turn for turn in _turns(unusable[0]) if not _is_usable([turn])), None)
        example = f"the first, {bad.rollout_id}: {bad.finish_reason} {bad.detail}" if bad else "no turns"
        text = (
            f"{len(unusable)} of {len(sampled)} rollouts of step {trainer.state.global_step} cannot be used for "
            f"training; {example}"
        )
        if len(unusable) == len(sampled):
            raise RolloutClientError(text)
        logger.warning("%s. They are masked out.", text)
    output: dict[str, list[Any]] = {
        "prompt_ids": prompts,
        "completion_ids": [],
        "logprobs": [],
        "rollout": list(sampled),
    }
    masks: list[list[int]] = []
    tokens: list[int]
    logprobs: list[float] | None
    for one in sampled:
        if not _is_usable(_turns(one)):
            tokens, logprobs, mask = [trainer.eos_token_ids[0]], [0.0], [0]
        elif isinstance(one, Trajectory):
            tokens, logprobs, mask = one.response_token_ids, one.logprobs, one.mask
        else:
            tokens, logprobs, mask = one.token_ids, one.logprobs, [1] * one.num_tokens
        output["completion_ids"].append(tokens)
        output["logprobs"].append(logprobs)
        masks.append(mask)
    if unusable or any(isinstance(one, Trajectory) for one in sampled):
        output["env_mask"] = masks
    return output


class TrlWeights:
    """The weights of a trainer, which are published from memory if possible, and otherwise through files.

    Args:
        client: client of this process.
        directory: directory for published weights, which the job sees under the same path; None if there is none.
        kept_versions: number of versions to keep in the directory.
        timeout: seconds that the job may be without a coordinator or an engine, and seconds that its engines may take
            to load the weights.
    """

    def __init__(self, client: RolloutClient, directory: str | Path | None, kept_versions: int, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self._directories = None if directory is None else VersionDirectories(directory, kept_versions)
        self._routes = WeightRoutes(directory, "the argument weights of JobRollouts")
        self._model: ModelInMemory | None = None
        self._gathered: TensorsInMemory | None = None
        self._state: Mapping[str, Any] = {}
        """The gathered weights, while they are being published."""

    def publish(self, trainer: Any, version: int) -> int:
        """Make the job serve the trainer's current weights. All processes of the trainer call this together.

        Args:
            trainer: the trainer.
            version: smallest version that may be used.

        Returns:
            The version that was used.

        Raises:
            RolloutClientError: the weights were not published, or an engine could not load them.
        """
        if not trainer.accelerator.is_main_process:
            return self._take_part(trainer)
        try:
            published = self._publish(trainer, version)
        except BaseException as error:
            _tell(_FAILED, str(error) or type(error).__name__)
            raise
        _tell(_PUBLISHED, published)
        return published

    def _take_part(self, trainer: Any) -> int:
        """Do what the main process needs while it publishes the weights, and return their version."""
        while True:
            what, value = _hear()
            if what == _PUBLISHED:
                return int(value)
            if what == _FAILED:
                raise RolloutClientError(f"the main process has not published the weights: {value}")
            if what == Route.FILES or _needs_gathering(trainer):
                trainer.accelerator.get_state_dict(trainer.model_wrapped)
            else:
                with suppress(WeightsError):  # the main process tells next what happens then
                    self._model_in_memory(trainer, "cpu").take_part()

    def _publish(self, trainer: Any, version: int) -> int:
        version = max(version, 1 + self._client.weight_version(timeout=self._timeout))
        backend = self._client.transfer_backend(timeout=self._timeout)
        device = trainer.accelerator.device
        route = self._routes.first(why_not_from_memory(backend, has_gpu=device.type == "cuda"))
        target = device if backend == "nccl" else "cpu"
        if route is Route.MEMORY:
            try:
                self._publish_from_memory(trainer, version, target)
                return version
            except WeightsError as error:
                route, version = self._routes.after_failure(error), version + 1
        if route is Route.MEMORY:
            self._publish_from_memory(trainer, version, target)
        else:
            self._publish_files(trainer, version)
        return version

    def _publish_from_memory(self, trainer: Any, version: int, device: Any) -> None:
        weights: TensorsInMemory
        if _needs_gathering(trainer):
            _tell(Route.MEMORY)
            weights = self._gather(trainer, device)
        else:
            weights = self._model_in_memory(trainer, device)
            _tell(Route.MEMORY)
        try:
            self._client.publish_weights(version, weights, timeout=self._timeout).raise_if_failed()
        finally:
            self._state = {}
        self._routes.succeeded()

    def _publish_files(self, trainer: Any, version: int) -> None:
        if self._directories is None:
            raise ValueError("weights cannot be published through files without a directory")
        _tell(Route.FILES)
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        _unwrapped(trainer).save_pretrained(self._directories.new(), state_dict=state)
        directory = self._directories.assign(version)
        self._client.publish_weights(version, directory, timeout=self._timeout).raise_if_failed()
        self._directories.delete_before(version)

    def _model_in_memory(self, trainer: Any, device: Any) -> ModelInMemory:
        """Return the trainer's model; it is described once, and its current parameters are read when it is sent."""
        if self._model is None:
            self._model = ModelInMemory(_unwrapped(trainer), device=device)
        return self._model

    def _gather(self, trainer: Any, device: Any) -> TensorsInMemory:
        """Gather a model whose parameters are not whole and know nothing of their shards."""
        model = _unwrapped(trainer)
        self._state = trainer.accelerator.get_state_dict(trainer.model_wrapped)

        def tensors() -> Iterator[tuple[str, Any]]:
            for name, tensor in self._state.items():
                yield from checkpoint_pieces(model, name, tensor)

        if self._gathered is None:
            self._gathered = TensorsInMemory(tensors, device=device)
        else:
            self._gathered.replace(tensors)
        return self._gathered


def _needs_gathering(trainer: Any) -> bool:
    """Return whether the trainer shards parameters in a way that only accelerate can undo (FSDP1, DeepSpeed)."""
    accelerator = trainer.accelerator
    return accelerator.distributed_type in ("FSDP", "DEEPSPEED", "MEGATRON_LM") and not accelerator.is_fsdp2


def _unwrapped(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)


def _tell(what: str, value: Any = None) -> None:
    """Tell the trainer's other processes what the main process does next."""
    from accelerate.utils import broadcast_object_list

    broadcast_object_list([str(what), value])


def _hear() -> tuple[str, Any]:
    from accelerate.utils import broadcast_object_list

    what, value = broadcast_object_list([None, None])
    return what, value
