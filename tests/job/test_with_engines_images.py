"""A job with a tiny model that sees images: prompts from the client and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from PIL import Image

from rollout_api import (
    AsyncRolloutClient,
    FinishReason,
    Partial,
    Prompt,
    Rollout,
    RolloutRequest,
    Sampling,
    UpdateMode,
    WeightSpan,
    problem_id_of,
)
from rollout_store.models.model_source import load_tokenizer
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.images import decode_image
from tests.support.in_process_job import LiveJob, live, manifest, start_engine
from tests.support.live_job_harness import gather, prompt_index
from tests.support.reference_model import LoopThread
from tests.support.served_job import MODEL_NAME, serving
from tests.support.vision_model import HUGE_IMAGE, IMAGE, IMAGE_TEXT, VOCABULARY, make_image, make_vision_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RED, BLUE = make_image("red"), make_image("blue")
TEXT = f"user:what is{IMAGE}\nassistant:"
"""What the chat template makes of a message with an image."""
GREEDY: dict[str, Any] = {"n": 2, "temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def engine(model: Path, loop: LoopThread, redis_server: str) -> Iterator[Engine]:
    engine = loop.run(start_engine(model, redis_server, manifest()), timeout=900)
    yield engine
    engine.close()


def greedy_responses(model: Path, images: Sequence[bytes]) -> list[list[int]]:
    """Return the greedy response to each image, computed by transformers."""
    from transformers import Idefics3ForConditionalGeneration, Idefics3Processor

    processor = Idefics3Processor.from_pretrained(model)
    reference = Idefics3ForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    responses = []
    for image in images:
        inputs = processor(images=[[Image.open(io.BytesIO(image))]], text=[TEXT], return_tensors="pt")
        length = GREEDY["max_tokens"]
        output = reference.generate(**inputs, do_sample=False, min_new_tokens=length, max_new_tokens=length)
        responses.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return responses


async def sample(running: LiveJob, client: AsyncRolloutClient, step: int, prompts: list[Prompt]) -> list[Rollout]:
    """Return all rollouts of a step, or raise the error of a part of the job that fails."""
    sampling = asyncio.ensure_future(gather(client, step, prompts))
    await running.until(sampling.done)
    return sampling.result()


def test_the_model_sees_the_images_of_its_prompts(
    model: Path, engine: Engine, loop: LoopThread, redis_url: str
) -> None:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    expanded = tokenizer.encode(TEXT.replace(IMAGE, IMAGE_TEXT), add_special_tokens=False)
    image_token = tokenizer.convert_tokens_to_ids(IMAGE)
    red, blue = expected = greedy_responses(model, [RED, BLUE])
    assert red != blue

    async def with_client(running: LiveJob, client: AsyncRolloutClient) -> None:
        sampling = {**GREEDY, "logprobs": True, "prompt_logprobs": True}
        rollouts = await sample(
            running, client, 0, [Prompt(ids, images=[image], sampling=sampling) for image in (RED, BLUE)]
        )
        assert 4 == len(rollouts)
        for rollout in rollouts:
            assert expected[prompt_index(rollout)] == rollout.token_ids
            assert rollout.prompt_logprobs is not None
            assert len(expanded) - 1 == len(rollout.prompt_logprobs)
        assert 4 == sum((await asyncio.to_thread(running.in_history)).values())
        problems = {problem_id_of(ids, [sha256(image).hexdigest()]) for image in (RED, BLUE)}
        assert problems == {rollout.problem_id for rollout in rollouts}
        # The history drafts for the same image, and so for a prompt that has the tokens of the image already.
        begun = Partial(token_ids=red[:7], weight_spans=[WeightSpan(start=0, weight_version=0)])
        once = {**GREEDY, "n": 1}
        problem = problem_id_of(ids, [sha256(RED).hexdigest()])
        prompts = [
            Prompt(ids, images=[RED], sampling=once),
            Prompt(ids, images=[RED], prefix=begun, sampling=once),
            Prompt(expanded, problem, images=[RED], image_positions=[(expanded.index(image_token), 4)], sampling=once),
            Prompt(
                expanded, problem, images=[RED], image_positions=[(expanded.index(image_token) - 2, 7)], sampling=once
            ),
        ]
        num_accepted = 0
        for rollout in await sample(running, client, 1, prompts):
            assert red == rollout.token_ids
            num_accepted += rollout.num_accepted_tokens
        assert num_accepted > 0

    async def with_wrong_prompts(running: LiveJob, client: AsyncRolloutClient) -> None:
        filler = tokenizer.encode("a", add_special_tokens=False) * (512 - 40 - len(ids))
        wrong: list[tuple[Prompt, str]] = [
            (Prompt(ids, images=[b"no image"], sampling=GREEDY), "cannot be decoded"),
            (Prompt(ids, images=[HUGE_IMAGE], sampling=GREEDY), "decompression bomb"),
            (Prompt(ids, images=[b"a list"], sampling=GREEDY), "cannot be read: WRONGTYPE"),
            (Prompt(ids, images=[RED, RED], sampling=GREEDY), "cannot place"),
            (Prompt(expanded, images=[RED], image_positions=[(5, 3)], sampling=GREEDY), "image 0 has 4 tokens, not 3"),
            (Prompt([*filler, *ids], images=[RED], sampling=GREEDY), "exceed engine.maxModelLen"),
        ]
        running.redis.rpush(running.keys.image(sha256(b"a list").hexdigest()), "no image")
        for rollout in await sample(running, client, 2, [prompt for prompt, _ in wrong]):
            assert (FinishReason.FAILED, True) == (rollout.finish_reason, rollout.refused)
            assert wrong[prompt_index(rollout)][1] in rollout.detail

    async def with_http(url: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for image, tokens in ((RED, red), (BLUE, blue)):
                data = f"data:image/png;base64,{base64.b64encode(image).decode()}"
                parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": data}}]
                messages: Any = [{"role": "user", "content": parts}]
                completion: Any = await client.chat.completions.create(
                    model=MODEL_NAME,
                    messages=messages,
                    temperature=0,
                    max_tokens=40,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                assert tokens == completion.choices[0].token_ids
                rendered = await client.post(
                    "/chat/completions/render", cast_to=dict[str, Any], body={"model": MODEL_NAME, "messages": messages}
                )
                settings = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
                body = {key: rendered[key] for key in ("token_ids", "features")} | {"sampling_params": settings}
                generated = await client.post(
                    f"{url}/inference/v1/generate", cast_to=dict[str, Any], body={"model": MODEL_NAME, **body}
                )
                assert tokens == generated["choices"][0]["token_ids"]

    async def run() -> None:
        async with (
            live(redis_url, manifest(), model, VOCABULARY, {"engine-0": engine}) as running,
            AsyncRolloutClient.connect(redis_url, uid=running.uid) as client,
        ):
            await with_client(running, client)
            await with_wrong_prompts(running, client)
            with serving(running, redis_url, model) as url:
                await with_http(url)

    loop.run(run(), timeout=300)


def test_new_weights_see_known_images_anew(model: Path, engine: Engine, loop: LoopThread, tmp_path: Path) -> None:
    """Also if the keys and values of the old weights are kept for responses that are running."""
    other = make_vision_model(tmp_path, seed=6)
    ids = load_tokenizer(model).encode(TEXT, add_special_tokens=False)
    request = RolloutRequest(
        job_uid="test",
        request_id="a",
        prompt_token_ids=ids,
        images=[sha256(RED).hexdigest()],
        sampling=Sampling(**GREEDY),
    )

    async def response() -> list[int]:
        return (await engine.generate(request, 0, images=[decode_image(RED)])).token_ids

    assert greedy_responses(model, [RED]) == [loop.run(response())]
    loop.run(engine.load_weights(other, 1, UpdateMode.KEEP))
    assert greedy_responses(other, [RED]) == [loop.run(response())]
