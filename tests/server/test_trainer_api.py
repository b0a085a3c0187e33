"""vLLM's endpoints for trainers, with the requests of vLLM's clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from rollout_api import Pause, PauseMode, Resume, WeightsKind, WeightUpdate, decode, encode
from rollout_api.protocol.messages import InitWeightTransfer, Message, TransferStep, WeightTransfer
from tests.support.manifests import SMALL_CPU_ENGINE
from tests.support.served_job import MODEL_NAME, ServedJob, answering, serving, while_calling
from tests.support.waiting import wait_for

WITH_ADAPTERS = {**SMALL_CPU_ENGINE, "maxLoraRank": 8}


@pytest.fixture
def server(job: ServedJob, redis_url: str, model: Path) -> Iterator[str]:
    """URL of a server of a job whose engines load adapters."""
    with serving(job, redis_url, model, engine=WITH_ADAPTERS) as url:
        yield url


def post(url: str, body: Any = None, **parameters: str) -> httpx.Response:
    return httpx.post(url, json=body, params=parameters, timeout=30)


def test_pausing_and_resuming_wait_for_the_engines(server: str, job: ServedJob) -> None:
    job.report_engine("a", version=0)

    def follow() -> None:
        wait_for(lambda: bool(job.control_messages()))
        assert [Pause()] == job.control_messages()
        job.serve_once()
        job.report_engine("a", version=0, paused="keep")

    def follow_back() -> None:
        wait_for(lambda: bool(job.control_messages()))
        assert [Resume()] == job.control_messages()
        job.serve_once()
        job.report_engine("a", version=0)

    assert not httpx.get(f"{server}/is_paused").json()["is_paused"]
    paused = while_calling(lambda: post(f"{server}/pause", mode="keep", clear_cache="false"), follow)
    assert {"status": "paused"} == paused.json()
    assert httpx.get(f"{server}/is_paused").json()["is_paused"]
    assert {"status": "resumed"} == while_calling(lambda: post(f"{server}/resume"), follow_back).json()
    assert not httpx.get(f"{server}/is_paused").json()["is_paused"]


@pytest.mark.parametrize(("level", "mode"), [(1, PauseMode.SLEEP), (2, PauseMode.DEEP_SLEEP)])
def test_a_job_sleeps_and_wakes_as_vllms_server_does(server: str, job: ServedJob, level: int, mode: PauseMode) -> None:
    def follow(message: Message, **report: Any) -> None:
        wait_for(lambda: bool(job.control_messages()))
        assert [message] == job.control_messages()
        job.serve_once()
        job.report_engine("a", version=0, can_sleep=True, **report)

    def fall_asleep() -> None:
        follow(Pause(mode=mode), paused=mode)

    job.report_engine("a", version=0, can_sleep=True)
    assert not httpx.get(f"{server}/is_sleeping").json()["is_sleeping"]
    slept = while_calling(lambda: post(f"{server}/sleep", level=str(level), mode="keep"), fall_asleep)
    assert {"status": "sleeping", "level": level} == slept.json()
    again = while_calling(lambda: post(f"{server}/sleep", level=str(level), mode="wait"), fall_asleep)
    assert slept.json() == again.json()
    assert httpx.get(f"{server}/is_sleeping").json()["is_sleeping"]
    woken = while_calling(lambda: post(f"{server}/wake_up", tags="weights"), lambda: follow(Resume()))
    assert {"status": "awake", "tags": ["weights"]} == woken.json()
    assert not httpx.get(f"{server}/is_sleeping").json()["is_sleeping"]


def test_engines_that_cannot_sleep_are_named(server: str, job: ServedJob) -> None:
    job.report_engine("a", version=0, can_sleep=False)
    reply = post(f"{server}/sleep")
    assert 409 == reply.status_code
    assert "a cannot sleep; set spec.engine.extraArgs: {enable_sleep_mode: true}" in reply.json()["error"]["message"]
    assert [] == job.control_messages()


def test_pausing_may_end_the_requests_in_progress(server: str, job: ServedJob) -> None:
    def abort() -> None:
        job.wait_for_requests(1)
        with job.serving(lambda _: None):
            assert 200 == post(f"{server}/pause").status_code

    body = {"model": MODEL_NAME, "prompt": [1, 2], "max_tokens": 9}
    reply = while_calling(lambda: post(f"{server}/v1/completions", body), abort)
    assert "abort" == reply.json()["choices"][0]["finish_reason"]


def test_a_trainer_that_asks_for_the_world_size_waits_for_an_engine(server: str, job: ServedJob) -> None:
    def start_engine() -> None:
        time.sleep(0.5)
        job.report_engine("a", version=0)

    reply = while_calling(lambda: httpx.get(f"{server}/get_world_size", timeout=20), start_engine)
    assert {"world_size": 1} == reply.json()


def test_full_weights_are_published_from_a_directory(server: str, job: ServedJob) -> None:
    job.report_engine("a", version=3)
    job.report_engine("b", version=3)
    assert {"world_size": 2} == httpx.get(f"{server}/get_world_size").json()

    def load() -> None:
        wait_for(lambda: bool(job.control_messages()))
        [update] = job.control_messages()
        assert WeightUpdate(weight_version=4, uri="/weights/4") == update
        job.serve_once()
        for engine in ("a", "b"):
            job.report_engine(engine, version=4)

    job.redis.hset(job.keys.weights, "full", encode(WeightUpdate(weight_version=3, uri="/weights/3")))
    reply = while_calling(lambda: post(f"{server}/update_weights", {"weight_dir": "/weights/4"}), load)
    assert 4 == reply.json()["weight_version"]
    assert {"weight_version": "4"} == httpx.get(f"{server}/weight_info").json()


INIT_INFO = {"master_address": "10.0.0.7", "master_port": 29500, "rank_offset": 1, "world_size": 3}
UPDATE_INFO = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


def report_engines(job: ServedJob, **fields: Any) -> None:
    """Report two engines that receive weights from a trainer's memory."""
    for engine in ("a", "b"):
        job.report_engine(engine, **{"version": 0, "transfer_backend": "nccl", **fields})


