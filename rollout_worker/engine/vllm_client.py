"""Calls to vLLM's processes from the host process, and what is read from an ``AsyncLLM`` there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_store.job.engine_errors import EngineError, translate_errors

_LIVENESS_CHECK_INTERVAL_S = 0.5
"""Seconds between two checks that vLLM's core process is alive, while a call to it is waited for."""
_Reply = TypeVar("_Reply")


class VllmClient:
    """Owns one ``AsyncLLM``, checks that its core process is alive, and shuts it down."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def llm(self) -> Any:
        """The ``AsyncLLM``.

        Raises:
            EngineError: if the engine was stopped.
        """
        if self._llm is None:
            raise EngineError("the engine is stopped; start another one")
        return self._llm

    @property
    def stopped(self) -> bool:
        """Whether vLLM was shut down or has died."""
        return self._llm is None or self._llm.errored

    async def call(self, call: Coroutine[Any, Any, _Reply]) -> _Reply:
        """Wait for vLLM's reply.

        Raises:
            EngineError: if the core process has died; vLLM itself would then never reply to a call in progress.
        """
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((task,), timeout=_LIVENESS_CHECK_INTERVAL_S))[0]:
                if self.stopped:
                    raise EngineError("vLLM's core process has died")
            return task.result()
        finally:
            task.cancel()

    async def collective_rpc(self, method: str, *args: Any, action: str) -> list[Any]:
        """Call a method of the worker extension on all ranks, and return their replies in the order of ranks.

        Args:
            method: name of the method.
            args: its arguments.
            action: what it does, for the message of an error, such as "loading weights".

        Raises:
            EngineError: if the method fails on any rank.
        """
        with translate_errors(action):
            replies: list[Any] = await self.call(self.llm.collective_rpc(method, args=args))
        return replies

    def close(self) -> None:
        """Stop vLLM's processes."""
        if self._llm is not None:
            self._llm.shutdown()
            # Its finalizer would shut it down again, and at interpreter exit fail on modules that no longer exist.
            self._llm.shutdown = _do_nothing
            self._llm = None


class WeightVersionTracker:
    """Determines which weight versions have sampled the tokens of one ``AsyncLLM``.

    vLLM (seen in 0.32) labels the tokens of each step, but returns the labels of finished responses only. Those of
    running responses are read from its output processor.
    """

    def __init__(self, llm: Any, version: int) -> None:
        self.version = version
        """Version of the tokens that are sampled now."""
        self._llm = llm

    async def change(self, version: int) -> None:
        """Label all tokens from now on with *version*. Call it only while nothing is decoded."""
        await self._llm.update_weight_version(str(version))
        self.version = version

    def starts(self, call_id: str, completion: Any) -> list[tuple[int, int]]:
        """Return (version, index of its first token), in order, for a response.

        Args:
            call_id: id of the call.
            completion: vLLM's ``CompletionOutput`` of the response.
        """
        if completion.weight_versions is not None:
            return [(int(span.version), span.start) for span in completion.weight_versions]
        processor = self._llm.output_processor
        internal_ids = processor.external_req_ids.get(call_id)
        state = processor.request_states.get(internal_ids[0]) if internal_ids else None
        return [(int(label), start) for label, start in state.weight_version_starts] if state is not None else []


def ignore_failure(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a background task as handled.

    It means that the engine has died or was stopped, which other calls report.
    """
    if not future.cancelled():
        future.exception()


def model_end_tokens(llm: Any) -> frozenset[int]:
    """Return the tokens that end responses of an ``AsyncLLM``'s model."""
    from vllm import SamplingParams

    params = SamplingParams()
    params.update_from_generation_config(
        llm.model_config.try_get_generation_config(), getattr(llm.get_tokenizer(), "eos_token_id", None)
    )
    return frozenset(params.all_stop_token_ids)


def num_output_tokens(llm: Any, request_id: str) -> int:
    """Return how many tokens of a response vLLM's frontend process has received, whether or not it has returned them.

    The result is 0 for a request that it does not have.
    """
    processor = llm.output_processor
    states = [processor.request_states.get(internal) for internal in processor.external_req_ids.get(request_id, ())]
    return sum(state.detokenizer.num_output_tokens() for state in states if state is not None)


def own_address() -> str:
    """Return the address that other machines reach this one at."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def _do_nothing() -> None:
    pass
