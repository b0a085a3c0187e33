"""Prompts with images over HTTP, with the configuration of a model that sees them."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalKwargsItem

from rollout_api import RolloutRequest
from rollout_api.client import stored_images
from tests.support.served_job import MODEL_NAME, ServedJob, answering, serving, while_calling
from tests.support.vision_model import BROKEN_IMAGE, HUGE_IMAGE, IMAGE, IMAGE_TEXT, make_image, make_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def server(job: ServedJob, redis_url: str, model: Path) -> Iterator[str]:
    with serving(job, redis_url, model) as url:
        yield url


def messages(*images: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return [{"role": "user", "content": [{"type": "text", "text": "what is"}, *parts]}]


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def test_an_image_of_a_message_goes_to_the_job(openai: OpenAI, job: ServedJob) -> None:
    found: list[RolloutRequest] = []
    red, blue = make_image("red"), make_image("blue")

    def chat(*images: bytes) -> Any:
        return openai.chat.completions.with_raw_response.create(
            model=MODEL_NAME,
            messages=messages(*map(data_url, images)),
            n=2,
            extra_headers={"Idempotency-Key": "key"},
            extra_body={"return_token_ids": True},
        )

    reply = while_calling(lambda: chat(red, blue), answering(job, "it", found=found))
    [request] = found
    assert f"user:what is{IMAGE}{IMAGE}\nassistant:" == job.text(request.prompt_token_ids)
    assert [red, blue] == [job.redis.get(job.keys.image(digest)) for digest in request.images]
    assert [sha256(image).hexdigest() for image in (red, blue)] == request.images
    completion = reply.parse()
    assert ["it", "it"] == [choice.message.content for choice in completion.choices]
    assert f"user:what is{IMAGE_TEXT}{IMAGE_TEXT}\nassistant:" == job.text(completion.prompt_token_ids)
    assert "unknown" == reply.headers["X-Rollout-Prefix"]
    # A prompt that differs in its images only is not a repetition.
    assert reply.headers["X-Rollout-Request-Ids"] == chat(red, blue).headers["X-Rollout-Request-Ids"]
    with pytest.raises(Exception, match="422"):
        chat(red, red)


def test_what_engines_could_not_do_the_same_with_is_refused(server: str, job: ServedJob) -> None:
    red = data_url(make_image("red"))
    chat = {"model": MODEL_NAME, "messages": messages(red)}
    noise = base64.b64encode(bytes(5000)).decode()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": messages(f"{server}/health")}, "--allowed-media-domains"),
        ({"messages": messages("file:///etc/hostname")}, "allowed-local-media-path"),
        ({"messages": messages("data:image/png;base64,AAAA")}, "image"),
        ({"messages": messages("data:image/png,abc")}, "base64"),
        ({"messages": messages(data_url(HUGE_IMAGE))}, "decompression bomb"),
        ({"messages": messages(data_url(BROKEN_IMAGE))}, "broken PNG"),
        ({"messages": messages(data_url(make_image("red") + bytes(4096)))}, "spec.queue.maxImageBytes"),
        ({"mm_processor_kwargs": {"size": {"longest_edge": 28}}}, "mm_processor_kwargs"),
        ({"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}, "media_io_kwargs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": "a"}]}]},
            "not provided",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": noise}]}]}, "embed"),
    ]
    for stream in (False, True):
        for body, message in cases:
            reply = httpx.post(f"{server}/v1/chat/completions", json={**chat, **body, "stream": stream}, timeout=30)
            assert 400 == reply.status_code, (body, reply.text)
            assert message in reply.json()["error"]["message"], (body, reply.text)
    assert [] == job.requests()


def test_a_download_is_not_redirected_to_where_the_server_downloads_nothing_from(
    job: ServedJob, redis_url: str, model: Path
) -> None:
    paths: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200 if self.path == "/image" else 302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/image")
            self.end_headers()
            if self.path == "/image":
                self.wfile.write(make_image("red"))

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as images,
        ThreadPoolExecutor(1) as pool,
        serving(job, redis_url, model, ["--allowed-media-domains", "localhost", "127.0.0.1", "::1"]) as server,
    ):
        pool.submit(images.serve_forever)
        body = {"model": MODEL_NAME, "messages": messages(f"http://localhost:{images.server_address[1]}/elsewhere")}
        reply = httpx.post(f"{server}/v1/chat/completions/render", json=body, timeout=30)
        images.shutdown()
    assert (400, ["/elsewhere"]) == (reply.status_code, paths), reply.text


def test_a_domain_with_a_private_address_is_not_downloaded_from(job: ServedJob, redis_url: str, model: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        serving(job, redis_url, model, ["--allowed-media-domains", "localhost"]) as server,
    ):
        listening.setblocking(False)
        body = {"model": MODEL_NAME, "messages": messages(f"http://localhost:{listening.getsockname()[1]}/")}
        reply = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=30)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert 400 == reply.status_code, reply.text
    assert "localhost stands for a private address" in reply.json()["error"]["message"]


def test_a_job_stores_no_more_images_than_it_may(server: str, job: ServedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_images, "MAX_STORED_REQUESTS", 0.5)

    def post(path: str, color: str) -> httpx.Response:
        body = {"model": MODEL_NAME, "messages": messages(data_url(make_image(color)))}
        return httpx.post(f"{server}/v1/chat/completions{path}", json=body, timeout=30)

    colors = ("red", "green", "blue", "white", "black")
    statuses = [post("/render", color).status_code for color in colors]
    assert [200, 200, 200, 429, 429] == statuses
    assert 200 == post("/render", "red").status_code
    refused = post("", "black")
    assert 429 == refused.status_code
    assert "spec.queue.maxImageBytes" in refused.json()["error"]["message"]
    assert 3 == len(list(job.redis.scan_iter(job.keys.image("*"))))


def test_a_prompt_can_be_rendered_first_as_trl_does(server: str, job: ServedJob) -> None:
    red = make_image("red")
    chat = {"model": MODEL_NAME, "messages": messages(data_url(red))}
    features = httpx.post(f"{server}/v1/chat/completions/render", json=chat, timeout=30).json()["features"]
    digest = sha256(red).hexdigest()
    assert {"image": [digest]} == features["mm_hashes"]
    assert red == job.redis.get(job.keys.image(digest))
    token_ids = job.tokens(f"user:{IMAGE_TEXT}\nassistant:")
    place = {"offset": token_ids.index(job.tokens(IMAGE)[0]), "length": 4}
    features["mm_placeholders"] = {"image": [place]}
    body = {
        "model": MODEL_NAME,
        "token_ids": token_ids,
        "features": features,
        "sampling_params": {"max_tokens": 4},
    }
    found: list[RolloutRequest] = []

    def generate() -> httpx.Response:
        return httpx.post(f"{server}/inference/v1/generate", json=body, timeout=30)

    assert 200 == while_calling(generate, answering(job, "it", found=found)).status_code
    [request] = found
    assert (token_ids, [digest], [(place["offset"], 4)]) == (
        request.prompt_token_ids,
        request.images,
        request.image_positions,
    )
    features["kwargs_data"] = {"image": [encode_mm_kwargs_item(MultiModalKwargsItem.dummy())]}
    elsewhere = generate()
    assert (400, "features") == (elsewhere.status_code, elsewhere.json()["error"]["param"])
    features["kwargs_data"] = None
    job.redis.delete(job.keys.image(digest))
    missing = generate()
    assert 400 == missing.status_code
    assert "not rendered recently" in missing.json()["error"]["message"]
    features["mm_placeholders"] = {"image": [{"offset": len(token_ids), "length": 4}]}
    outside = generate()
    assert (400, []) == (outside.status_code, job.requests()), outside.text
