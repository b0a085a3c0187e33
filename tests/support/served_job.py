"""Serves a job over HTTP in a thread, and a fake job for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvicorn
from safetensors.numpy import save_file
from starlette.types import ASGIApp

from rollout_api import FinishReason, RequestClient, Rollout, RolloutRequest, RoutedExperts, WeightSpan, encode
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.messages import Partial
from rollout_server.server import as_asgi, build_app
from rollout_store.models.model_source import load_tokenizer
from scripts.tiny_model.tokenizer import build_tokenizer
from tests.support.fake_job import VOCABULARY, FakeJob
from tests.support.in_process_job import LiveJob
from tests.support.manifests import SMALL_CPU_ENGINE, rollout_job
from tests.support.waiting import wait_for

T = TypeVar("T")
MODEL_NAME = "das/tiny"
"""The server's name of the model."""


def make_configuration(directory: Path) -> Path:
    """Write a model's configuration and tokenizer, and a file in place of its weights, which no server loads."""
    from transformers import Qwen3Config

    texts = ["one two three four five six seven eight nine ten", "<tool_call></tool_call>"]
    tokenizer = build_tokenizer(texts, vocabulary=VOCABULARY)
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "(message['content'] or '')")
    tokenizer.save_pretrained(directory)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(directory)
    save_file({"none": np.zeros(1, dtype=np.float32)}, directory / "model.safetensors")
    return directory


class ServedJob(FakeJob):
    """A fake job whose responses are texts of the model's tokenizer."""

    def __init__(self, url: str, model: Path, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.tokenizer = load_tokenizer(model)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(tokens))

    def rollout(
        self, request: RolloutRequest, sample: int, text: str, end: FinishReason = FinishReason.STOP
    ) -> Rollout:
        """Return a rollout with this text; one that has stopped ends with the end-of-sequence token."""
        tokens = self.tokens(text) + ([self.tokenizer.eos_token_id] if end is FinishReason.STOP else [])
        part = _part(request, tokens)
        return self.make_rollout(request, sample, finish_reason=end).model_copy(
            update={
                "token_ids": tokens,
                "weight_spans": part.weight_spans,
                **part.logprob_fields(),
                **part.prompt_logprob_fields(),
            }
        )

    def fail(self, request: RolloutRequest, detail: str, *, refused: bool = False) -> None:
        """Answer a request for one sample with a rollout that has failed."""
        failed = self.make_rollout(request, 0, length=0, finish_reason=FinishReason.FAILED)
        self.keep(request, failed.model_copy(update={"detail": detail} | ({"refused": True} if refused else {})))
        self.delete_request(request)

    def experts(self, request: RolloutRequest, rollout: Rollout) -> Rollout:
        """Return a rollout with two experts for each token and for each of two layers: the token's position and 300."""
        num_tokens = len(request.prompt_token_ids) + rollout.num_tokens - 1
        rows = np.full((num_tokens, 2, 2), 300, dtype="<u2")
        rows[:, :, 0] = np.arange(num_tokens)[:, None]
        experts = RoutedExperts(shape=[num_tokens, 2, 2], dtype="uint16", data=rows.tobytes())
        return rollout.model_copy(update={"routed_experts": experts})

    def answer_text(self, request: RolloutRequest, *texts: str, end: FinishReason = FinishReason.STOP) -> None:
        """Answer all samples of a request with these texts, one after the other."""
        for sample in range(self.num_samples(request)):
            rollout = self.rollout(request, sample, texts[sample % len(texts)], end)
            self.sampled.append(rollout.rollout_id)
            self.keep(request, rollout)
        self.delete_request(request)

    def stream_text(self, request: RolloutRequest, sample: int, text: str, *, after: str = "") -> None:
        """Stream the tokens of a text that follows the text *after*."""
        before, tokens = len(self.tokens(after)), self.tokens(text)
        part = _part(request, tokens, before)
        key = self.keys.tokens(request.request_id, sample)
        self.redis.xadd(key, {"d": encode(part)}, id=f"{before + len(tokens)}-0")
        self.redis.xadd(self.keys.token_updates, {"r": request.request_id})


