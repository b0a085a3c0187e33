"""One vLLM engine in a process of its own, and what a job asks of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollout_api.job import Engine as EngineSpec
from rollout_api.messages import FinishReason, RolloutRequest
from rollout_api.quantity import parse_quantity
from rollout_worker.engine.compat import EngineError, engine_args
from rollout_worker.engine.metrics import EngineCounters
from rollout_worker.engine.model_source import max_positions
from rollout_worker.engine.sampling import DraftScope, admit, vllm_sampling
from rollout_worker.engine.worker_extension import HistoryBinding

_CPU_KV_CACHE_BYTES = 1 << 30

CPU_BASE_TOKENS = 24.0
"""``c_base / c_tok`` on two CPU cores: 2.5 ms a step at batch 1 and 5.6 ms at 32 with 3M parameters; 14 with 267M."""
GPU_BASE_TOKENS = 300.0
"""``c_base / c_tok`` of a 7B model on an H100-class GPU: 8 ms and 0.026 ms (DAS, arXiv 2511.13841)."""


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts."""

    max_draft_tokens: int
    base_tokens: float
    """What a step costs before its first token, in tokens; see ``drafting.drafter.break_even``."""
    history: HistoryBinding


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with."""

    model: Path
    spec: EngineSpec
    cpu: bool
    """Decode on the CPU."""
    cores: int = 1
    """CPU cores that a CPU engine computes with."""
    drafting: Drafting | None = None
    """None: plain vLLM, with no speculation configured."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments."""


@dataclass(frozen=True)
class Generated:
    """One response as it came out of the engine."""

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: FinishReason
    weight_version: int
    drafted: int
    accepted: int
    started: float
    """``time.monotonic()`` when the engine was asked."""
    finished: float


class Engine:
    """A running engine. Made by :meth:`start`, ended by :meth:`close`; used from one asyncio loop."""

    def __init__(self, llm: Any, config: EngineConfig, counters: EngineCounters) -> None:
        self.counters = counters
        self.config = config
        self.weight_version = 0
        self._llm = llm
        self._calls = itertools.count()
        self._ended: list[str] = []
        self._counts: asyncio.Task[dict[str, tuple[int, int, int]]] | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Load the model and be ready to generate.

        Raises:
            EngineError: if vLLM does not start; the cause is in the text and vLLM's own log.
        """
        _set_environment(config)
        from vllm.v1.engine.async_llm import AsyncLLM

        counters = EngineCounters()
        try:
            # in a thread: it blocks for as long as the model takes to load
            llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args,
                engine_args(_vllm_settings(config)),
                stat_loggers=[counters.as_stat_logger()],
            )
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            raise EngineError(f"vLLM does not start with {config.model}: {error}") from error
        engine = cls(llm, config, counters)
        try:
            await engine._rpc("das_follow_host", os.getpid())
            if (drafting := config.drafting) is not None:
                bound = await engine._rpc("das_bind", asdict(drafting.history), drafting.base_tokens)
                if not any(bound):
                    raise EngineError("no rank of the engine drafts: vLLM has no output rank")
        except BaseException:
            engine.close()
            raise
        return engine

    async def generate(
        self,
        request: RolloutRequest,
        sample: int,
        *,
        sources: Sequence[str] = ("history", "self"),
    ) -> Generated:
        """Sample response number *sample* of a request.

        Args:
            request: what to sample.
            sample: which of its ``sampling.n``.
            sources: what may be drafted from.

        Raises:
            AdmissionError: if this engine cannot serve the request as it stands.
            EngineError: if the engine died.
        """
        speculating = self.config.drafting is not None
        admit(
            request.sampling,
            len(request.prompt_token_ids),
            max_model_len=self.config.spec.max_model_len,
            speculating=speculating,
        )
        rollout_id = str(request.rollout_id(sample))
        # vLLM's name for the call differs each time: the same rollout may be asked for again
        call = f"{rollout_id}#{next(self._calls)}"
        scope = None
        if speculating:
            scope = DraftScope(
                key=call,
                problem=request.problem_id,
                max_tokens=request.sampling.max_tokens,
                min_tokens=request.sampling.min_tokens,
                budget=request.draft_budget,
                sources=sources,
            )
        # without the job's uid: the same manifest with the same seed repeats itself in a job of its own
        params = vllm_sampling(request.sampling, f"{request.request_id}/{sample}", scope)
        started, output = time.monotonic(), None
        with _engine_errors("generating"):
            async for part in self._llm.generate({"prompt_token_ids": request.prompt_token_ids}, params, call):
                output = part
        finished = time.monotonic()
        if output is None or not output.finished:
            raise EngineError(f"vLLM returned nothing for {rollout_id}")
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        drafted = accepted = 0
        if speculating:
            drafted, accepted, produced = await self._take_counts(call)
            # vLLM cuts what a step had accepted beyond the end of the response
            accepted -= max(0, produced - len(tokens))
        logprobs = None
        if request.sampling.logprobs:
            logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        return Generated(
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=FinishReason(completion.finish_reason),
            weight_version=self.weight_version,
            drafted=drafted,
            accepted=accepted,
            started=started,
            finished=finished,
        )

    async def load_weights(self, directory: Path, weight_version: int) -> float:
        """Replace the weights, after running requests have ended; the prefix cache is cleared.

        Args:
            directory: safetensors of the same shape as the model's.
            weight_version: what responses are marked with from now on.

        Returns:
            Seconds during which the engine stood still.
        """
        started = time.monotonic()
        with _engine_errors(f"loading weights from {directory}"):
            await self._llm.pause_generation(mode="wait")
            try:
                await self._rpc("das_load_weights", str(directory))
                await self.clear_prefix_cache()
                self.weight_version = weight_version
            finally:
                await self._llm.resume_generation()
        return time.monotonic() - started

    async def clear_prefix_cache(self) -> None:
        """Forget the keys and values of prompts that were read before; only while nothing is running.

        Raises:
            EngineError: if vLLM keeps them.
        """
        with _engine_errors("clearing the prefix cache"):
            if not await self._llm.reset_prefix_cache():
                raise EngineError("vLLM did not clear its prefix cache, which would mix the keys of two policies")

    async def announce(self, problems: Sequence[str], generation: int, *, wait: float = 0.0) -> bool:
        """Say which problems come next, so that their history is fetched in the background.

        Args:
            problems: problem ids.
            generation: the newest generation of the history.
            wait: seconds to wait, at most, until all of it can be drafted from.

        Returns:
            Whether it can.
        """
        if self.config.drafting is None:
            return True
        await self._rpc("das_announce", list(problems), generation)
        deadline = time.monotonic() + wait
        while not (ready := all(await self._rpc("das_ready"))) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return ready

    async def stats(self) -> dict[str, Any]:
        """Sizes and times of the drafter (see ``DraftingExtension.das_stats``); empty for a plain engine."""
        if self.config.drafting is None:
            return {}
        ranks = await self._rpc("das_stats")
        return next((rank for rank in ranks if rank), {})

    def close(self) -> None:
        """Stop the engine's processes."""
        if self._llm is not None:
            self._llm.shutdown()
            # its finaliser shuts down again, and at the interpreter's exit fails over what is gone by then
            self._llm.shutdown = _nothing
            self._llm = None

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        with _engine_errors(method.removeprefix("das_").replace("_", " ")):
            replies: list[Any] = await self._llm.collective_rpc(method, args=args)
        return replies

    async def _take_counts(self, call: str) -> tuple[int, int, int]:
        """Drafted, accepted and produced tokens of an ended call; calls that end together share one round trip."""
        self._ended.append(call)
        if self._counts is None:
            self._counts = asyncio.ensure_future(self._fetch_counts())
        counts = await asyncio.shield(self._counts)
        return counts.get(call, (0, 0, 0))

    async def _fetch_counts(self) -> dict[str, tuple[int, int, int]]:
        await asyncio.sleep(0)  # until the others that ended in this step are in the list
        ended, self._ended, self._counts = self._ended, [], None
        merged: dict[str, tuple[int, int, int]] = {}
        for rank in await self._rpc("das_take_counts", ended):
            merged.update(rank)
        return merged