def join(job: ServedJob, joins: list[InitWeightTransfer], **fields: Any) -> None:
    """Let the engines join a trainer's group."""
    wait_for(lambda: bool(job.control_messages()))
    [message] = job.control_messages()
    assert isinstance(message, InitWeightTransfer)
    joins.append(message)
    job.serve_once()
    report_engines(job, transfer_group=message.group, **fields)


def test_a_trainer_forms_a_group_at_one_server_and_sends_weights_through_another(
    server: str, job: ServedJob, redis_url: str, model: Path
) -> None:
    # vllm.distributed.weight_transfer.nccl_engine.NCCLTrainerWeightTransferEngine, vLLM 0.32
    report_engines(job)
    joins: list[InitWeightTransfer] = []
    init_info = {**INIT_INFO, "packed": True, "packed_buffer_size_bytes": 1000, "packed_num_buffers": 2}
    formed = while_calling(
        lambda: post(f"{server}/init_weight_transfer_engine", {"init_info": init_info}), lambda: join(job, joins)
    )
    assert {"message": "Weight transfer initialized"} == formed.json()
    [group] = joins
    assert ({"a": 1, "b": 2}, init_info) == (group.engines, group.init_info)
    updates: list[WeightUpdate] = []

    def start() -> None:
        wait_for(lambda: bool(job.control_messages()))
        [update] = job.control_messages()
        assert isinstance(update, WeightUpdate)
        assert WeightTransfer(group=group.group, engines=["a", "b"], base=len(updates)) == update.transfer
        updates.append(update)
        job.serve_once()
        report_engines(job, transfer_group=group.group, receiving=update.uri, received=0)

    def steps(update: WeightUpdate) -> list[Message]:
        return [decode(fields[b"d"]) for _, fields in job.redis.xrange(job.keys.transfer_steps(update.uri))]

    def receive() -> None:
        wait_for(lambda: bool(steps(updates[-1])))
        assert [TransferStep(step="update", update_info=UPDATE_INFO)] == steps(updates[-1])
        report_engines(job, transfer_group=group.group, receiving=updates[-1].uri, received=1)

    def serve() -> None:
        wait_for(lambda: len(steps(updates[-1])) == 2)
        assert TransferStep(step="finish") == steps(updates[-1])[1]
        report_engines(job, version=updates[-1].weight_version, transfer_group=group.group)

    with serving(job, redis_url, model, engine=WITH_ADAPTERS) as another:
        for version, url in [(1, server), (2, another)]:
            assert 200 == while_calling(lambda url=url: post(f"{url}/start_weight_update"), start).status_code
            received = while_calling(lambda: post(f"{another}/update_weights", {"update_info": UPDATE_INFO}), receive)
            assert version == received.json()["weight_version"]
            finished = while_calling(
                lambda version=version: post(f"{server}/finish_weight_update", {"weight_version": str(version)}), serve
            )
            assert 200 == finished.status_code
    assert {"weight_version": "2"} == httpx.get(f"{server}/weight_info").json()


