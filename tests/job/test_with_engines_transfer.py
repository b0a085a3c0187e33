"""Weights that trainers send to a job's HTTP server as to vLLM's own, with the senders of TRL and vLLM.

The senders are not modified. They need GPUs, which ``tests/support/vllm_sender_on_cpu`` replaces; NCCL is not run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import pytest
import requests
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
from vllm.distributed.weight_transfer import ModuleSource, ParamMeta, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from rollout_api import AsyncRolloutClient, Rollout, RolloutClient, WeightsError
from rollout_api.manifest.spec import Sampling
from rollout_api.ports import free_port
from rollout_api.weights.gloo import update_info
from tests.support.in_process_job import LiveJob
from tests.support.live_job_harness import ENDLESS, JobHarness, gather, prompt_index, prompts, replace_engine
from tests.support.reference_model import ReferenceDistribution
from tests.support.served_job import serving
from tests.support.vllm_sender_on_cpu import GlooCommunicator, install

pytestmark = pytest.mark.slow

SAMPLING = Sampling(n=4, max_tokens=40, logprobs=True)
TENSOR = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
Transfer = Callable[[LiveJob, AsyncRolloutClient, str], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def senders_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch.setattr)
    PartialState()  # as a trainer does; TRL's log needs it
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")  # the address at which a trainer listens


def run(job_harness: JobHarness, transfer: Transfer) -> None:
    """Run a scenario with the URL of a server of its job."""

    async def scenario(running: LiveJob, client: AsyncRolloutClient) -> None:
        with serving(running, job_harness.url, job_harness.models / "0") as url:
            await transfer(running, client, url)

    job_harness.run(scenario)


def load(job_harness: JobHarness, version: int) -> Any:
    """Return one of the test's models."""
    return AutoModelForCausalLM.from_pretrained(job_harness.models / str(version), dtype="float32")


def trl_client(url: str, model: Any) -> WeightTransferClient:
    """Return TRL's sender, as AsyncGRPOTrainer creates it."""
    tensors = list(model.named_parameters())
    described = {
        "names": [name for name, _ in tensors],
        "dtype_names": [str(tensor.dtype).split(".")[-1] for _, tensor in tensors],
        "shapes": [list(tensor.shape) for _, tensor in tensors],
    }
    return WeightTransferClient(VLLMClient(url, 60), described, weight_sync_timeout=120)


def vllm_engine(url: str, model: Any, world_size: int, **wire: Any) -> NCCLTrainerWeightTransferEngine:
    """Return vLLM's sender, which has formed a group with the job's engines."""
    init_info = NCCLTrainerInitInfo("127.0.0.1", free_port(), world_size, rank=0, **wire)
    return NCCLTrainerWeightTransferEngine.trainer_init(
        init_info, client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )


async def send_with_vllm(url: str, model: Any, world_size: int, **wire: Any) -> NCCLTrainerWeightTransferEngine:
    """Form a group with the job's engines, send a model in it with vLLM's sender, and return that."""
    sender = await asyncio.to_thread(vllm_engine, url, model, world_size, **wire)
    await asyncio.to_thread(sender.send_weights)
    return sender


def versions(rollouts: list[Rollout]) -> set[int]:
    """Return all weight versions that sampled tokens of the rollouts."""
    return {span.weight_version for rollout in rollouts for span in rollout.weight_spans}


async def assert_all_sample_with(
    job_harness: JobHarness, running: LiveJob, client: AsyncRolloutClient, version: int, model: int
) -> None:
    """Check that all engines sample from the distribution of a model, as this weight version."""
    rollouts = await gather(client, version, prompts(10, sampling=SAMPLING, weight_version=version))
    assert {worker.engine_id for worker in running.workers.values()} == {rollout.engine for rollout in rollouts}
    assert {version} == versions(rollouts)
    reference = ReferenceDistribution(job_harness.models / str(model))
    for rollout in rollouts:
        prompt = list(prompts(prompt_index(rollout) + 1)[-1].token_ids)
        assert rollout.logprobs is not None
        assert reference.max_error(prompt, rollout.token_ids, rollout.logprobs, SAMPLING) < 1e-3


