"""The adapter for verl, with verl's own managers and clients on Ray and a real client and Redis. The job is fake."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
import redis
import torch
import verl
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient, LLMServerManager

from rollout_api import (
    Cancel,
    FinishReason,
    InvalidRequestError,
    Purpose,
    Rollout,
    RolloutClientError,
    WeightsError,
    WeightSpan,
)
from rollout_api.integrations.verl import JobReplica, JobServer, job_of, to_job_sampling, to_token_output
from rollout_api.integrations.verl_settings import FILES_NAME, NAME, REDIS_URL_VARIABLE, check
from rollout_api.integrations.verl_weights import FileCheckpointEngine, JobCheckpointEngine
from rollout_head.coordinator.open_requests import OpenRequest
from tests.support.receiving_job import ReceivingJob
from tests.support.updating_job import UpdatingJob

pytestmark = [pytest.mark.nightly, pytest.mark.serial]

JOB = "default/math"


@pytest.fixture(scope="module")
def cluster(redis_server: str) -> Iterator[None]:
    environment = {
        REDIS_URL_VARIABLE: redis_server,
        "VERL_USE_EXTERNAL_MODULES": "rollout_api.integrations.verl",
        "PYTHONPATH": os.pathsep.join(sys.path),  # so that Ray's workers can import the Trainer below
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(REDIS_URL_VARIABLE, redis_server)
        ray.init(
            address="local",
            num_cpus=8,  # each group of processes of verl reserves its own
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def job(redis_server: str) -> Iterator[ReceivingJob]:
    redis.Redis.from_url(redis_server).flushall()  # what other tests have published for a job of this name
    with (job := ReceivingJob(redis_server)).serving():
        yield job


@pytest.fixture(scope="module")
def servers(cluster: None, job: UpdatingJob) -> LLMServerManager:
    defaults = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    rollout = {
        "name": NAME,
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "tensor_model_parallel_size": 1,
        "prompt_length": 32,
        "response_length": 16,
        "engine_kwargs": {NAME: {"job": JOB}},
        "checkpoint_engine": {"backend": NAME, "engine_kwargs": {NAME: {"job": JOB}}},
    }
    config = OmegaConf.merge(defaults, {"actor_rollout_ref": {"hybrid_engine": False, "rollout": rollout}})
    return LLMServerManager.create(config=config)


def generate(client: LLMServerClient, prompt: list[int], **sampling: Any) -> Any:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, **sampling}
    return asyncio.run(client.generate(request_id="session", prompt_ids=prompt, sampling_params=params))


@pytest.mark.parametrize("client_class", [LLMServerClient, FullyAsyncLLMServerClient])
def test_verls_client_receives_tokens_from_the_job(
    servers: LLMServerManager, job: UpdatingJob, client_class: type[LLMServerClient]
) -> None:
    output = generate(servers.get_client(client_class), [5, 6, 7], temperature=0.5)
    assert [1, 1, 1] == output.token_ids
    assert [-0.5, -0.5, -0.5] == output.log_probs
    assert "completed" == output.stop_reason
    request = job.received[-1]
    assert [5, 6, 7] == request.prompt_token_ids
    assert (1, 0.5, 16, True) == (
        request.sampling.n,
        request.sampling.temperature,
        request.sampling.max_tokens,
        request.sampling.logprobs,
    )


def test_the_samples_of_a_group_are_requests_that_the_job_schedules_together(
    servers: LLMServerManager, job: UpdatingJob
) -> None:
    """verl requests each sample separately, under another request id, and does not name its group."""
    client = servers.get_client()
    before = len(job.received)

    async def group() -> None:
        params = {"temperature": 1.0, "logprobs": True}
        await asyncio.gather(
            *(client.generate(request_id=str(i), prompt_ids=[9], sampling_params=params) for i in range(4))
        )

    asyncio.run(group())
    requests = job.received[before:]
    assert 4 == len({request.request_id for request in requests})
    opened = [OpenRequest("1-0", request, 0, None) for request in requests]
    assert 1 == len({request.group for request in opened})
    another = generate(client, [10])
    assert another.token_ids
    assert OpenRequest("1-0", job.received[-1], 0, None).group != opened[0].group


def test_the_turns_of_a_trajectory_are_recognized(servers: LLMServerManager, job: UpdatingJob) -> None:
    client = servers.get_client()
    first = generate(client, [21, 22])
    generate(client, [21, 22, *first.token_ids, 50])
    turns = job.received[-2:]
    assert [0, 1] == [request.turn for request in turns]
    assert 1 == len({request.trajectory_id for request in turns}) == len({request.problem for request in turns})


def test_validation_is_recognized_by_its_sampling_parameters(servers: LLMServerManager, job: UpdatingJob) -> None:
    client = servers.get_client()
    generate(client, [31], temperature=1.0, top_p=1.0, top_k=-1)
    generate(client, [31], temperature=0, top_p=1.0, top_k=-1)  # verl's default of val_kwargs
    assert [Purpose.TRAIN, Purpose.EVAL] == [request.purpose for request in job.received[-2:]]


@pytest.mark.parametrize(
    ("method", "mode"),
    [("init_hybrid", "hybrid"), ("init_hybrid_colocated", "colocated hybrid"), ("init_colocated", "colocated")],
)
def test_modes_that_share_the_trainers_gpus_are_refused_by_name(method: str, mode: str) -> None:
    replica = object.__new__(JobReplica)
    with pytest.raises(ValueError, match=f"does not support verl's {mode} mode.*speculative_config.*own-engines.md"):
        asyncio.run(getattr(replica, method)(None))


@pytest.mark.parametrize("options", [{}, {NAME: {"jbo": "default/math"}}, {NAME: {"job": "a/b", "redis": "r"}}])
def test_options_of_the_engine_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"engine_kwargs\.das has the options .* set exactly one, job"):
        job_of(options)


def test_other_versions_of_verl_are_refused() -> None:
    check("0.9.3")
    with pytest.raises(ImportError, match=r"supports verl 0\.9, but verl 0\.8\.0 is installed; install verl==0\.9\.1"):
        check("0.8.0")


class Trainer(Worker):
    """A trainer rank that updates weights as verl's ActorRolloutRefWorker does."""

    def __init__(self, backend: str, options: dict[str, str]) -> None:
        super().__init__()
        self._engine = CheckpointEngineRegistry.new(
            backend, is_master=self.rank == 0, bucket_size=100, job=JOB, **options
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        tensors = ((f"layer.{layer}.weight", torch.full((4, 4), float(layer))) for layer in range(5))
        return await self._engine.send_weights(tensors, global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._engine, method)(*args, **kwargs)


def update_weights(servers: LLMServerManager, steps: int, backend: str, **options: str) -> None:
    """Update the job's weights with verl's manager, from a trainer with two ranks."""
    trainers = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(Trainer), backend, options),
        use_gpu=False,
        device_name="cpu",
    )
    config = CheckpointEngineConfig(backend=backend)
    manager = CheckpointEngineManager(config, actor_wg=trainers, replicas=servers.get_replicas())
    for step in range(steps):
        manager.update_weights(step)