def test_the_reason_why_an_engine_has_not_joined_is_returned(server: str, job: ServedJob) -> None:
    report_engines(job)
    reply = while_calling(
        lambda: post(f"{server}/init_weight_transfer_engine", {"init_info": INIT_INFO}),
        lambda: join(job, [], transfer_error="no route to host"),
    )
    assert 400 == reply.status_code
    assert "b: no route to host" in reply.json()["error"]["message"]
    assert not job.control_messages()


@pytest.mark.parametrize(
    ("info", "advice"),
    [
        ({**INIT_INFO, "world_size": 4}, "use world_size 3"),
        ({**INIT_INFO, "world_size": 1}, "world_size"),
        ({**INIT_INFO, "world_size": "all"}, "world_size is 'all', but must be a number"),
        ({**INIT_INFO, "rank_offset": 2}, "rank_offset"),
    ],
)
def test_groups_that_the_engines_cannot_form_are_refused(
    server: str, job: ServedJob, info: dict[str, Any], advice: str
) -> None:
    report_engines(job)
    reply = post(f"{server}/init_weight_transfer_engine", {"init_info": info})
    assert 400 == reply.status_code
    assert advice in reply.text
    assert not job.control_messages()


def test_engines_of_a_backend_without_ranks_all_join(server: str, job: ServedJob) -> None:
    report_engines(job, transfer_backend="ipc")
    joins: list[InitWeightTransfer] = []
    formed = while_calling(
        lambda: post(f"{server}/init_weight_transfer_engine", {"init_info": {"packed": True}}),
        lambda: join(job, joins, transfer_backend="ipc"),
    )
    assert 200 == formed.status_code
    assert [{"a", "b"}] == [group.engines.keys() for group in joins]


def test_a_job_that_takes_no_weights_from_memory_says_so(server: str, job: ServedJob) -> None:
    job.report_engine("a", version=0)
    reply = post(f"{server}/init_weight_transfer_engine", {"init_info": {**INIT_INFO, "world_size": 2}})
    assert 400 == reply.status_code
    assert "spec.weights.transfer is none" in reply.json()["error"]["message"]


@pytest.mark.parametrize("info", [UPDATE_INFO, [UPDATE_INFO, UPDATE_INFO]])
def test_updates_that_cannot_be_received_are_refused(server: str, job: ServedJob, info: Any) -> None:
    report_engines(job)
    assert 400 == post(f"{server}/update_weights", {"update_info": info}).status_code
    started = post(f"{server}/start_weight_update")
    assert 400 == started.status_code
    assert "call init_weight_transfer_engine again" in started.json()["error"]["message"]
    assert not job.control_messages()


def test_an_adapter_is_published_and_named_for_all_servers_of_the_job(
    server: str, job: ServedJob, redis_url: str, model: Path
) -> None:
    job.report_engine("a", version=0)

    def load() -> None:
        wait_for(lambda: bool(job.control_messages()))
        [update] = job.control_messages()
        expected = WeightUpdate(weight_version=1, uri="/adapters/v1", weights_kind=WeightsKind.LORA)
        assert expected == update
        job.serve_once()
        job.report_engine("a", version=1)

    adapter = {"lora_name": "policy-v1", "lora_path": "/adapters/v1", "load_inplace": False}
    assert 200 == while_calling(lambda: post(f"{server}/v1/load_lora_adapter", adapter), load).status_code
    with serving(job, redis_url, model, engine=WITH_ADAPTERS) as another:
        for url in (server, another):
            with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
                reply = while_calling(
                    lambda client=client: client.completions.create(model="policy-v1", prompt=[1, 2], max_tokens=9),
                    answering(job, "three"),
                )
                assert "three" == reply.choices[0].text.strip()
                assert "policy-v1" == reply.model
                assert "policy-v1" in [each.id for each in client.models.list()]
        again = post(f"{another}/v1/load_lora_adapter", adapter)
        assert 400 == again.status_code
        assert "already been loaded" in again.json()["error"]["message"]
    assert 200 == post(f"{server}/v1/unload_lora_adapter", {"lora_name": "policy-v1"}).status_code
    assert 404 == post(f"{server}/v1/unload_lora_adapter", {"lora_name": "policy-v1"}).status_code
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client, pytest.raises(NotFoundError):
        client.completions.create(model="policy-v1", prompt=[1, 2])


