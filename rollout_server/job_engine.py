"""vLLM's engine client for a rollout job, so that vLLM's server can be used unchanged."""

from __future__ import annotations

import asyncio
from copy import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TextPrompt
from vllm.lora.request import LoRARequest
from vllm.renderers import TokenizeParams, renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from rollout_api.client.request_client import RequestClient
from rollout_server.body_check import text_is_too_long
from rollout_server.conversations import Conversations, PrefixSource
from rollout_server.engine_core import Group, JobEngineCore, client_trajectory, http_errors
from rollout_server.images import keep_sources, take_source
from rollout_server.request_context import PREFIX_HEADER, current_context
from rollout_worker.engine.vllm_client import model_end_tokens


class JobEngine(AsyncLLM):
    """vLLM's engine client, whose engine core is a rollout job.

    It differs from its base class in its construction, and in what it does to a request before it passes it on.

    Args:
        vllm_config: the server's configuration.
        client: connection to the job.
        reported_draft_length: maximum number of tokens of a draft, if responses have metrics of their drafts.
        engines_find_reasoning: whether the job's engines apply structured outputs to what follows the reasoning.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        client: RequestClient,
        reported_draft_length: int | None = None,
        *,
        engines_find_reasoning: bool,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.scheduler_config = vllm_config.scheduler_config
        self.observability_config = vllm_config.observability_config
        self.log_requests = self.log_stats = False
        self.renderer = renderer_from_config(vllm_config)
        self.max_prompt_characters = vllm_config.model_config.max_model_len * self.renderer.tokenizer.max_chars_per_token
        """Number of characters above which a text has more tokens than a prompt may have."""
        self._limit_texts()
        keep_sources(self.renderer, client)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.admission_stats = self.logger_manager = self.profiler = None
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False, stream_interval=1)
        self._elastic_ep_lock, self._profile_lock = asyncio.Lock(), asyncio.Lock()
        self._client, self._job_defaults = client, client.job.sampling
        self.end_tokens = model_end_tokens(self)
        """Tokens that end a response of the model."""
        self.conversations = Conversations(client, self.end_tokens)
        """The conversations of the job."""
        self.engine_core: Any = JobEngineCore(
            client, self.output_processor, reported_draft_length, engines_find_reasoning=engines_find_reasoning
        )
        self.output_handler: asyncio.Task[None] | None = None

    def _limit_texts(self) -> None:
        """Let the renderer refuse texts that no prompt can have, which vLLM tokenizes for ``/tokenize`` or to cut them.

        A template may have made a text longer than the messages are.
        """
        tokenize = self.renderer._tokenize_prompt_async

        async def tokenize_if_short(prompt: Any, params: TokenizeParams) -> Any:
            if (length := len(prompt["prompt"])) > self.max_prompt_characters:
                raise VLLMValidationError(text_is_too_long(length, self.max_prompt_characters), parameter="prompt")
            return await tokenize(prompt, params)

        self.renderer._tokenize_prompt_async = tokenize_if_short

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a prompt, which a thread makes of its text.

        Raises:
            VLLMValidationError: the prompt is too long.
        """
        params = TokenizeParams(max_total_tokens=self.model_config.max_model_len)
        tokenized = await self.renderer.tokenize_prompt_async(TextPrompt(prompt=text), params)
        return list(tokenized["prompt_token_ids"])

    def __del__(self) -> None:
        """Do nothing: whoever has created the engine calls :meth:`shutdown`."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel all requests, and end the threads that encode prompts."""
        self.engine_core.shutdown()
        self.renderer.shutdown()
        if self.output_handler is not None:
            self.output_handler.cancel()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Do nothing: the job's engines have loaded every adapter that has a name."""
        return True

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        """See the base class.

        Settings that the client has not set become the job's, and the tokens of earlier turns of a conversation become
        those that were sampled. The samples of a prompt are passed on as one group.
        """
        params = self._with_job_defaults(params)
        group = Group(params)
        context = current_context()
        group.source = await take_source(prompt, self._client)
        conversation = context.conversation
        if group.source is not None:
            if conversation is not None:  # its images are not part of it
                context.report(PREFIX_HEADER, PrefixSource.UNKNOWN)
        elif conversation is not None and isinstance(prompt, dict) and (tokens := prompt.get("prompt_token_ids")):
            conversation.token_ids = group.client_tokens = tokens
            conversation.trajectory_id = client_trajectory(params, context, kwargs.get("session_id"))
            with http_errors():
                source = await self.conversations.find(conversation)
            continuation = conversation.continuation
            if continuation is not None:
                room = self.model_config.max_model_len - len(continuation.token_ids)
                if params.max_tokens is not None and room < params.max_tokens // 2:
                    # The client knows nothing of reasoning that its messages lack, and expects room for a response.
                    conversation.continuation, source = None, PrefixSource.UNKNOWN
                else:
                    prompt = {**prompt, "prompt_token_ids": continuation.token_ids}
                    if params.max_tokens is not None:
                        params.max_tokens = min(params.max_tokens, room)
            context.report(PREFIX_HEADER, source)
        with self.engine_core.group(group):
            outputs = await super().add_request(request_id, prompt, params, *args, **kwargs)
        if group.source is not None:
            prompt["mm_kwargs"] = {}  # vLLM's server would keep what is large until the response has ended
        return outputs

    def _with_job_defaults(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters, with the job's settings in place of those that have vLLM's defaults.

        vLLM's server has already applied those that it has defaults for, such as the temperature.
        """
        defaults = self._job_defaults
        params = params.clone()
        for name in ("presence_penalty", "frequency_penalty", "min_tokens"):
            if not getattr(params, name):
                setattr(params, name, defaults[name])
        params.ignore_eos = params.ignore_eos or defaults["ignore_eos"]
        for name in ("allowed_token_ids", "logit_bias"):
            if not getattr(params, name) and defaults[name]:
                setattr(params, name, copy(defaults[name]))
        if not params.stop and defaults["stop"]:
            params.stop = list(defaults["stop"])
            if not params.include_stop_str_in_output:
                params.output_text_buffer_length = max(map(len, params.stop)) - 1
        if not params.stop_token_ids and defaults["stop_token_ids"]:
            params.stop_token_ids = list(defaults["stop_token_ids"])
            params.all_stop_token_ids.update(params.stop_token_ids)
        return params