def test_verl_sends_weights_to_the_job_from_memory(servers: LLMServerManager, job: ReceivingJob) -> None:
    before = job.version
    update_weights(servers, 3, NAME)
    assert [before + 1, before + 2, before + 3] == [update.weight_version for update in job.updates[-3:]]
    assert 3 == len(job.weights)
    for received in job.weights:
        assert {f"layer.{layer}.weight": [float(layer)] * 16 for layer in range(5)} == {
            name: tensor.flatten().tolist() for name, tensor in received.items()
        }


def test_verl_publishes_weights_to_the_job_as_files(
    servers: LLMServerManager, job: ReceivingJob, tmp_path: Path
) -> None:
    before = job.version
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    update_weights(servers, 3, FILES_NAME, weights=str(tmp_path / "weights"), model=str(model))
    versions = [before + 1, before + 2, before + 3]
    assert versions == [update.weight_version for update in job.updates[-3:]]
    directory = Path(job.updates[-1].uri)
    kept = [f"version-{version:06d}" for version in versions[1:]]
    assert kept == sorted(path.name for path in directory.parent.iterdir())
    weights: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        weights |= load_file(file)
    assert {f"layer.{layer}.weight": float(layer) for layer in range(5)} == {
        name: t[0, 0].item() for name, t in weights.items()
    }
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert weights.keys() == index["weight_map"].keys()
    assert {"layer.4.weight"} == set(
        load_file(directory / index["weight_map"]["layer.4.weight"])
    )  # each file contains two tensors
    assert (directory / "config.json").is_file()


