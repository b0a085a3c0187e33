"""A rollout job as verl's rollout servers (read and run with verl 0.9.1).

verl asks rollout *replicas* for tokens and brings weights to them by a *checkpoint engine*. Here a replica is a job,
reached by its client, and the checkpoint engine writes safetensors files that the job loads. Importing this module
registers both, under the name ``das``; ``VERL_USE_EXTERNAL_MODULES=rollout_api.integrations.verl`` has every process of
verl import it. In verl's configuration (``trainer.v1.trainer_mode=separate_async``)::

    actor_rollout_ref.hybrid_engine: false
    actor_rollout_ref.rollout:
      {name: das, nnodes: 1, n_gpus_per_node: 1, calculate_log_probs: true,  # one replica; it takes no GPU of verl's
       engine_kwargs: {das: {job: default/math}},
       checkpoint_engine: {backend: das, engine_kwargs: {das: {job: default/math, weights: /weights/math, model: …}}}}

The URL of the job's Redis comes from the environment, ``ROLLOUT_REDIS_URL``, since verl logs its configuration.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.prompts import Prompt
from rollout_api.errors import InvalidRequestError, RolloutClientError
from rollout_api.integrations.version_directories import VersionDirectories
from rollout_api.protocol.messages import FinishReason, Rollout

NAME = "das"
REDIS_VARIABLE = "ROLLOUT_REDIS_URL"
_STOP_REASONS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "completed",
    FinishReason.DEADLINE: "aborted",
    FinishReason.CANCELLED: "aborted",
}
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids")
_WITHOUT_EFFECT = {"ignore_eos": False, "n": 1, "skip_special_tokens": True}
"""What verl may say that a job does anyway; any other value of these is refused."""


class JobServer:
    """verl's rollout server, in front of a job: token ids in, token ids out. A Ray actor."""

    def __init__(self, redis: str, job: str, name: str, max_model_len: int, response_length: int) -> None:
        """Serve from *job* as its client *name*."""
        self._connecting = AsyncRolloutClient.connect(redis, job, name=name)
        self._client: AsyncRolloutClient | None = None
        self._lock = asyncio.Lock()
        self._max_model_len, self._response_length = max_model_len, response_length
        # Steps number requests of equal content apart, and only grow, also when the actor is started again.
        self._calls = itertools.count(time.time_ns() // 1_000_000)

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
            InvalidRequestError: for what the job cannot serve, images among it.
            RolloutClientError: if the job cannot make it.
        """
        if image_data or video_data or audio_data:
            raise InvalidRequestError("a rollout job takes token ids alone, no images, video or audio")
        client = await self._connected()
        prompt = list(prompt_ids)
        limit = min(self._response_length, self._max_model_len - len(prompt))
        # In verl a lower number is served earlier.
        asked = Prompt(prompt, sampling=job_sampling(sampling_params, limit), priority=-priority)
        async with client.step(next(self._calls), [asked]) as step:
            try:
                [rollout] = [rollout async for rollout in step]
            except asyncio.CancelledError:
                await step.end()  # which cancels it in the job: left by an exception, it would be kept for another try
                raise
        return token_output(rollout)

    async def ready(self) -> None:
        """Wait until the job is there."""
        await self._connected()

    # What verl does to servers that share its GPUs; a job has its own, and goes on with running rollouts under new
    # weights by itself.

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Nothing to do."""

    async def resume_generation(self) -> None:
        """Nothing to do."""

    async def wake_up(self) -> None:
        """Nothing to do."""

    async def sleep(self) -> None:
        """Nothing to do."""

    async def clear_kv_cache(self) -> None:
        """Nothing to do: engines clear what is stale when they load weights."""

    async def release_kv_cache(self) -> None:
        """Nothing to do."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do."""

    async def start_profile(self, **_: Any) -> None:
        """Nothing to do."""

    async def stop_profile(self) -> None:
        """Nothing to do."""

    async def _connected(self) -> AsyncRolloutClient:
        async with self._lock:
            if self._client is None:
                self._client = await self._connecting.open()
        return self._client


class JobReplica(RolloutReplica):  # type: ignore[misc]
    """A job as one of verl's standalone replicas; it takes none of verl's GPUs."""

    async def init_standalone(self) -> None:
        """Make the processes of this side: one that asks for rollouts, one that stands in at weight updates."""
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

    async def init_hybrid(self, worker_group: RayWorkerGroup) -> None:
        """Refused.

        Raises:
            ValueError: a job has machines of its own.
        """
        raise ValueError(
            "rollout.name=das serves from a job's own machines: set actor_rollout_ref.hybrid_engine=false and "
            "trainer.v1.trainer_mode=separate_async"
        )

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        """The worker that stands in for the job's engines while weights are sent."""
        return RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            server_adapter=_NoAdapter(self.replica_rank),
        )

    async def launch_servers(self) -> None:
        """Start the server actor and wait for the job."""
        job = self.config.engine_kwargs[NAME]["job"]
        server = ray.remote(JobServer).options(
            name=f"rollout_job_server_{self.replica_rank}{self.name_suffix}",
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        length = self.config.max_model_len or self.config.prompt_length + self.config.response_length
        name = f"verl-{self.replica_rank}{self.name_suffix}"
        self._server_handle = server.remote(_redis_url(), job, name, length, self.config.response_length)
        await self._server_handle.ready.remote()
        self._server_address = f"{job}#{self.replica_rank}"
        self.servers = [self._server_handle]


class _NoAdapter:
    """A checkpoint engine worker's inference engine, where there is none."""

    is_leader_rank = True

    def __init__(self, replica_rank: int) -> None:
        self.replica_rank = replica_rank

    async def update_weights(self, weights: AsyncIterator[Any], **_: Any) -> None:
        async for _name, _tensor in weights:
            raise RuntimeError("weights were sent to a process that has no engine")


@CheckpointEngineRegistry.register(NAME)
class PublishedFiles(CheckpointEngine):  # type: ignore[misc]
    """Brings weights to a job: the trainer's first rank writes safetensors and publishes them.

    Weight version of the job = verl's ``global_steps`` + 1, as version 0 is what the job was started with; more by the
    same number from then on, where a trainer went back to an older checkpoint: versions only grow.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        job: str,
        weights: str,
        model: str,
        kept_versions: int = 2,
        publish_timeout: float = 600.0,
    ) -> None:
        """Publish to *job*.

        Args:
            bucket_size: bytes of a safetensors file, about.
            is_master: whether this is the trainer's first rank.
            job: ``namespace/name``.
            weights: directory for published weights, which the job sees under the same path.
            model: directory of the model that training began with; its configuration is published too.
            kept_versions: how many published versions stay on disk, at least 1.
            publish_timeout: seconds for which the job may be without a coordinator when weights are to be published,
                and for which its engines may load them.
        """
        self._bucket_size, self._is_master = bucket_size, is_master
        self._job, self._model = job, Path(model)
        self._directories = VersionDirectories(weights, kept_versions)
        self._publish_timeout = publish_timeout
        self._ahead = 0

    def prepare(self) -> dict[str, Any]:
        """Nothing to tell the others."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No process group: files need none."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Nothing to do."""

    def finalize(self) -> None:
        """Nothing to do."""

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Write and publish the weights; returns when every engine of the job serves them.

        Raises:
            RolloutClientError: if some engine cannot load them, or the job has no coordinator.
        """
        if not self._is_master:
            for _name, _tensor in weights:
                pass  # what gathers shards needs all ranks
            return
        written = self._directories.new()
        await asyncio.to_thread(self._write, written, weights)  # first: the other ranks wait in the generator meanwhile
        async with AsyncRolloutClient.connect(_redis_url(), self._job, name="verl-weights") as client:
            expected = (global_steps or 0) + 1 + self._ahead
            version = max(expected, 1 + await client.weight_version(timeout=self._publish_timeout))
            self._ahead += version - expected
            directory = self._directories.number(written, version)
            published = await client.publish_weights(version, directory, timeout=self._publish_timeout)
        if published.failed:
            raise RolloutClientError(f"weight version {version} is not served everywhere: {published.failed}")
        self._directories.forget_before(version)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Nothing arrives here."""
        none: tuple[tuple[str, Any], ...] = ()
        for one in none:
            yield one

    def _write(self, directory: Path, weights: Iterable[tuple[str, Any]]) -> None:
        directory.mkdir(parents=True)
        where: dict[str, str] = {}
        bucket: dict[str, Any] = {}
        size = total = 0

        def flush() -> None:
            file = f"model-{len(set(where.values())) + 1:05d}.safetensors"
            save_file(bucket, directory / file, metadata={"format": "pt"})
            where.update(dict.fromkeys(bucket, file))
            bucket.clear()

        for name, tensor in weights:
            # a copy: the generator may use its memory again
            bucket[name] = tensor.detach().cpu().contiguous().clone()
            size += bucket[name].nbytes
            total += bucket[name].nbytes
            if size >= self._bucket_size:
                flush()
                size = 0
        if bucket:
            flush()
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(self._model / "config.json", directory)


def job_sampling(params: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """verl's sampling parameters as a job's.

    Args:
        params: as verl's agent loops give them.
        limit: most tokens of a response, where *params* has no lower one.

    Raises:
        InvalidRequestError: for a parameter that a job would not heed.
    """
    left = {name: value for name, value in params.items() if value is not None}
    asked = [left.pop(name) for name in ("max_tokens", "max_new_tokens") if name in left]
    sampling: dict[str, Any] = {
        "n": 1,
        "max_tokens": max(1, min([limit, *asked])),
        "logprobs": left.pop("logprobs", False) is not False,
    }
    if "top_k" in left:
        sampling["top_k"] = max(0, left.pop("top_k"))
    sampling |= {name: float(left.pop(name)) for name in _SAMPLING if name in left}
    sampling |= {name: list(left.pop(name)) for name in _LISTS if name in left}
    if "seed" in left:
        sampling["seed"] = left.pop("seed")
    if not sampling.get("min_p", 1.0):
        del sampling["min_p"]  # it excludes drafts even where it does nothing
    unknown = {name: value for name, value in left.items() if _WITHOUT_EFFECT.get(name, ...) != value}
    if unknown:
        raise InvalidRequestError(f"sampling parameters that a rollout job does not know: {unknown}")
    return sampling


def token_output(rollout: Rollout) -> TokenOutput:
    """A rollout as verl's.

    Raises:
        RolloutClientError: if the job could not make it.
    """
    if rollout.finish_reason not in _STOP_REASONS:
        raise RolloutClientError(f"rollout {rollout.rollout_id}: {rollout.finish_reason}: {rollout.detail}")
    steps = [span.weight_version - 1 for span in rollout.spans]
    return TokenOutput(
        token_ids=rollout.token_ids,
        log_probs=rollout.logprobs,
        stop_reason=_STOP_REASONS[rollout.finish_reason],
        num_preempted=0,
        extra_fields={
            # verl takes it for the age of the whole response: the oldest is the safe answer
            "global_steps": min(steps, default=None),
            "min_global_steps": min(steps, default=None),
            "max_global_steps": max(steps, default=None),
            "num_cached_tokens": rollout.cached_tokens,
            "spec_num_draft_tokens": rollout.drafted,
            "spec_num_accepted_tokens": rollout.accepted,
            # steps without a draft are counted too: verl's accept length is then tokens per step
            "spec_num_verify_steps": rollout.steps,
        },
    )


def _redis_url() -> str:
    try:
        return os.environ[REDIS_VARIABLE]
    except KeyError:
        raise ValueError(f"set {REDIS_VARIABLE} to the URL of the job's Redis, for every process of verl") from None


RolloutReplicaRegistry.register(NAME, lambda: JobReplica)