@contextmanager
def _engine_errors(doing: str) -> Iterator[None]:
    """Say in one kind of error what vLLM says in several, bare ``Exception`` among them."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed while {doing}: {error or type(error).__name__}; its log above says more"
        ) from error


def _nothing() -> None:
    pass


def _set_environment(config: EngineConfig) -> None:
    """Settings that vLLM reads from the environment only; what a user has set stays."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # vLLM's own use of torch, and the shared memory of its processes, which it kills if they take long to end
    os.environ.setdefault(
        "PYTHONWARNINGS", "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker"
    )
    if config.cpu:
        # more threads than free cores make a step many times slower
        os.environ.setdefault("OMP_NUM_THREADS", str(config.cores))


def _vllm_settings(config: EngineConfig) -> dict[str, Any]:
    spec = config.spec
    settings: dict[str, Any] = {
        "model": str(config.model),
        "load_format": "safetensors",
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "enforce_eager": spec.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "rollout_worker.engine.worker_extension.HostExtension",
    }
    if spec.kv_cache_memory is not None:
        settings["kv_cache_memory_bytes"] = int(parse_quantity(spec.kv_cache_memory))
    elif config.cpu:
        settings["kv_cache_memory_bytes"] = _CPU_KV_CACHE_BYTES
    if config.drafting is not None:
        drafts = config.drafting.max_draft_tokens
        settings["speculative_config"] = {
            "method": "custom_class",
            "model": "rollout_worker.engine.proposer.HistoryProposer",
            "num_speculative_tokens": drafts,
        }
        settings["worker_extension_cls"] = "rollout_worker.engine.worker_extension.DraftingExtension"
        # Within max_draft_tokens of max_model_len vLLM replaces the drafts of the whole batch by dummies, so the
        # limit is put out of reach of any admitted request. No position beyond the model's own is ever computed.
        settings["max_model_len"] += drafts
        positions = max_positions(config.model)
        if positions is not None and settings["max_model_len"] > positions >= spec.max_model_len:
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    return settings | config.overrides