def test_calls_of_skyrl_that_a_job_does_not_support_are_refused(server: str) -> None:
    # skyrl.backends.skyrl_train.inference_servers.remote_inference_client, in SkyRL 0.4
    for path, body in [
        ("skyrl/v1/load_lora_adapter", {"lora_name": "skyrl-lora", "in_memory": True}),
        ("fetch_weights", {"target_version": 1, "sync_dir": "/weights"}),
    ]:
        reply = post(f"{server}/{path}", body)
        assert 400 == reply.status_code
        assert "POST /v1/load_lora_adapter" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "unknown", 404),
        ("GET", "v1/completions", 405),
        ("POST", "v1/systemone", 400),
        ("GET", "kv_event_sources", 200),
    ],
)
def test_what_the_server_never_does_is_a_mistake_of_the_client(
    server: str, method: str, path: str, status: int
) -> None:
    body = {"model": MODEL_NAME, "state": "x", "questions": {}} if method == "POST" else None
    reply = httpx.request(method, f"{server}/{path}", json=body, timeout=30)
    assert status == reply.status_code
    if status != 200:
        assert status == reply.json()["error"]["code"]
    assert (status == 405) == ("allow" in reply.headers)


def test_the_reason_why_an_adapter_was_not_loaded_is_returned(server: str, job: ServedJob) -> None:
    job.report_engine("a", version=0)

    def fail() -> None:
        wait_for(lambda: bool(job.control_messages()))
        job.serve_once()
        job.report_engine("a", version=0, failed={1: "rank 64 is too large"})

    adapter = {"lora_name": "policy", "lora_path": "/adapters/large"}
    reply = while_calling(lambda: post(f"{server}/v1/load_lora_adapter", adapter), fail)
    assert 400 == reply.status_code
    assert "rank 64 is too large" in reply.text
    assert 404 == post(f"{server}/v1/unload_lora_adapter", {"lora_name": "policy"}).status_code


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "/adapters/1"}, "lora_name"),
        ({"lora_name": MODEL_NAME, "lora_path": "/adapters/1"}, "lora_name"),
        ({"lora_name": "policy", "lora_path": "/adapters/1", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
def test_adapters_that_cannot_be_loaded_are_refused(server: str, body: dict[str, Any], field: str) -> None:
    reply = post(f"{server}/v1/load_lora_adapter", body)
    assert 400 == reply.status_code
    assert field in reply.text


def test_the_server_describes_itself_as_trl_reads_it(server: str) -> None:
    # trl.experimental.async_grpo.vllm_client and select_adapter_sync; trl.generation.vllm_client, in TRL 1.16
    config = httpx.get(f"{server}/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert "torch.float32" == config["model_config"]["dtype"]
    assert "processed_logprobs" == config["model_config"]["logprobs_mode"]
    assert {"backend": "nccl"} == config["weight_transfer_config"]
    assert 1 == config["parallel_config"]["data_parallel_size"]
    assert 8 == config["lora_config"]["max_lora_rank"]
    assert config["lora_config"]["max_loras"] > 100
    assert 256 == httpx.get(f"{server}/v1/models").json()["data"][0]["max_model_len"]


def test_clearing_the_cache_of_prefixes_succeeds(server: str) -> None:
    assert post(f"{server}/reset_prefix_cache").json()["success"]


def test_a_job_says_what_it_does_not_have(job: ServedJob, redis_url: str, model: Path) -> None:
    engine = {**SMALL_CPU_ENGINE, "logprobsMode": "raw"}
    with serving(job, redis_url, model, engine=engine, weights={"transfer": "none"}) as url:
        config = httpx.get(f"{url}/server_info").json()["vllm_config"]
        assert config["lora_config"] is None
        assert config["weight_transfer_config"] is None
        assert "raw_logprobs" == config["model_config"]["logprobs_mode"]
        reply = post(f"{url}/v1/load_lora_adapter", {"lora_name": "policy", "lora_path": "/adapters/1"})
        assert 400 == reply.status_code
        assert "maxLoraRank is 0" in reply.json()["error"]["message"]
