"""Generates responses with vLLM, returns partial rollouts meanwhile, and pauses decoding."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import (
    DraftMode,
    FinishReason,
    Partial,
    RolloutRequest,
    RoutedExperts,
    problem_id_of,
)
from rollout_store.job.admission_rules import AdmissionError, check_admission
from rollout_store.job.canary import CANARY_TOKENS, canary_sample
from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import EngineConfig
from rollout_worker.engine.draft_settings import SOURCES, DraftSettings
from rollout_worker.engine.response import (
    DraftCountReader,
    GenerationResult,
    NotFiniteError,
    PromptLogprobs,
    ResponseBuilder,
    ResponseDraftCounts,
    TokensSoFar,
    UnusableOutputError,
    routed_experts_of,
)
from rollout_worker.engine.sampling_params import (
    StopStrings,
    check_v2_limits,
    kept_tokens,
    kept_width,
    token_decoder,
    vllm_sampling_params,
)
from rollout_worker.engine.vllm_client import (
    Adapter,
    Adapters,
    VllmClient,
    WeightVersionTracker,
    model_end_tokens,
    num_output_tokens,
    refusing_rejected_requests,
    translate_errors,
)

PartialCallback = Callable[[Partial], None]
"""Receives all tokens of a response so far."""
TokensCallback = Callable[[TokensSoFar], None]
"""Receives a reference to the tokens of a response after each decoding step."""
VersionStarts = list[tuple[int, int]]
"""(weight version, index of its first token), in order."""
_ABORT_RETRY_INTERVAL_S = 0.02
"""Seconds after which an abort is repeated, because vLLM ignores an abort of a call that it has not received yet."""
_CALL_SEPARATOR = "#"
"""Separates the rollout id from the number of the call in the id of a call."""


class ResponseGenerator:
    """Generates the responses of one engine."""

    def __init__(
        self, client: VllmClient, config: EngineConfig, weight_versions: WeightVersionTracker, adapters: Adapters
    ) -> None:
        self.last_finished = 0.0
        """``time.monotonic()`` when the last response ended."""
        self._client, self._config = client, config
        self._weight_versions, self._adapters = weight_versions, adapters
        self._draft_counts = DraftCountReader(client)
        self._end_tokens = model_end_tokens(client.llm)
        self._vocabulary: int = client.llm.model_config.get_vocab_size()
        self._call_numbers = itertools.count()
        self._cache_salt = 0
        self._running: dict[str, int] = {}
        """Id of each call that vLLM has → number of tokens of its prefix."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._num_admission_pauses = 0

    # Control by pauses and weight updates

    @property
    def admission_paused(self) -> bool:
        """Whether new responses wait before they are passed to vLLM."""
        return not self._admitting.is_set()

    def pause_admission(self) -> None:
        """Let new responses wait before they are passed to vLLM, until each such call was followed by a resumption."""
        self._num_admission_pauses += 1
        self._admitting.clear()

    def resume_admission(self) -> None:
        """Pass new and waiting responses to vLLM again, unless another caller has paused admission, too."""
        self._num_admission_pauses -= 1
        if not self._num_admission_pauses:
            self._admitting.set()

    async def wait_idle(self) -> None:
        """Wait until vLLM has no response, including those that it has queued or preempted."""
        await self._idle.wait()

    def ignore_cached_prompts(self) -> None:
        """Do not let new responses use keys and values that were cached before."""
        self._cache_salt += 1

    # Generation

    def running_tokens(self) -> dict[str, int]:
        """See :meth:`Engine.running_tokens`."""
        llm = self._client.llm
        return {
            call_id.rpartition(_CALL_SEPARATOR)[0]: prefix_tokens + num_output_tokens(llm, call_id)
            for call_id, prefix_tokens in self._running.items()
        }

    async def generate(
        self,
        request: RolloutRequest,
        sample: int,
        *,
        images: Sequence[Any],
        prefix: Partial | None,
        on_partial: PartialCallback | None,
        partial_interval: int,
        on_tokens: TokensCallback | None,
        stop_event: asyncio.Event | None,
    ) -> GenerationResult:
        """See :meth:`Engine.generate`."""
        sampling = request.sampling
        prefix = request.prefix if prefix is None else prefix
        started = time.monotonic()
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids}
        if request.images:
            prompt = await self._with_images(request, images)
        num_prompt_tokens = len(prompt["prompt_token_ids"])
        check_admission(
            sampling,
            num_prompt_tokens,
            max_model_len=self._config.spec.max_model_len,
            raw_logprobs=self._config.spec.logprobs_mode == "raw",
            routed_experts=self._config.returns_routed_experts,
            prefix=prefix,
        )
        await self._admitting.wait()
        stop_strings = self._stop_strings(request, prefix.token_ids if prefix is not None else [])
        response = ResponseBuilder(
            prefix,
            logprobs=sampling.returns_logprobs,
            top_logprobs=sampling.top_logprobs,
            prompt_logprobs=sampling.returns_prompt_logprobs,
            kept_tokens=self._kept_tokens(sampling),
            stop_strings=stop_strings,
        )
        reason = self._end_of_prefix(response, sampling)
        if reason is not None or (stop_event is not None and stop_event.is_set()):
            return response.finish(reason, [], started=started, finished=started)
        # The id of the call is unique, because the same rollout may be requested again.
        call_id = f"{request.rollout_id(sample)}{_CALL_SEPARATOR}{next(self._call_numbers)}"
        interval = self._streaming_interval(partial_interval)
        # vLLM does not know the stop strings of a continued response. It returns its tokens after each step, so that it
        # can be aborted after the one that completes a stop string.
        each_step = stop_strings is not None or on_tokens is not None
        params = self._sampling_params(
            request, sample, call_id, response.token_ids, interval=1 if each_step else interval
        )
        prompt["prompt_token_ids"] = prompt["prompt_token_ids"] + response.token_ids
        prompt["cache_salt"] = str(self._cache_salt)
        with self._adapters.use() as adapter, self._track(call_id, response.prefix_tokens, stop_event):
            output, starts = await self._stream(
                prompt,
                params,
                call_id,
                response,
                sampling,
                adapter=adapter,
                on_partial=on_partial if interval else None,
                interval=interval,
                on_tokens=on_tokens,
            )
            finished = self.last_finished = time.monotonic()
            counts = ResponseDraftCounts()
            if self._config.drafting is not None:
                counts = await self._draft_counts.take(call_id)
            reason = FinishReason.STOP
            if not response.stopped:
                reason = _finish_reason(output.outputs[0].finish_reason, sampling, stop_event)
            return response.finish(
                reason,
                starts,
                started=started,
                finished=finished,
                draft_counts=counts,
                num_cached_tokens=output.num_cached_tokens or 0,
                routed_experts=self._routed_experts(request, num_prompt_tokens, response, output),
            )

    async def _with_images(self, request: RolloutRequest, images: Sequence[Any]) -> dict[str, Any]:
        """Return a prompt as vLLM's renderer makes it, with the tokens of its images and what the model reads of them.

        Raises:
            AdmissionError: the model, or the prompt, has no place for the images.
        """
        renderer = self._client.llm.renderer
        if renderer.mm_processor is None:
            raise AdmissionError(
                "the prompt has images, but the model reads text only; send it to a job with a model for both"
            )
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids}
        if request.image_positions is not None:
            prompt = {"prompt": renderer.mm_processor.dummy_inputs.get_dummy_text({"image": len(images)})}
        media = {"multi_modal_data": {"image": list(images)}, "multi_modal_uuids": {"image": request.images}}
        try:
            # The other cache relies on that of the engine core, which may be cleared before the prompt arrives there.
            [rendered] = await renderer.render_cmpl_async([prompt | media], skip_mm_cache=True)
        except Exception as error:  # processors raise errors of many types, even AssertionError
            raise AdmissionError(f"vLLM cannot place the images in the prompt: {error}") from error
        if request.image_positions is None:
            return dict(rendered)
        ranges = _placed(rendered["mm_placeholders"]["image"], request.image_positions)
        return {**rendered, "prompt_token_ids": request.prompt_token_ids, "mm_placeholders": {"image": ranges}}

    def _kept_tokens(self, sampling: Sampling) -> Callable[[Mapping[int, Any]], list[int]] | None:
        """Return a function that returns the kept tokens among vLLM's log-probabilities of one position."""
        if not sampling.kept_tokens:
            return None
        return partial(kept_tokens, width=kept_width(sampling, self._vocabulary), vocabulary=self._vocabulary)

    def _routed_experts(
        self, request: RolloutRequest, prompt_tokens: int, response: ResponseBuilder, output: Any
    ) -> RoutedExperts | None:
        if not request.sampling.routed_experts:
            return None
        return routed_experts_of(output.outputs[0].routed_experts, prompt_tokens + len(response.token_ids))

    def _stop_strings(self, request: RolloutRequest, prefix: list[int]) -> StopStrings | None:
        """Return the stop strings that vLLM does not look for."""
        sampling = request.sampling
        if not sampling.stop or not prefix:
            return None
        decoder = partial(token_decoder, self._client.llm.get_tokenizer(), request.prompt_token_ids)
        return StopStrings(sampling.stop, sampling.min_tokens, prefix, decoder)

    def _end_of_prefix(self, response: ResponseBuilder, sampling: Sampling) -> FinishReason | None:
        """Return why a response has already ended with its prefix; None if it has not."""
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._end_tokens
        if response.stopped or (response.token_ids and response.token_ids[-1] in ends):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(response.token_ids) == sampling.max_tokens else None

    def _streaming_interval(self, partial_interval: int) -> int:
        """Return after how many new tokens vLLM returns them; 0 if only at the end of the response.

        A step may generate a whole draft and one more token. Together with these, no more than *partial_interval*
        tokens may be unreported.
        """
        if not partial_interval:
            return 0
        drafting = self._config.drafting
        return max(1, partial_interval - 1 - (drafting.max_draft_tokens if drafting is not None else 0))

    def _sampling_params(
        self, request: RolloutRequest, sample: int, call_id: str, prefix: Sequence[int], *, interval: int
    ) -> Any:
        settings = self._draft_settings(request, sample, call_id, len(prefix))
        # Neither the job nor the request is part of the name, so that a repeated call has the same tokens.
        stream_name = ""
        if request.sampling.seed is not None:
            stream_name = f"{problem_id_of([*request.prompt_token_ids, *prefix])}/{sample}"
        with refusing_rejected_requests():
            params = vllm_sampling_params(
                request.sampling,
                stream_name,
                settings,
                prefix_tokens=len(prefix),
                interval=interval,
                min_logprobs=kept_width(request.sampling, self._vocabulary),
            )
            if self._client.llm.vllm_config.use_v2_model_runner:
                check_v2_limits(params, len(self._end_tokens))
            return params

    def _draft_settings(
        self, request: RolloutRequest, sample: int, call_id: str, prefix_tokens: int
    ) -> DraftSettings | None:
        if self._config.drafting is None:
            return None
        is_canary = canary_sample(request.request_id, request.sampling.n) == sample
        return DraftSettings(
            key=call_id,
            problem=request.problem,
            max_tokens=request.sampling.max_tokens,
            min_tokens=request.sampling.min_tokens,
            budget=0
            if request.draft_mode is DraftMode.OFF or request.sampling.excludes_drafts
            else request.draft_budget,
            sources=SOURCES[request.draft_mode],
            later_turn=request.turn > 0,
            undrafted_tokens=CANARY_TOKENS if is_canary else 0,
            prefix_tokens=prefix_tokens,
        )

    async def _stream(
        self,
        prompt: dict[str, Any],
        params: Any,
        call_id: str,
        response: ResponseBuilder,
        sampling: Sampling,
        *,
        adapter: Adapter | None,
        on_partial: PartialCallback | None,
        interval: int,
        on_tokens: TokensCallback | None,
    ) -> tuple[Any, VersionStarts]:
        """Append vLLM's tokens to *response*; return its last ``RequestOutput`` and the starts of weight versions."""
        output: Any = None
        starts: VersionStarts = []
        reported = len(response.token_ids)
        lora_request = None if adapter is None else adapter.lora_request
        async with aclosing(self._outputs(prompt, params, call_id, lora_request)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if adapter is None:
                    starts = self._weight_versions.starts(call_id, completion)
                else:
                    starts = [(adapter.version, 0)]
                if self._weight_versions.unusable:
                    self._check_usable(starts)
                with _naming_weights(starts):
                    response.append(completion)
                if sampling.returns_prompt_logprobs and response.prompt_logprobs is None:
                    # They are in the output with the first token.
                    with _naming_weights(starts):
                        response.prompt_logprobs = PromptLogprobs.from_vllm(
                            output.prompt_logprobs or (), prompt["prompt_token_ids"], sampling.top_prompt_logprobs
                        )
                    if response.prompt_logprobs is None and response.token_ids:
                        raise EngineError("vLLM returned a response without all log-probabilities of its prompt")
                ended = output.finished or response.stopped
                # vLLM returns the first token at once regardless of the interval. It is not worth a partial rollout.
                if on_partial is not None and not ended and len(response.token_ids) - reported >= interval:
                    reported = len(response.token_ids)
                    on_partial(response.partial(starts))
                if on_tokens is not None and not ended:
                    on_tokens(TokensSoFar(response, starts))
                if response.stopped and not output.finished:
                    if not sampling.routed_experts:
                        break  # which aborts it
                    await self._client.llm.abort(call_id)  # its last output has the routed experts
        if output is None or not (output.finished or response.stopped):
            raise EngineError("vLLM ended a response without returning all of it")
        return output, starts

    def _check_usable(self, starts: VersionStarts) -> None:
        """Check that the weights that have sampled a response can be used.

        Without log-probabilities, nothing else shows that its tokens mean nothing, and they would enter the history.

        Raises:
            UnusableOutputError: if they are known not to be finite.
        """
        # The full weights of an adapter do not change while it is used.
        for version in (self._weight_versions.version, *(version for version, _ in starts)):
            if (reason := self._weight_versions.unusable.get(version)) is not None:
                raise UnusableOutputError(f"weight version {version} cannot be used: {reason}")

    async def _outputs(self, prompt: dict[str, Any], params: Any, call_id: str, lora: Any) -> AsyncGenerator[Any]:
        with translate_errors("generating"):
            async with aclosing(self._client.llm.generate(prompt, params, call_id, lora_request=lora)) as outputs:
                with refusing_rejected_requests():
                    first = await anext(outputs, None)
                if first is not None:
                    yield first
                async for output in outputs:
                    yield output

    @contextmanager
    def _track(self, call_id: str, prefix_tokens: int, stop_event: asyncio.Event | None) -> Iterator[None]:
        """Record that vLLM has a call, and abort it once *stop_event* is set."""
        self._running[call_id] = prefix_tokens
        self._idle.clear()
        aborting = None if stop_event is None else asyncio.ensure_future(self._abort_when_set(stop_event, call_id))
        try:
            yield
        except BaseException:
            if self._config.drafting is not None:
                self._draft_counts.discard(call_id)
            raise
        finally:
            del self._running[call_id]
            if not self._running:
                self._idle.set()
            if aborting is not None and stop_event is not None and not stop_event.is_set():
                aborting.cancel()

    async def _abort_when_set(self, stop_event: asyncio.Event, call_id: str) -> None:
        await stop_event.wait()
        while call_id in self._running:
            await self._client.llm.abort(call_id)
            await asyncio.sleep(_ABORT_RETRY_INTERVAL_S)


@contextmanager
def _naming_weights(starts: VersionStarts) -> Iterator[None]:
    """Name the weight version in the error for log-probabilities that are not numbers.

    Args:
        starts: (weight version, index of its first token), in order.

    Raises:
        UnusableOutputError: there are such.
    """
    try:
        yield
    except NotFiniteError as error:
        version = starts[-1][0] if starts else None
        weights = "the weights" if version is None else f"weight version {version}"
        raise UnusableOutputError(
            f"{error}: {weights} must have values that are NaN or infinite, or so large that the model overflows, or "
            "this engine is faulty; publish other weights as a later version, or replace the engine if others do not "
            "fail"
        ) from error


def _placed(ranges: Sequence[Any], positions: Sequence[tuple[int, int]]) -> list[Any]:
    """Return where images are in a prompt that contains their tokens.

    Args:
        ranges: where they are in another prompt.
        positions: index of the first token, and number of tokens, of each image. Tokens that only surround those of an
            image may be left out.

    Raises:
        AdmissionError: an image has another number of tokens.
    """
    placed = []
    for number, (known, (offset, length)) in enumerate(zip(ranges, positions, strict=True)):
        if length not in (known.length, known.get_num_embeds()):
            raise AdmissionError(
                f"image_positions: image {number} has {known.get_num_embeds()} tokens, not {length}; prepare the "
                "prompt with the model's own processor and its settings"
            )
        placed.append(
            replace(known, offset=offset, length=length, is_embed=known.is_embed if length == known.length else None)
        )
    return placed


def _finish_reason(reason: str, sampling: Sampling, stop_event: asyncio.Event | None) -> FinishReason | None:
    """Translate vLLM's finish reason; None for a response that was stopped by *stop_event*."""
    if reason == "abort" and stop_event is not None and stop_event.is_set():
        return None
    if reason == "error" and sampling.structured_outputs:
        # vLLM compiles the grammar when it has accepted the request, and vllm_plugin limits the time of comparisons.
        raise AdmissionError(
            "vLLM cannot apply sampling.structuredOutputs with the tokens of this model, or takes too long for it; the "
            "log of the engine's worker has details"
        )
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise EngineError(f"vLLM ended a response unexpectedly: {reason}")
    return FinishReason(reason)


class DecodingPause:
    """Pauses decoding until a caller resumes it, and while weights are loaded."""

    def __init__(self, client: VllmClient, generator: ResponseGenerator) -> None:
        self._client, self._generator = client, generator
        self._is_held = False
        """Whether a caller has paused decoding."""
        self._is_loading = False

    async def hold(self, *, finish_running: bool) -> None:
        """See :meth:`Engine.pause`."""
        if not finish_running:
            await self._hold()
            return
        self._generator.pause_admission()
        try:
            await self._generator.wait_idle()
            await self._hold()
        finally:
            self._generator.resume_admission()

    async def _hold(self) -> None:
        self._is_held = True
        await self._client.call(self._client.llm.pause_generation(mode="keep", clear_cache=False))

    async def release(self) -> None:
        """See :meth:`Engine.resume`."""
        self._is_held = False
        if not self._is_loading:
            await self._client.call(self._client.llm.resume_generation())

    @asynccontextmanager
    async def while_loading(self, *, is_drained: bool, clear_cache: bool) -> AsyncIterator[None]:
        """Decode nothing within this context, which no two tasks may enter at a time.

        With *clear_cache*, keys and values are computed again, including those of running responses. *is_drained* says
        that vLLM has no response. What the model has computed of images is never used again.
        """
        llm = self._client.llm
        self._is_loading = True
        try:
            # Clearing the cache preempts running requests, so that their keys and values are computed again.
            mode = "wait" if is_drained and not self._is_held else "keep"
            await self._client.call(llm.pause_generation(mode=mode, clear_cache=clear_cache))
            try:
                yield
            finally:
                if not self._client.stopped and not clear_cache and llm.renderer.mm_processor is not None:
                    # The worker has dropped it when it loaded the weights, but the scheduler would rely on it.
                    await self._client.call(llm.reset_encoder_cache())
                if not self._client.stopped and not self._is_held:
                    await self._client.call(llm.resume_generation())
        finally:
            self._is_loading = False
