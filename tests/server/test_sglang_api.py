"""The calls that slime makes to engines that it has not started; they were read in its commit 624b824."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rollout_api import FinishReason
from tests.support.served_job import ServedJob, answering, while_calling
from tests.support.waiting import wait_for

# slime.rollout.sglang_rollout.GenerateState.sampling_params, with slime's defaults
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 9,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}


TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


def generate(server: str, tokens: list[int], **changes: Any) -> httpx.Response:
    body = {"sampling_params": {**SAMPLING, **changes}, "return_logprob": True, "input_ids": tokens}
    return httpx.post(f"{server}/generate", json=body, headers={"traceparent": TRACE}, timeout=30)


def test_a_sample_is_a_rollout_with_tokens_log_probabilities_and_weight_version(server: str, job: ServedJob) -> None:
    tokens = job.tokens("one two")
    reply = while_calling(lambda: generate(server, tokens), answering(job, "three four"))
    response = [*job.tokens("three four"), job.tokenizer.eos_token_id]
    body = reply.json()
    meta = body["meta_info"]
    logprobs = [-0.25 * (1 + index % 4) for index in range(len(response))]
    assert [[*pair, None] for pair in zip(logprobs, response, strict=True)] == meta["output_token_logprobs"]
    assert response == body["output_ids"]
    assert job.text(response) == body["text"]
    assert {"type": "stop", "matched": response[-1]} == meta["finish_reason"]
    lengths = meta["prompt_tokens"], meta["completion_tokens"]
    assert (len(tokens), len(response)) == lengths
    assert "3" == meta["weight_version"]
    assert [f"{reply.headers['X-Rollout-Request-Ids']}/0/0"] == job.sampled


def test_settings_and_trace_are_those_of_the_request(server: str, job: ServedJob) -> None:
    found = []
    changes = {"temperature": 0.5, "top_k": 7, "stop": "ten", "sampling_seed": 5, "ignore_eos": True}
    reply = while_calling(
        lambda: generate(server, [1, 2], **changes), answering(job, "three four", end=FinishReason.LENGTH, found=found)
    ).json()
    assert {"type": "length", "length": len(job.tokens("three four"))} == reply["meta_info"]["finish_reason"]
    sampling = found[0].sampling
    assert (1, 0.5, 7, 9, ["ten"], 5, True) == (
        sampling.n,
        sampling.temperature,
        sampling.top_k,
        sampling.max_tokens,
        sampling.stop,
        sampling.seed,
        sampling.ignore_eos,
    )
    assert TRACE == found[0].traceparent


@pytest.mark.parametrize(("is_kept", "text"), [(True, "three four"), (False, "three")])
def test_text_ends_before_a_stop_string_unless_it_is_kept(
    server: str, job: ServedJob, *, is_kept: bool, text: str
) -> None:
    def answer() -> None:
        [request] = job.wait_for_requests(1)
        tokens = job.tokens("three four")
        rollout = job.rollout(request, 0, "three four", FinishReason.LENGTH)
        assert tokens == rollout.token_ids
        job.keep(request, rollout.model_copy(update={"finish_reason": FinishReason.STOP}))
        job.delete_request(request)

    changes = {"stop": ["four"], "no_stop_trim": is_kept}
    reply = while_calling(lambda: generate(server, [1], **changes), answer).json()
    assert text == reply["text"].strip()
    assert "four" == reply["meta_info"]["finish_reason"]["matched"]


def test_an_end_token_that_is_ignored_stops_nothing(server: str, job: ServedJob) -> None:
    end = job.tokenizer.eos_token_id

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        job.keep(request, job.rollout(request, 0, "three four"))
        job.delete_request(request)

    changes = {"stop": [f"four{job.text([end])}"], "ignore_eos": True}
    reply = while_calling(lambda: generate(server, [1], **changes), answer).json()
    assert changes["stop"] == [reply["meta_info"]["finish_reason"]["matched"]]
    assert reply["text"].endswith(job.text([end]))


def test_an_aborted_sample_has_the_tokens_that_were_sampled(server: str, job: ServedJob) -> None:
    def num_reads() -> int:
        calls: Any = job.redis.info("commandstats")
        return int(calls.get("cmdstat_xrange", {"calls": 0})["calls"])

    def abort() -> None:
        [request] = job.wait_for_requests(1)
        before = num_reads()
        job.stream_text(request, 0, "three four")
        wait_for(lambda: num_reads() > before)
        job.redis.xadd(job.keys.token_updates, {"r": request.request_id})
        wait_for(lambda: num_reads() > before + 1)  # the server has received the tokens before it reads again
        assert 1 == httpx.get(f"{server}/v1/loads?include=core").json()["loads"][0]["num_running_reqs"]
        httpx.post(f"{server}/abort_request", json={"abort_all": True}).raise_for_status()

    meta = while_calling(lambda: generate(server, [1, 2]), abort).json()["meta_info"]
    assert {"type": "abort", "message": "aborted"} == meta["finish_reason"]
    assert job.tokens("three four") == [token for _, token, _ in meta["output_token_logprobs"]]
    assert 0 == httpx.get(f"{server}/v1/loads").json()["loads"][0]["num_running_reqs"]


def test_weights_are_published_from_a_directory(server: str, job: ServedJob, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    job.report_engine("a", version=3)
    for call in ("pause_generation", "continue_generation"):
        httpx.post(f"{server}/{call}", json={}).raise_for_status()
    httpx.get(f"{server}/flush_cache").raise_for_status()

    def update(body: dict[str, str], **report: Any) -> httpx.Response:
        body = {"model_path": str(tmp_path), **body}

        def load() -> None:
            wait_for(lambda: bool(job.control_messages()))
            job.serve_once()
            job.report_engine("a", **report)

        return while_calling(lambda: httpx.post(f"{server}/update_weights_from_disk", json=body, timeout=30), load)

    assert update({"weight_version": "4"}, version=4).json()["success"]
    assert {"weight_version": "4"} == httpx.get(f"{server}/get_weight_version").json()
    assert "weight version 5" in update({}, version=5).json()["message"]
    failed = update({"weight_version": "6"}, version=5, failed={6: "truncated"})
    assert 400 == failed.status_code
    assert "truncated" in failed.json()["message"]
    wrong = httpx.post(f"{server}/update_weights_from_disk", json={"model_path": "x", "weight_version": "new"})
    assert 400 == wrong.status_code
    assert "weight_version: 'new' is not a number" in wrong.json()["message"]


@pytest.mark.parametrize(("refused", "status"), [(False, 500), (True, 400)])
def test_a_sample_that_fails_is_an_error_with_its_reason(
    server: str, job: ServedJob, *, refused: bool, status: int
) -> None:
    def fail() -> None:
        [request] = job.wait_for_requests(1)
        job.fail(request, "the grammar is empty", refused=refused)

    reply = while_calling(lambda: generate(server, [1, 2]), fail)
    assert status == reply.status_code
    assert "the grammar is empty" in reply.text


def test_a_job_looks_like_an_engine_on_one_gpu(server: str) -> None:
    httpx.get(f"{server}/health_generate").raise_for_status()
    info = httpx.get(f"{server}/server_info").json()
    # slime.backends.sglang_utils.external.discover_external_engines, and what SGLangEngine._init_external compares
    assert (1, 1, 1, False) == (info["tp_size"], info["pp_size"], info["num_gpus"], info["enable_memory_saver"])
    assert "disaggregation_mode" not in info
    assert httpx.get(f"{server}/get_model_info").json()["is_generation"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": [1], "image_data": ["x"]}, "image_data"),
        ({"input_ids": [1], "sampling_params": {"custom_params": {"top_h": 0.5}}}, "custom_params.top_h"),
        ({"input_ids": [1], "text": "one"}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"top_p": 2}}, "top_p"),
        ({"input_ids": [5000]}, "5000"),
    ],
)
def test_what_a_job_cannot_do_is_refused_by_name(server: str, body: dict[str, Any], field: str) -> None:
    reply = httpx.post(f"{server}/generate", json=body)
    assert 400 == reply.status_code
    assert field in reply.text


def int32(data: str) -> list[int]:
    """Decode an array as slime.utils.misc.decode_int32_meta_array does."""
    return [int(value) for value in np.frombuffer(base64.b64decode(data), dtype=np.int32)]


def test_kept_tokens_have_slimes_form(server: str, job: ServedJob) -> None:
    changes = {"top_p": 0.9, "top_k": 20, "custom_params": {"return_top_p_token_ids": True}}
    reply = while_calling(lambda: generate(server, [1, 2], **changes), answering(job, "three four"))
    tokens, meta = reply.json()["output_ids"], reply.json()["meta_info"]
    ids, offsets = int32(meta["top_p_token_ids"]), int32(meta["top_p_token_offsets"])
    assert (0, len(ids), len(tokens) + 1) == (offsets[0], offsets[-1], len(offsets))
    for index, token in enumerate(tokens):
        assert list(range(token, token + 1 + index % 3)) == ids[offsets[index] : offsets[index + 1]]


def test_kept_tokens_without_a_limit_are_refused(server: str, job: ServedJob) -> None:
    changes = {"top_p": 0.9, "top_k": -1, "custom_params": {"return_top_p_token_ids": True}}
    reply = generate(server, [1, 2], **changes)
    assert 400 == reply.status_code
    assert "sampling.kept_tokens: it needs a top-k from 1 to 128" in reply.text
    assert [] == job.requests()


def test_unknown_kept_tokens_are_an_error(server: str, job: ServedJob) -> None:
    """slime would take an empty list for the sampled token alone."""

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        rollout = job.rollout(request, 0, "three four")
        kept = [[token] for token in rollout.token_ids[:-1]] + [[]]
        job.keep(request, rollout.model_copy(update={"kept_token_ids": kept}))
        job.delete_request(request)

    changes = {"top_k": 20, "custom_params": {"return_top_p_token_ids": True}}
    reply = while_calling(lambda: generate(server, [1, 2], **changes), answer)
    assert 500 == reply.status_code
    assert "are unknown, because very many tokens tie" in reply.text


def test_routed_experts_have_slimes_form(server: str, job: ServedJob) -> None:
    """One row for each token of prompt and response but the last."""
    body = {"sampling_params": SAMPLING, "input_ids": [1, 2], "return_routed_experts": True}
    found = []

    def answer() -> None:
        found.extend(job.wait_for_requests(1))
        job.keep(found[0], job.experts(found[0], job.rollout(found[0], 0, "three four")))
        job.delete_request(found[0])

    reply = while_calling(lambda: httpx.post(f"{server}/generate", json=body, timeout=30), answer).json()
    assert found[0].sampling.routed_experts
    rows = int32(reply["meta_info"]["routed_experts"])
    num_tokens = 2 + len(reply["output_ids"]) - 1
    assert [[[position, 300]] * 2 for position in range(num_tokens)] == np.reshape(rows, (num_tokens, 2, 2)).tolist()