def test_trls_client_sends_weights_while_rollouts_are_paused(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        model = load(job_harness, 1)
        trl = trl_client(url, model)
        long = prompts(2, sampling=Sampling(n=8, max_tokens=400, allowed_token_ids=ENDLESS))
        async with client.step(1, long) as step:
            await running.until(lambda: running.redis.hlen(running.keys.partials) >= 4)
            await asyncio.to_thread(trl.init_weight_transfer)
            for call in (trl.pause, lambda: trl.send_weights(model.named_parameters()), trl.resume):
                await asyncio.to_thread(call)
            across = [rollout async for rollout in step]
        assert {(0, 1)} == {tuple(span.weight_version for span in rollout.weight_spans) for rollout in across}
        assert {"weight_version": "1"} == httpx.get(f"{url}/weight_info").json()
        await assert_all_sample_with(job_harness, running, client, 1, 1)
        # The group stays, and the next weights need no rendezvous.
        model.load_state_dict(load(job_harness, 2).state_dict())
        await asyncio.to_thread(trl.send_weights, model.named_parameters())
        await assert_all_sample_with(job_harness, running, client, 2, 2)

    run(job_harness, transfer)


@pytest.mark.parametrize(
    "wire",
    [
        {"packed": False},
        {"packed_buffer_size_bytes": 1000},  # a few tensors, each of which may exceed it
        {"packed_buffer_size_bytes": 1 << 30},  # all tensors at once
    ],
)
def test_vllms_sender_is_understood_in_all_its_formats(job_harness: JobHarness, wire: dict[str, Any]) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        await send_with_vllm(url, load(job_harness, 1), 3, **wire)
        await assert_all_sample_with(job_harness, running, client, 1, 1)

    run(job_harness, transfer)


def test_an_engine_that_joins_later_waits_and_is_part_of_the_next_group(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        sender = await send_with_vllm(url, load(job_harness, 1), 3)
        lost = running.workers["engine-1"].engine_id
        joined = await replace_engine(running, job_harness, "engine-1")
        await running.until(lambda: joined.report.missed == 1, 30)
        assert {1} == versions(await gather(client, 5, prompts(4)))

        # The group has lost a member, which the trainer learns before it sends anything.
        with pytest.raises(requests.HTTPError):
            await asyncio.to_thread(sender.send_weights)
        reply = httpx.post(f"{url}/start_weight_update")
        assert 400 == reply.status_code
        assert f"{lost}: the engine has ended" in reply.json()["error"]["message"]
        assert "call init_weight_transfer_engine again" in reply.json()["error"]["message"]

        await send_with_vllm(url, load(job_harness, 2), 3)
        await assert_all_sample_with(job_harness, running, client, 2, 2)

    run(job_harness, transfer)


def test_engines_without_a_place_in_the_group_keep_their_weights(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        await send_with_vllm(url, load(job_harness, 1), 2)
        [member] = [worker for worker in running.workers.values() if worker.report.transfer_group]
        rollouts = await gather(client, 5, prompts(4))
        assert ({1}, {member.engine_id}) == (versions(rollouts), {rollout.engine for rollout in rollouts})

    run(job_harness, transfer)


def test_the_client_of_a_job_is_one_for_vllms_senders(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        def send() -> None:
            with RolloutClient.connect(job_harness.url, uid=running.uid, name="sender") as sync_client:
                init_info = NCCLTrainerInitInfo("127.0.0.1", free_port(), 1 + sync_client.get_world_size(), rank=0)
                WeightTransferTrainerFactory.trainer_init(
                    init_info, client=sync_client, source=ModuleSource(load(job_harness, 1))
                ).send_weights()

        await asyncio.to_thread(send)
        await assert_all_sample_with(job_harness, running, client, 1, 1)

    run(job_harness, transfer)


def test_weights_are_sent_in_several_parts(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        tensors = list(load(job_harness, 1).named_parameters())

        async def send(version: int, *parts: list[tuple[str, torch.Tensor]]) -> None:
            sender = await asyncio.to_thread(vllm_engine, url, load(job_harness, 1), 3, packed=False)
            await client.start_weight_update(version)
            for part in parts:
                described = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part]
                receiving = asyncio.ensure_future(client.update_weights(update_info(described)))
                for _, tensor in part:
                    await asyncio.to_thread(sender.model_update_group.broadcast, tensor.detach(), 0)
                await receiving
            await client.finish_weight_update()

        with pytest.raises(WeightsError, match="it must have all of the model's tensors"):
            await send(3, tensors[:5])
        await assert_all_sample_with(job_harness, running, client, 0, 0)
        await send(7, tensors[:5], tensors[5:])
        await assert_all_sample_with(job_harness, running, client, 7, 1)

    run(job_harness, transfer)


def test_weights_that_do_not_fit_the_model_are_refused_and_end_the_group(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        model = load(job_harness, 1)
        first, *others = model.named_parameters()
        trl = trl_client(url, model)
        for names in trl._weight_update_info.values():
            names.pop(0)
        await asyncio.to_thread(trl.init_weight_transfer)
        with pytest.raises(Exception, match="no engine could load") as failure:
            await asyncio.to_thread(trl.send_weights, iter(others))
        reasons = str(failure.value)
        for worker in running.workers.values():
            assert worker.engine_id in reasons
        assert f"has no {first[0]}: it must have all of the model's tensors" in reasons
        assert {0} == versions(await gather(client, 1, prompts(4)))
        error = httpx.post(f"{url}/start_weight_update").json()["error"]["message"]
        assert first[0] in error
        assert "call init_weight_transfer_engine again" in error

        complete = trl_client(url, model)
        await asyncio.to_thread(complete.init_weight_transfer)
        await asyncio.to_thread(complete.send_weights, model.named_parameters())
        await assert_all_sample_with(job_harness, running, client, 2, 1)

    run(job_harness, transfer)


def test_a_trainer_that_ends_while_it_sends_leaves_the_engines_as_they_are(
    job_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent = GlooCommunicator.broadcast, []

    def end_after_three_tensors(self: GlooCommunicator, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if len(sent) == 3:
            self.destroy()
            raise RuntimeError("the trainer ends")
        sent.append(tensor)
        send(self, tensor, src, stream)

    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        sender = await asyncio.to_thread(vllm_engine, url, load(job_harness, 1), 3, packed=False)
        monkeypatch.setattr(GlooCommunicator, "broadcast", end_after_three_tensors)
        with pytest.raises(RuntimeError, match="the trainer ends"):
            await asyncio.to_thread(sender.send_weights)
        workers = running.workers.values()
        await running.until(lambda: all(1 in worker.report.failed for worker in workers), 60)
        await assert_all_sample_with(job_harness, running, client, 0, 0)
        error = httpx.post(f"{url}/start_weight_update").json()["error"]["message"]
        assert "call init_weight_transfer_engine again" in error

    run(job_harness, transfer)


def test_a_trainer_that_does_not_listen_leaves_the_engines_as_they_are(job_harness: JobHarness) -> None:
    async def transfer(running: LiveJob, client: AsyncRolloutClient, url: str) -> None:
        missing = httpx.post(f"{url}/start_weight_update")
        assert 400 == missing.status_code
        assert "have joined no trainer's group" in missing.json()["error"]["message"]
        unstarted = httpx.post(f"{url}/update_weights", json={"update_info": TENSOR})
        assert "call start_weight_update first" in unstarted.json()["error"]["message"]

        address = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
        too_large = httpx.post(f"{url}/init_weight_transfer_engine", json={"init_info": {**address, "world_size": 4}})
        assert 400 == too_large.status_code
        assert "use world_size 3" in too_large.json()["error"]["message"]

        nobody = await asyncio.to_thread(
            lambda: httpx.post(
                f"{url}/init_weight_transfer_engine", json={"init_info": {**address, "world_size": 3}}, timeout=90
            )
        )
        assert 400 == nobody.status_code
        assert f"cannot reach the trainer at 127.0.0.1:{address['master_port']}" in nobody.text
        assert {0} == versions(await gather(client, 1, prompts(4)))

    run(job_harness, transfer)
