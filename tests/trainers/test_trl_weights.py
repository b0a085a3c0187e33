"""The weights of TRL's trainers, with a real client, a real Redis and gloo. The job and the trainer are fake."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_api import RolloutClient, WeightsError
from rollout_api.integrations.trl import TrlWeights
from rollout_api.integrations.weight_routes import why_not_from_memory
from tests.support.receiving_job import ReceivingJob
from tests.support.updating_job import UpdatingJob


class Model(torch.nn.Linear):
    def save_pretrained(self, directory: Path, state_dict: dict[str, Any]) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"weights")


def trainer(model: torch.nn.Module, **options: Any) -> SimpleNamespace:
    """Return the attributes of a trainer in one process that are needed to publish its weights."""
    defaults: dict[str, Any] = {
        "is_main_process": True,
        "device": torch.device("cpu"),
        "distributed_type": "NO",
        "is_fsdp2": False,
        "unwrap_model": lambda model, **_: model,
        "get_state_dict": lambda model: model.state_dict(),
    }
    return SimpleNamespace(model_wrapped=model, accelerator=SimpleNamespace(**(defaults | options)))


@contextmanager
def publisher(job: UpdatingJob, url: str, directory: Path | None) -> Iterator[TrlWeights]:
    with job.serving(), RolloutClient.connect(url, job.name, name="rank-0") as client:
        yield TrlWeights(client, directory, kept_versions=2, timeout=30)


def test_weights_are_published_from_memory_although_there_is_a_directory(redis_url: str, tmp_path: Path) -> None:
    model, job = Model(3, 2), ReceivingJob(redis_url)
    with publisher(job, redis_url, tmp_path) as weights:
        for version in (1, 2):
            torch.nn.init.constant_(model.weight, version)
            assert version == weights.publish(trainer(model), version)
    assert [1.0, 2.0] == [received["weight"].mean().item() for received in job.weights]
    assert {"weight", "bias"} == job.weights[0].keys()
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("distributed_type", ["FSDP", "DEEPSPEED"])
def test_parameters_that_only_accelerate_can_gather_are_published_from_memory(
    redis_url: str, distributed_type: str
) -> None:
    model, job = Model(3, 2), ReceivingJob(redis_url)
    whole = [{"weight": torch.full((2, 3), float(version))} for version in (1, 2)]
    gathered = iter(whole)
    sharded = trainer(model, distributed_type=distributed_type, get_state_dict=lambda _: next(gathered))
    with publisher(job, redis_url, None) as weights:
        assert [1, 2] == [weights.publish(sharded, version) for version in (1, 2)]
    assert all(
        torch.equal(expected["weight"], received["weight"])
        for expected, received in zip(whole, job.weights, strict=True)
    )


def test_a_job_without_transfers_gets_files_and_the_log_says_why_once(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with publisher(job := UpdatingJob(redis_url), redis_url, tmp_path) as weights:
        for version in (1, 2):
            weights.publish(trainer(Model(3, 2)), version)
    assert [str(tmp_path / f"version-00000{version}") for version in (1, 2)] == [update.uri for update in job.updates]
    [record] = [record for record in caplog.records if record.name.endswith("weight_routes")]
    expected = f"Weights are published through files in {tmp_path}: spec.weights.transfer of the job is none."
    assert (logging.WARNING, expected) == (record.levelno, record.getMessage())


def test_a_job_without_transfers_and_a_trainer_without_a_directory_is_an_error_that_names_both_ways(
    redis_url: str,
) -> None:
    expected = (
        r"From memory: spec\.weights\.transfer of the job is none\. Through files: no directory is set\. Remove the "
        r"obstacle, or set the argument weights of JobRollouts"
    )
    with (
        publisher(job := UpdatingJob(redis_url), redis_url, None) as weights,
        pytest.raises(WeightsError, match=expected),
    ):
        weights.publish(trainer(Model(3, 2)), 1)
    assert [] == job.updates


def test_engines_that_cannot_reach_the_trainer_get_files_from_then_on(redis_url: str, tmp_path: Path) -> None:
    with publisher(job := ReceivingJob(redis_url, num_failures=1), redis_url, tmp_path) as weights:
        assert [2, 3] == [weights.publish(trainer(Model(3, 2)), version) for version in (1, 3)]
    assert [True, False, False] == [update.transfer is not None for update in job.updates]


def test_a_failed_transfer_is_repeated_if_there_is_no_directory(redis_url: str) -> None:
    with publisher(job := ReceivingJob(redis_url, num_failures=1), redis_url, None) as weights:
        assert 2 == weights.publish(trainer(Model(3, 2)), 1)
    assert 1 == len(job.weights)


def test_later_weights_are_sent_from_memory_again_after_one_failure(redis_url: str, tmp_path: Path) -> None:
    with publisher(job := ReceivingJob(redis_url), redis_url, tmp_path) as weights:
        weights.publish(trainer(model := Model(3, 2)), 1)
        job._num_failures = 1
        assert [3, 4] == [weights.publish(trainer(model), version) for version in (2, 4)]
    assert [True, True, False, True] == [update.transfer is not None for update in job.updates]


def test_the_obstacles_to_a_transfer_are_named() -> None:
    assert "" == why_not_from_memory("gloo", has_gpu=False)
    assert "this process has no GPU" in why_not_from_memory("nccl", has_gpu=False)
    assert "only vLLM has a sender" in why_not_from_memory("ipc", has_gpu=True)
    assert "" == why_not_from_memory("nccl", has_gpu=True)


TRAINER = """
import os, sys, torch
from types import SimpleNamespace
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from rollout_api import RolloutClient, RolloutClientError
from rollout_api.integrations.trl import TrlWeights

url, job = sys.argv[1:]
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(6, 10)
torch.nn.init.constant_(model.weight, 3.0)
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
trainer = SimpleNamespace(model_wrapped=model, accelerator=accelerator)
with RolloutClient.connect(url, job, name=f"rank-{accelerator.process_index}") as client:
    weights = TrlWeights(client, None, kept_versions=2, timeout=30)
    try:
        outcome = f"{weights.publish(trainer, 1)} {weights.publish(trainer, 2)}"
    except RolloutClientError as error:
        outcome = str(error)
    os.write(1, f"{outcome}\\n".encode())  # at once, because both processes write to one pipe
"""


def run_two_processes(redis_url: str, job: UpdatingJob) -> list[str]:
    """Return what two processes of a trainer with sharded weights print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    with job.serving():
        done = subprocess.run(
            [*command, sys.executable, "-c", TRAINER, redis_url, job.name],
            stdout=subprocess.PIPE,
            text=True,
            timeout=150,
            check=True,
        )
    return sorted(done.stdout.splitlines())


def test_the_processes_of_a_sharded_trainer_publish_together(redis_url: str) -> None:
    job = ReceivingJob(redis_url)
    assert ["1 2", "1 2"] == run_two_processes(redis_url, job)
    assert [torch.full((10, 6), 3.0).tolist()] * 2 == [received["weight"].tolist() for received in job.weights]


def test_all_processes_learn_why_the_main_one_has_failed(redis_url: str) -> None:
    reason = "weight version 2 was not received by all engines"
    first, second = run_two_processes(redis_url, ReceivingJob(redis_url, num_failures=2))
    assert "the main process has not published the weights" in first
    assert reason in first
    assert reason in second
