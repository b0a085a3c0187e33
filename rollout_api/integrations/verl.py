"""A rollout job as verl's rollout servers, for verl 0.9. Tested with 0.9.1.

verl requests tokens from rollout *replicas* and sends weights to them through a *checkpoint engine*. Here, the replica
is a client of a job; :mod:`rollout_api.integrations.verl_weights` has the checkpoint engines. Importing this module
registers both under the name ``das``. Set ``VERL_USE_EXTERNAL_MODULES=rollout_api.integrations.verl`` to have every
process of verl import it. verl's configuration (with ``trainer.v1.trainer_mode=separate_async``)::

    actor_rollout_ref.hybrid_engine: false
    actor_rollout_ref.rollout:
      {name: das, nnodes: 1, n_gpus_per_node: 1, calculate_log_probs: true,  # one replica, which uses no GPU of verl
       engine_kwargs: {das: {job: default/math}},
       checkpoint_engine: {backend: das, engine_kwargs: {das: {job: default/math}}}}

The URL of the job's Redis is read from the environment variable ``ROLLOUT_REDIS_URL``, because verl logs its
configuration.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

# First, because with another version of verl, the following imports fail with an unclear error.
from rollout_api.integrations.verl_settings import NAME, redis_url

# isort: split
import ray
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

import rollout_api.integrations.verl_weights  # noqa: F401  (registers the checkpoint engines)
from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.prompts import Prompt
from rollout_api.errors import InvalidRequestError, RolloutClientError
from rollout_api.integrations.recognized_turns import RecognizedTurns
from rollout_api.protocol.messages import FinishReason, Purpose, Rollout

_STOP_REASONS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "completed",
    FinishReason.DEADLINE: "aborted",
    FinishReason.CANCELLED: "aborted",
}
_FLOAT_SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_LIST_SETTINGS = ("stop", "stop_token_ids", "allowed_token_ids")
_IGNORED_SETTINGS = {"n": 1, "skip_special_tokens": True}
"""Settings of verl that describe what a job does anyway; other values of them are rejected."""


class JobServer:
    """A rollout server of verl that forwards requests to a job. It runs as a Ray actor.

    Args:
        redis: URL of the job's Redis.
        job: ``namespace/name`` of the job.
        name: name of the client.
        max_model_len: maximum number of tokens of a prompt and its response together.
        response_length: maximum number of tokens of a response.
        eval_sampling: sampling parameters that identify requests of verl's validation, because verl does not
            mark them otherwise; None if they are the same as in training.
    """

    def __init__(
        self,
        redis: str,
        job: str,
        name: str,
        max_model_len: int,
        response_length: int,
        eval_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._unconnected = AsyncRolloutClient.connect(redis, job, name=name)
        self._client: AsyncRolloutClient | None = None
        self._lock = asyncio.Lock()
        self._max_model_len, self._response_length = max_model_len, response_length
        self._eval_sampling = eval_sampling
        self._turns = RecognizedTurns()
        # Each request is a separate step, because equal requests within a step would be one. Step numbers must
        # increase, also when the actor is restarted.
        self._step_numbers = itertools.count(time.time_ns() // 1_000_000)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Iterable[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample one response.

        Raises:
            InvalidRequestError: the job cannot serve the request, for example because it contains images.
            RolloutClientError: the job could not produce the response.
        """
        if image_data or video_data or audio_data:
            raise InvalidRequestError("a rollout job only supports token ids, not images, video or audio")
        client = await self._connected()
        prompt = list(prompt_ids)
        limit = min(self._response_length, self._max_model_len - len(prompt))
        # verl gives each turn another request id.
        turn = self._turns.recognize(prompt)
        requested = Prompt(
            prompt,
            problem_id=turn.problem_id,
            sampling=to_job_sampling(sampling_params, limit),
            purpose=Purpose.EVAL if self._is_validation(sampling_params) else Purpose.TRAIN,
            priority=-priority,  # in verl, lower numbers are served first
            trajectory_id=turn.trajectory_id,
            turn=turn.turn,
        )
        async with client.step(next(self._step_numbers), [requested]) as step:
            try:
                [rollout] = [rollout async for rollout in step]
            except asyncio.CancelledError:
                # End the step so that the request is cancelled; leaving it by an exception would keep it for a retry.
                await step.end()
                raise
        self._turns.remember(turn, prompt, rollout.token_ids)
        return to_token_output(rollout)

    def _is_validation(self, params: Mapping[str, Any]) -> bool:
        expected = self._eval_sampling
        return expected is not None and all(params.get(name) == value for name, value in expected.items())

    async def ready(self) -> None:
        """Wait until the job is available."""
        await self._connected()

    async def _do_nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: a job has its own GPUs and continues running rollouts with new weights."""

    # verl calls these methods on servers that share its GPUs. Engines clear stale cache entries when they load weights.
    abort_all_requests = resume_generation = wake_up = sleep = _do_nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = _do_nothing
    start_profile = stop_profile = _do_nothing

    async def _connected(self) -> AsyncRolloutClient:
        async with self._lock:
            if self._client is None:
                self._client = await self._unconnected.open()
        return self._client


class JobReplica(RolloutReplica):
    """A job as a standalone replica of verl, which uses none of verl's GPUs."""

    async def init_standalone(self) -> None:
        """Start a process that requests rollouts, and a placeholder process that takes part in weight updates."""
        self.rollout_mode = RolloutMode.STANDALONE
        group = RayWorkerGroup(
            resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            name_prefix=f"rollout_job_{self.replica_rank}{self.name_suffix}",
            use_gpu=False,
            device_name="cpu",
        )
        self.workers = group.workers
        await self.launch_servers()

    async def init_hybrid(self, *_: Any) -> None:
        """Reject the hybrid mode.

        Raises:
            ValueError: always, because a job has its own machines.
        """
        raise _own_machines_error("hybrid")

    async def init_hybrid_colocated(self, *_: Any) -> None:
        """Reject the colocated hybrid mode; see :meth:`init_hybrid`."""
        raise _own_machines_error("colocated hybrid")

    async def init_colocated(self, *_: Any) -> None:
        """Reject the colocated mode; see :meth:`init_hybrid`."""
        raise _own_machines_error("colocated")

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """Return the worker that verl's weight updates address in place of the job's engines."""
        return RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            server_adapter=_PlaceholderAdapter(self.replica_rank),
        )

    async def launch_servers(self) -> None:
        """Start the server actor and wait for the job."""
        job = job_of(self.config.engine_kwargs)
        server = ray.remote(JobServer).options(
            name=f"rollout_job_server_{self.replica_rank}{self.name_suffix}",
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        length = self.config.max_model_len or self.config.prompt_length + self.config.response_length
        name = f"verl-{self.replica_rank}{self.name_suffix}"
        self._server_handle = server.remote(
            redis_url(), job, name, length, self.config.response_length, eval_sampling_of(self.config)
        )
        await self._server_handle.ready.remote()
        self._server_address = f"{job}#{self.replica_rank}"
        self.servers = [self._server_handle]


class _PlaceholderAdapter:
    """The inference engine that a checkpoint engine worker expects, in a process that has none."""

    is_leader_rank = True

    def __init__(self, replica_rank: int) -> None:
        self.replica_rank = replica_rank

    async def update_weights(self, weights: AsyncIterator[Any], **_: Any) -> None:
        async for _name, _tensor in weights:
            raise RuntimeError("weights were sent to a process without an engine")


def job_of(engine_kwargs: Mapping[str, Any]) -> str:
    """Return the job that ``rollout.engine_kwargs`` names.

    Raises:
        ValueError: it names no job, or has an option that does not exist.
    """
    options = engine_kwargs.get(NAME) or {}
    if list(options) != ["job"]:
        raise ValueError(
            f"actor_rollout_ref.rollout.engine_kwargs.{NAME} has the options {sorted(options)}; set exactly one, "
            f"job: namespace/name"
        )
    return str(options["job"])


def eval_sampling_of(config: Any) -> dict[str, Any] | None:
    """Return the sampling parameters that distinguish verl's validation from training; None if there are none.

    Args:
        config: verl's configuration ``actor_rollout_ref.rollout``.
    """
    names = ("temperature", "top_p", "top_k")
    validation = {name: config.val_kwargs[name] for name in names}
    return validation if validation != {name: config[name] for name in names} else None


def to_job_sampling(params: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Convert verl's sampling parameters to a job's sampling settings.

    Args:
        params: sampling parameters from verl's agent loop.
        limit: maximum number of response tokens; *params* may lower it.

    Raises:
        InvalidRequestError: the job does not support a parameter.
    """
    remaining = {name: value for name, value in params.items() if value is not None}
    limits = [remaining.pop(name) for name in ("max_tokens", "max_new_tokens") if name in remaining]
    sampling: dict[str, Any] = {
        "n": 1,
        "max_tokens": max(1, min([limit, *limits])),
        "logprobs": remaining.pop("logprobs", False) is not False,
    }
    if "top_k" in remaining:
        sampling["top_k"] = max(0, remaining.pop("top_k"))
    sampling |= {name: float(remaining.pop(name)) for name in _FLOAT_SETTINGS if name in remaining}
    sampling |= {name: list(remaining.pop(name)) for name in _LIST_SETTINGS if name in remaining}
    if "seed" in remaining:
        sampling["seed"] = remaining.pop("seed")
    if remaining.pop("ignore_eos", False):
        sampling["ignore_eos"] = True
    unknown = {name: value for name, value in remaining.items() if _IGNORED_SETTINGS.get(name, ...) != value}
    if unknown:
        raise InvalidRequestError(f"a rollout job does not support these sampling parameters: {unknown}")
    return sampling


def to_token_output(rollout: Rollout) -> TokenOutput:
    """Convert a rollout to verl's type.

    Raises:
        RolloutClientError: the job could not produce the rollout.
    """
    if rollout.finish_reason not in _STOP_REASONS:
        raise RolloutClientError(f"rollout {rollout.rollout_id}: {rollout.finish_reason}: {rollout.detail}")
    steps = [span.weight_version - 1 for span in rollout.weight_spans]
    return TokenOutput(
        token_ids=rollout.token_ids,
        log_probs=rollout.logprobs,
        stop_reason=_STOP_REASONS[rollout.finish_reason],
        num_preempted=0,
        extra_fields={
            # verl uses this as the version of the whole response, so the oldest one is the conservative choice.
            "global_steps": min(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": rollout.num_cached_tokens,
            "spec_num_draft_tokens": rollout.num_draft_tokens,
            "spec_num_accepted_tokens": rollout.num_accepted_tokens,
            # This includes steps without drafts, so that verl's accept length is the number of tokens per step.
            "spec_num_verify_steps": rollout.num_decoding_steps,
        },
    )


def _own_machines_error(mode: str) -> ValueError:
    return ValueError(
        f"rollout.name={NAME} does not support verl's {mode} mode, in which engines run on the trainer's GPUs: a job "
        "has its own machines. Set actor_rollout_ref.hybrid_engine=false and trainer.v1.trainer_mode=separate_async. "
        "Without a job, verl's own engines draft with rollout.name=vllm and "
        "rollout.engine_kwargs.vllm.speculative_config={method: das}; see docs/own-engines.md"
    )


RolloutReplicaRegistry.register(NAME, lambda: JobReplica)