def send(job: UpdatingJob, *steps: int, **options: Any) -> None:
    """Publish weights as a trainer does after each of *steps*."""
    engine = JobCheckpointEngine(100, True, job=job.name, **options)
    for step in steps:
        asyncio.run(engine.send_weights([("one", torch.full((4, 4), float(step)))], global_steps=step))


def test_a_trainer_that_returns_to_a_checkpoint_sends_later_versions(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, redis_server)
    receiving = ReceivingJob(redis_server, uid=(uid := uuid4().hex), name=f"default/{uid}", num_failures=1)
    with receiving.serving():
        send(receiving, 0, 1)  # the first transfer fails, and is repeated as the next version
        send(receiving, 1)
    assert [1, 2, 3, 4] == [update.weight_version for update in receiving.updates]
    assert [0.0, 1.0, 1.0] == [received["one"].mean().item() for received in receiving.weights]


def test_verl_writes_files_if_the_job_takes_no_weights_from_memory(
    another_job: UpdatingJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with another_job.serving():
        send(another_job, 0, 1, weights=str(tmp_path / "weights"), model=str(tmp_path))
    assert ["version-000001", "version-000002"] == published(tmp_path / "weights")
    assert [None, None] == [update.transfer for update in another_job.updates]
    assert 1 == caplog.text.count("through files in")


def test_verl_without_a_way_to_the_engines_is_an_error_that_names_both(another_job: UpdatingJob) -> None:
    expected = (
        r"From memory: spec\.weights\.transfer .* Through files: no directory is set.*engine_kwargs\.das\.weights"
    )
    with another_job.serving(), pytest.raises(WeightsError, match=expected):
        send(another_job, 0)
    assert [] == another_job.updates


def test_a_directory_for_weights_needs_the_model() -> None:
    with pytest.raises(ValueError, match=r"engine_kwargs\.das: set both weights and model, or neither"):
        JobCheckpointEngine(100, True, job=JOB, weights="/weights")


def publish(weights: Path, job: UpdatingJob, *steps: int, **options: Any) -> None:
    """Publish weights as a trainer does after each of *steps*."""
    (weights.parent / "config.json").write_text("{}")
    engine = FileCheckpointEngine(100, True, job=job.name, weights=str(weights), model=str(weights.parent), **options)
    for step in steps:
        asyncio.run(engine.send_weights([("one", torch.full((4, 4), float(step)))], global_steps=step))


def published(weights: Path) -> list[str]:
    return sorted(path.name for path in weights.iterdir())


@pytest.fixture
def another_job(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> UpdatingJob:
    monkeypatch.setenv(REDIS_URL_VARIABLE, redis_server)
    uid = uuid4().hex
    return UpdatingJob(redis_server, uid=uid, name=f"default/{uid}")


def test_versions_of_an_earlier_run_are_kept_until_they_are_reached(tmp_path: Path, another_job: UpdatingJob) -> None:
    weights = tmp_path / "weights"
    for name in ("version-2", "version-000009", "version-1000000", "version-of-mine"):
        (weights / name).mkdir(parents=True)
    with another_job.serving():
        publish(weights, another_job, 2, 3, kept_versions=2)
    later = ["version-000009", "version-1000000", "version-of-mine"]
    assert ["version-000003", "version-000004", *later] == published(weights)
    with another_job.serving():
        publish(weights, another_job, 8, kept_versions=1)
    assert ["version-000009", "version-1000000", "version-of-mine"] == published(weights)
    assert (weights / "version-000009" / "config.json").is_file()


def test_version_in_use_is_kept_despite_a_directory_with_the_same_number(
    tmp_path: Path, another_job: UpdatingJob
) -> None:
    weights = tmp_path / "weights"
    (weights / "version-4").mkdir(parents=True)
    with another_job.serving():
        publish(weights, another_job, 3, kept_versions=1)
    assert ["version-000004"] == published(weights)


def test_trainer_that_returns_to_a_checkpoint_continues_from_the_served_version(
    tmp_path: Path, another_job: UpdatingJob
) -> None:
    with another_job.serving():
        publish(tmp_path / "weights", another_job, 6, 7)
        publish(tmp_path / "weights", another_job, 5, 6, 7)  # the restarted trainer
    assert [7, 8, 9, 10, 11] == [update.weight_version for update in another_job.updates]
    assert ["version-000010", "version-000011"] == published(tmp_path / "weights")


def test_gathering_does_not_wait_for_the_job(tmp_path: Path, another_job: UpdatingJob) -> None:
    """All ranks iterate over the same generator, and their process group has a timeout."""
    gathered: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        gathered.append("one")
        yield "one", torch.ones(4)

    (tmp_path / "config.json").write_text("{}")
    engine = FileCheckpointEngine(
        100, True, job=another_job.name, weights=str(tmp_path / "w"), model=str(tmp_path), publish_timeout=0.3
    )
    with pytest.raises(RolloutClientError, match="has had no coordinator"):
        asyncio.run(engine.send_weights(weights()))
    assert ["one"] == gathered


def test_at_least_one_version_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kept_versions = 0"):
        FileCheckpointEngine(100, True, job=JOB, weights=str(tmp_path), model=str(tmp_path), kept_versions=0)


async def test_cancelled_request_is_cancelled_in_the_job(redis_server: str, another_job: UpdatingJob) -> None:
    server = JobServer(redis_server, another_job.name, "verl-0", 64, 16)
    generating = asyncio.create_task(server.generate("session", prompt_ids=[5], sampling_params={}))
    await asyncio.to_thread(another_job.wait_for_requests, 1)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    [request] = another_job.requests()
    [control] = another_job.control_messages()
    assert isinstance(control, Cancel)
    assert [request.request_id] == control.request_ids


def rollout(finish_reason: FinishReason, *versions: int, **fields: Any) -> Rollout:
    return Rollout(
        rollout_id="job/request/0/0",
        problem_id="p",
        token_ids=[1] * len(versions),
        weight_spans=[WeightSpan(start=at, weight_version=version) for at, version in enumerate(versions)],
        finish_reason=finish_reason,
        **fields,
    )


def test_response_has_the_oldest_of_its_versions() -> None:
    output = to_token_output(
        rollout(FinishReason.STOP, 4, 5, num_decoding_steps=7, num_draft_tokens=9, num_accepted_tokens=1)
    )
    fields = output.extra_fields
    assert (3, 3, 4) == (fields["global_steps"], fields["min_global_steps"], fields["max_global_steps"])
    assert (9, 1, 7) == tuple(
        fields[f"spec_num_{name}"] for name in ("draft_tokens", "accepted_tokens", "verify_steps")
    )


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason"),
    [(FinishReason.LENGTH, "completed"), (FinishReason.CANCELLED, "aborted"), (FinishReason.DEADLINE, "aborted")],
)
def test_finish_reason_is_converted(finish_reason: FinishReason, stop_reason: str) -> None:
    assert stop_reason == to_token_output(rollout(finish_reason, 1)).stop_reason


def test_failed_rollout_is_an_error() -> None:
    with pytest.raises(RolloutClientError, match="out of memory"):
        to_token_output(rollout(FinishReason.FAILED, detail="out of memory"))


def test_sampling_parameters_are_converted_or_rejected() -> None:
    expected = {"n": 1, "max_tokens": 5, "logprobs": False, "top_k": 0, "min_p": 0.0}
    assert expected == to_job_sampling({"top_k": -1, "min_p": 0.0}, 5)
    assert 3 == to_job_sampling({"max_new_tokens": 3}, 5)["max_tokens"]
    assert to_job_sampling({"logprobs": 0}, 5)["logprobs"]
    assert "ignore_eos" not in to_job_sampling({"ignore_eos": False}, 5)
    assert to_job_sampling({"ignore_eos": True}, 5)["ignore_eos"]
    with pytest.raises(InvalidRequestError, match="bad_words"):
        to_job_sampling({"bad_words": ["x"]}, 5)