def _part(request: RolloutRequest, tokens: Sequence[int], before: int = 0) -> Partial:
    """Return tokens as part of a response, after the number of tokens *before*.

    At each position, the most likely tokens are the sampled one and those with the next ids. The same applies to the
    tokens of the prompt. One to three tokens are kept, beginning with the sampled one.
    """
    indices = range(before, before + len(tokens))
    fields: dict[str, Any] = {"logprobs": [-0.25 * (1 + index % 4) for index in indices]}
    if count := request.sampling.top_logprobs:
        fields["ranks"] = [1] * len(tokens)
        fields["top_logprobs"] = [
            {token + number: fields["logprobs"][index] - number for number in range(count)}
            for index, token in enumerate(tokens)
        ]
    if request.sampling.kept_tokens:
        fields["kept_token_ids"] = [list(range(token, token + 1 + index % 3)) for index, token in enumerate(tokens)]
    if request.sampling.returns_prompt_logprobs and not before:
        rest = request.prompt_token_ids[1:]
        fields["prompt_logprobs"] = [-0.5 * (1 + index) for index in range(len(rest))]
        if count := request.sampling.top_prompt_logprobs:
            fields["prompt_ranks"] = [1] * len(rest)
            fields["top_prompt_logprobs"] = [
                {token + number: fields["prompt_logprobs"][index] - number for number in range(count)}
                for index, token in enumerate(rest)
            ]
    spans = [WeightSpan(start=0, weight_version=3)] if tokens else []
    return Partial(token_ids=list(tokens), weight_spans=spans, **fields)


def while_calling(call: Callable[[], T], then: Callable[[], None]) -> T:
    """Run *then* while *call* waits in a thread, and return its result."""
    with ThreadPoolExecutor(1) as pool:
        result: Future[T] = pool.submit(call)
        then()
        return result.result(timeout=30)


def answering(
    job: ServedJob,
    *texts: str,
    end: FinishReason = FinishReason.STOP,
    found: list[RolloutRequest] | None = None,
) -> Callable[[], None]:
    """Return a function that waits for a request, answers it, and adds it to *found*."""

    def answer() -> None:
        [request] = job.wait_for_requests(1)
        if found is not None:
            found.append(request)
        job.answer_text(request, *texts, end=end)

    return answer


@contextmanager
def serving(
    job: FakeJob | LiveJob,
    url: str,
    model: Path,
    arguments: Sequence[str] = (),
    wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **sections: Any,
) -> Iterator[str]:
    """Serve a job at the URL that is returned, until the block ends.

    Args:
        job: the job.
        url: URL of the job's Redis.
        model: directory of the model's configuration and tokenizer.
        arguments: further arguments of vLLM's API server.
        wrap: adds middleware.
        **sections: further sections of the job's specification.
    """
    defaults = {"engine": SMALL_CPU_ENGINE, "sampling": {"maxTokens": 64}}
    spec = RolloutJob.model_validate(rollout_job(**defaults | sections)).spec
    servers: list[uvicorn.Server] = []
    errors: list[BaseException] = []

    async def run() -> None:
        address: dict[str, str] = {"uid": job.uid} if isinstance(job, LiveJob) else {"job": job.name}
        async with RequestClient.connect(url, **address, reconnect_timeout=2) as client:
            app = await build_app(client, model, [MODEL_NAME], spec, arguments)
            server = uvicorn.Server(uvicorn.Config(wrap(as_asgi(app)), port=0, log_level="warning"))
            app.state.server, job_engine = server, app.state.engine_client
            servers.append(server)
            await server.serve()
            job_engine.shutdown()

    def run_and_record() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run_and_record, daemon=True)
    thread.start()
    wait_for(lambda: errors or (servers and servers[0].started), 300)
    if errors:
        raise errors[0]
    port = servers[0].servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        servers[0].should_exit = True
        thread.join(timeout=20)
    if errors:
        raise errors[0]
