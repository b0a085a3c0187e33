"""Calls to vLLM's processes from the host process, and what is read from an ``AsyncLLM`` there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollout_store.job.admission_rules import AdmissionError
from rollout_store.job.engines import EngineError

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

        *action* says for errors what it does, such as "loading weights".

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
            self._llm.shutdown = lambda: None
            self._llm = None


class WeightVersionTracker:
    """Determines which weight versions have sampled the tokens of one ``AsyncLLM``.

    vLLM (seen in 0.32) labels the tokens of each step, but returns the labels of finished responses only. Those of
    running responses are read from its output processor.
    """

    def __init__(self, llm: Any, version: int) -> None:
        self.version = version
        """Version of the tokens that are sampled now."""
        self.unusable: dict[int, str] = {}
        """Versions that are served although their weights are not finite → why."""
        self._llm = llm

    async def change(self, version: int) -> None:
        """Label all tokens from now on with *version*. Call it only while nothing is decoded."""
        await self._llm.update_weight_version(str(version))
        self.version = version

    def starts(self, call_id: str, completion: Any) -> list[tuple[int, int]]:
        """Return (version, index of its first token), in order, for a response."""
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


@contextmanager
def translate_errors(action: str) -> Iterator[None]:
    """Raise vLLM's errors, some of which are plain ``Exception``, as :class:`EngineError`.

    *action* names what fails, such as "generating".
    """
    try:
        yield
    except (EngineError, AdmissionError):
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed while {action}: {error or type(error).__name__}; the log of the engine's worker has details"
        ) from error


@contextmanager
def refusing_rejected_requests() -> Iterator[None]:
    """Raise the errors with which vLLM rejects a request as :class:`AdmissionError`."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (ValueError, VLLMClientError) as error:
        raise AdmissionError(f"vLLM rejects the request: {error}") from error


@dataclass(eq=False)
class Adapter:
    """An adapter that vLLM has loaded."""

    lora_request: Any
    """vLLM's ``LoRARequest``."""
    version: int
    """The weight version of the full weights together with this adapter."""
    num_users: int = 0
    """Number of responses that are being generated with it."""


class Adapters:
    """The adapters of one ``AsyncLLM``. An adapter is removed when no response uses it any more."""

    def __init__(self, llm: Any) -> None:
        self.current: Adapter | None = None
        """The adapter that generates new responses; None for the full weights alone."""
        self._llm = llm
        self._ids = itertools.count(1)
        self._loaded: list[Adapter] = []
        self._unused = asyncio.Event()
        self._unused.set()
        self._removals: set[asyncio.Task[Any]] = set()

    async def load(self, directory: Path, version: int) -> None:
        """Generate new responses with the adapter in *directory*. If vLLM fails to load it, nothing changes."""
        from vllm.lora.request import LoRARequest

        number = next(self._ids)
        adapter = Adapter(LoRARequest(f"{version}-{number}", number, str(directory)), version)
        await self._llm.add_lora(adapter.lora_request)
        self._loaded.append(adapter)
        self.current = adapter
        self._remove_unused()

    @contextmanager
    def use(self) -> Iterator[Adapter | None]:
        """Keep the current adapter, if there is one, while a response is generated with it."""
        adapter = self.current
        if adapter is None:
            yield None
            return
        adapter.num_users += 1
        self._unused.clear()
        try:
            yield adapter
        finally:
            adapter.num_users -= 1
            if not any(adapter.num_users for adapter in self._loaded):
                self._unused.set()
            self._remove_unused()

    async def wait_unused(self) -> None:
        """Wait until no response is generated with any adapter."""
        await self._unused.wait()

    def deactivate(self) -> None:
        """Generate new responses with the full weights alone."""
        self.current = None
        self._remove_unused()

    def _remove_unused(self) -> None:
        for adapter in [loaded for loaded in self._loaded if not loaded.num_users and loaded is not self.current]:
            self._loaded.remove(adapter)
            removal = asyncio.ensure_future(self._llm.remove_lora(adapter.lora_request.lora_int_id))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            removal.add_done_callback(ignore_failure)
