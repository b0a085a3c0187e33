"""One vLLM engine in a process of its own, and what a job asks of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.spec import Engine as EngineSpec
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Drafts, FinishReason, Partial, RolloutRequest, UpdateMode
from rollout_worker.engine.adapters import BATCH_ADAPTERS, KEPT_ADAPTERS, Adapters, unheeded
from rollout_worker.engine.compat import EngineError, WeightLabels, end_tokens, engine_args, lora_rank
from rollout_worker.engine.drafting import Drafting
from rollout_worker.engine.metrics import EngineCounters
from rollout_worker.engine.model_source import ModelError, max_positions
from rollout_worker.engine.response import Generated, Response
from rollout_worker.engine.sampling import SOURCES, AdmissionError, DraftScope, admit, vllm_sampling
from rollout_worker.engine.weights import Incoming, check_incoming, check_weights
from rollout_worker.policy.canary import CANARY_TOKENS, canary_of

__all__ = ["Drafting", "Engine", "EngineConfig", "Generated"]

_Reply = TypeVar("_Reply")

_CPU_KV_CACHE_BYTES = 1 << 30
_ABORT_SECONDS = 0.02
"""How long an abort may take before it is asked for again."""
_LOOK_S = 0.5
"""How often to look whether vLLM is still there, while it is waited for."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with."""

    model: Path
    spec: EngineSpec
    cpu: bool
    """Decode on the CPU."""
    weight_version: int = 0
    """What the weights in *model* are called."""
    cores: int = 1
    """CPU cores that a CPU engine computes with."""
    drafting: Drafting | None = None
    """None: plain vLLM, with no speculation configured."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments."""

    @property
    def broadcast_backend(self) -> str:
        """How such an engine takes weights from a trainer's memory."""
        return "gloo" if self.cpu else "nccl"

    @property
    def ranks(self) -> int:
        """Worker processes of the engine."""
        return self.spec.gpus


@dataclass(frozen=True)
class _NewWeights:
    """Weights that are to take the place of those there are."""

    method: str
    """Of ``HostExtension``: how they come."""
    source: Any
    """Its argument."""
    version: int
    mode: UpdateMode
    directory: Path | None = None
    """Where they lie; None if they are broadcast."""


class Engine:
    """A running engine. Made by :meth:`start`, ended by :meth:`close`; used from one asyncio loop."""

    def __init__(self, llm: Any, config: EngineConfig, counters: EngineCounters) -> None:
        self.counters = counters
        self.config = config
        self._llm = llm
        self._calls = itertools.count()
        self._labels = WeightLabels(llm, config.weight_version)
        self._ends = end_tokens(llm)
        self._directory: Path | None = config.model
        """Where the weights in place lie; None if they were broadcast."""
        self._updating = asyncio.Lock()
        self._kept = 0
        self._adapters = Adapters(llm)
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_end = 0.0
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
            await engine._labels.change(config.weight_version)
            if config.cpu and config.spec.max_lora_rank:
                await engine._rpc("das_mend_adapters")
            if config.drafting is not None and not any(await engine._rpc("das_bind", asdict(config.drafting))):
                raise EngineError("no rank of the engine drafts: vLLM has no output rank")
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def _vllm(self) -> Any:
        if self._llm is None:
            raise EngineError("the engine is stopped; start another")
        return self._llm

    @property
    def full_version(self) -> int:
        """The version of the full weights in place, whatever adapter is on top of them."""
        return self._labels.version

    @property
    def weight_version(self) -> int:
        """The version that responses which begin now are sampled from."""
        return self._labels.version if self._adapters.current is None else self._adapters.current.version

    async def generate(
        self,
        request: RolloutRequest,
        sample: int,
        *,
        prefix: Partial | None = None,
        on_partial: Callable[[Partial], None] | None = None,
        every: int = 0,
        until: asyncio.Event | None = None,
    ) -> Generated:
        """Sample response number *sample* of a request. Cancelling it aborts the response.

        Args:
            request: what to sample.
            sample: which of its ``sampling.n``.
            prefix: the model's own tokens to go on from, instead of the request's; see ``sampling.can_continue``.
            on_partial: called with all of the response so far once there are new tokens, at most *every* of them.
                Of an engine that is killed, no more is lost than so many and those of one verification step.
            every: see *on_partial*; 0: never.
            until: once it is set, the response ends, and what there is of it is returned.

        Raises:
            AdmissionError: if this engine cannot serve the request as it stands.
            EngineError: if the engine died.
        """
        sampling, drafting = request.sampling, self.config.drafting
        prefix = request.prefix if prefix is None else prefix
        admit(
            sampling,
            len(request.prompt_token_ids),
            max_model_len=self.config.spec.max_model_len,
            speculating=drafting is not None,
            prefix=prefix,
        )
        started = time.monotonic()
        await self._admitting.wait()
        response = Response(prefix, logprobs=sampling.logprobs)
        known = len(response.token_ids)
        reason = self._end_of(response, sampling)
        if reason is not None or (until is not None and until.is_set()):
            return response.ended(reason, [], started=started, finished=started)
        # vLLM's name for the call differs each time: the same rollout may be asked for again
        call = f"{request.rollout_id(sample)}#{next(self._calls)}"
        scope = None
        if drafting is not None:
            scope = DraftScope(
                key=call,
                problem=request.problem,
                max_tokens=sampling.max_tokens,
                min_tokens=sampling.min_tokens,
                budget=0 if request.drafts is Drafts.OFF else request.draft_budget,
                sources=SOURCES[request.drafts],
                later_turn=request.turn > 0,
                undrafted=CANARY_TOKENS if canary_of(request.request_id, sampling.n) == sample else 0,
                prefix=known,
            )
        # a step may bring a whole draft and one token more, with which there must not be more than *every*
        interval = max(1, every - 1 - (drafting.max_draft_tokens if drafting is not None else 0)) if every else 0
        # without the job's uid: the same manifest with the same seed repeats itself in a job of its own
        try:
            params = vllm_sampling(sampling, f"{request.request_id}/{sample}", scope, prefix=known, interval=interval)
        except ValueError as error:
            raise AdmissionError(f"vLLM refuses it: {error}") from error
        prompt = {"prompt_token_ids": request.prompt_token_ids + response.token_ids, "cache_salt": str(self._kept)}
        output: Any = None
        with self._adapters.use() as adapter, self._running_as(call, until), _engine_errors("generating"):
            lora = None if adapter is None else adapter.request
            async with aclosing(self._outputs(prompt, params, call, lora)) as outputs:
                async for output in outputs:
                    response.extend(output.outputs[0])
                    starts = self._labels.starts(call, output.outputs[0]) if adapter is None else [(adapter.version, 0)]
                    # the first token comes at once, and is not worth a partial
                    if on_partial is not None and not output.finished and len(response.token_ids) - known >= interval:
                        known = len(response.token_ids)
                        on_partial(response.partial(starts))
            finished = self._last_end = time.monotonic()
            if output is None or not output.finished:
                raise EngineError("it returned nothing")
            counts = (0, 0)
            if drafting is not None:
                drafted, accepted, produced = (await asyncio.shield(self._counts_of(call))).get(call, (0, 0, 0))
                # vLLM cuts what a step had accepted beyond the end of the response
                counts = (drafted, max(0, accepted - max(0, produced - len(response.token_ids))))
            return response.ended(
                _reason(output.outputs[0].finish_reason, until),
                starts,
                started=started,
                finished=finished,
                drafted=counts[0],
                accepted=counts[1],
                cached_tokens=output.num_cached_tokens or 0,
            )

    async def _outputs(self, prompt: Any, params: Any, call: str, lora: Any) -> AsyncGenerator[Any]:
        begun = False
        async with aclosing(self._vllm.generate(prompt, params, call, lora_request=lora)) as outputs:
            try:
                async for output in outputs:
                    begun = True
                    yield output
            except ValueError as error:
                if begun:
                    raise
                raise AdmissionError(f"vLLM refuses it: {error}") from error

    async def load_weights(self, directory: Path, weight_version: int, mode: UpdateMode = UpdateMode.DRAIN) -> float:
        """Replace the weights. Once begun it is not cancelled; if it fails, those before stay.

        Args:
            directory: safetensors of the same names, shapes and types as the model's.
            weight_version: what they are called.
            mode: what becomes of responses that are running. With DRAIN, and where they are of an adapter, which other
                weights do not fit, all that vLLM has end first, begun or not; new ones wait meanwhile. Otherwise those
                not begun start with the new weights (with KEEP, some on a cached prompt of the old).

        Returns:
            Seconds during which nothing was decoded.

        Raises:
            EngineError: if they are no weights of this model, or vLLM fails to load them; the text says which version
                the engine goes on with.
        """
        try:
            await asyncio.to_thread(check_weights, directory, self.config.model)
        except ModelError as error:
            raise EngineError(f"{error}; the engine goes on with version {self.weight_version}") from None
        new = _NewWeights("das_load_weights", str(directory), weight_version, mode, directory)
        return await asyncio.shield(self._replace_weights(new))

    async def receive_weights(self, incoming: Incoming, weight_version: int, mode: UpdateMode) -> float:
        """Replace the weights by those that a trainer broadcasts, as :meth:`load_weights` does by a directory's.

        If that fails half-way the engine puts back what it had last from a directory; if it had its weights from a
        broadcast, it stops.
        """
        try:
            await asyncio.to_thread(check_incoming, incoming, self.config.model)
        except ModelError as error:
            raise EngineError(f"{error}; the engine goes on with version {self.weight_version}") from None
        try:
            await self._rpc("das_join", asdict(incoming))
        except EngineError as error:
            raise EngineError(f"{error}; the engine goes on with version {self.weight_version}") from error
        new = _NewWeights("das_receive_weights", asdict(incoming), weight_version, mode)
        return await asyncio.shield(self._replace_weights(new))

    async def load_adapter(self, directory: Path, weight_version: int) -> float:
        """Generate new responses with a LoRA adapter, until the next or full weights; running ones stay with theirs.

        Args:
            directory: the adapter, as PEFT saves it, of a rank of at most ``engine.maxLoraRank``.
            weight_version: what the full weights in place are called together with it.

        Returns:
            Seconds that loading it took, in which nothing was decoded.

        Raises:
            EngineError: if vLLM cannot load it; the text says which version the engine goes on with.
        """
        if not self.config.spec.max_lora_rank:
            raise EngineError("adapters are not served: engine.maxLoraRank is 0")
        async with self._updating:
            started = time.monotonic()
            try:
                with _engine_errors(f"loading the adapter {directory}"):
                    await self._answer(self._adapters.load(directory, weight_version))
            except EngineError as error:
                raise EngineError(f"{error}; the engine goes on with version {self.weight_version}") from error
            return time.monotonic() - started

    async def _replace_weights(self, new: _NewWeights) -> float:
        async with self._updating:
            if self._adapters.current is not None or new.mode is UpdateMode.DRAIN:
                self._admitting.clear()
            try:
                await self._adapters.unused()
                if new.mode is UpdateMode.DRAIN:
                    # vLLM's own wait leaves out what it has preempted
                    await self._idle.wait()
                return await self._pause_and_load(new)
            finally:
                self._admitting.set()

    async def _pause_and_load(self, new: _NewWeights) -> float:
        asked = time.monotonic()
        with _engine_errors(f"loading weights from {new.directory or 'a broadcast'}"):
            # clearing the cache preempts what is running, whose keys and values are then computed anew
            how = "wait" if new.mode is UpdateMode.DRAIN else "keep"
            await self._answer(
                self._vllm.pause_generation(mode=how, clear_cache=new.mode is not UpdateMode.KEEP),
            )
            try:
                await self._load_or_put_back(new)
                await self._labels.change(new.version)
                self._adapters.leave()
                # vLLM clears no blocks while some are in use: requests to come are told apart from those before
                self._kept += new.mode is UpdateMode.KEEP
            finally:
                if self._llm is not None:
                    await self._answer(self._llm.resume_generation())
        return time.monotonic() - (max(asked, self._last_end) if new.mode is UpdateMode.DRAIN else asked)

    async def _load_or_put_back(self, new: _NewWeights) -> None:
        try:
            await self._rpc(new.method, new.source)
        except EngineError as error:
            try:
                if self._directory is None:
                    raise EngineError("they were broadcast, and lie nowhere") from error
                await self._rpc("das_load_weights", str(self._directory))
            except EngineError as again:
                self.close()
                raise EngineError(f"{error}; and those before could not be put back: the engine is stopped") from again
            raise EngineError(f"{error}; the engine goes on with version {self.weight_version}") from error
        self._directory = new.directory

    async def announce(
        self, problems: Sequence[str], generation: int, *, wanted: Sequence[str] | None = None, wait: float = 0.0
    ) -> bool:
        """Say which problems come next, so that their history is fetched in the background.

        Args:
            problems: problem ids.
            generation: the newest generation of the history.
            wanted: those of *problems* whose rollouts are about to start; default: all.
            wait: seconds to wait, at most, until all of it can be drafted from.

        Returns:
            Whether it can.
        """
        if self.config.drafting is None:
            return True
        await self._rpc("das_announce", list(problems), generation, None if wanted is None else list(wanted))
        deadline = time.monotonic() + wait
        while not (ready := all(await self._rpc("das_ready"))) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return ready

    async def tell_waiting(self, rollouts: int, tokens: float) -> None:
        """Say what waits for a place in this engine's batch: who holds the batch up depends on it.

        Args:
            rollouts: how many.
            tokens: that they will say, all together, as far as is known.
        """
        if self.config.drafting is not None:
            await self._rpc("das_waiting", rollouts, tokens)

    async def stats(self) -> dict[str, Any]:
        """Sizes and times of the drafter (see ``das_stats`` of the extensions); empty for a plain engine."""
        ranks = await self._rpc("das_stats")
        return next((rank for rank in ranks if rank), {})

    @property
    def stopped(self) -> bool:
        """Whether it serves no more: it was closed, could load neither new weights nor old ones, or has died."""
        return self._llm is None or self._llm.errored

    def close(self) -> None:
        """Stop the engine's processes."""
        if self._llm is not None:
            self._llm.shutdown()
            # its finaliser shuts down again, and at the interpreter's exit fails over what is gone by then
            self._llm.shutdown = _nothing
            self._llm = None

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        with _engine_errors(method.removeprefix("das_").replace("_", " ")):
            replies: list[Any] = await self._answer(self._vllm.collective_rpc(method, args=args))
        return replies

    async def _answer(self, call: Coroutine[Any, Any, _Reply]) -> _Reply:
        """What vLLM answers; it leaves calls unanswered for ever that were under way when its core was killed."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                if self.stopped:
                    raise EngineError("its core process has died")
            return task.result()
        finally:
            task.cancel()

    @contextmanager
    def _running_as(self, call: str, until: asyncio.Event | None) -> Iterator[None]:
        """Keep account of a call while vLLM has it, and abort it once *until* is set."""
        self._running.add(call)
        self._idle.clear()
        self._labels.open(call)
        ending = None if until is None else asyncio.ensure_future(self._abort_at(until, call))
        try:
            yield
        except BaseException:
            if self.config.drafting is not None:
                # the drafter must forget it; nobody waits for the counts
                self._counts_of(call).add_done_callback(unheeded)
            raise
        finally:
            self._running.discard(call)
            if not self._running:
                self._idle.set()
            self._labels.close(call)
            if ending is not None and until is not None and not until.is_set():
                ending.cancel()

    async def _abort_at(self, until: asyncio.Event, call: str) -> None:
        await until.wait()
        while call in self._running:  # vLLM takes no notice of an abort of a call that it has not got yet
            await self._vllm.abort(call)
            await asyncio.sleep(_ABORT_SECONDS)

    def _end_of(self, response: Response, sampling: Sampling) -> FinishReason | None:
        """Why a response has ended before vLLM is asked for more; None if it has not."""
        if response.token_ids and response.token_ids[-1] in self._ends.union(sampling.stop_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(response.token_ids) == sampling.max_tokens else None

    def _counts_of(self, call: str) -> asyncio.Future[dict[str, tuple[int, int, int]]]:
        """Drafted, accepted and produced tokens of ended calls; those that end together share one round trip."""
        self._ended.append(call)
        if self._counts is None:
            self._counts = asyncio.ensure_future(self._fetch_counts())
        return self._counts

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
    except (EngineError, AdmissionError):
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM failed while {doing}: {error or type(error).__name__}; its log above says more"
        ) from error


def _reason(reason: str, until: asyncio.Event | None) -> FinishReason | None:
    """vLLM's word for why a response ended; None if it was told to."""
    if reason == "abort" and until is not None and until.is_set():
        return None
    if reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise EngineError(f"vLLM broke a response off: {reason}")
    return FinishReason(reason)


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
        # more threads than free cores make a step many times slower; and vLLM would bind every engine of a machine to
        # the same cores, the first ones, whatever the number of threads
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
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
        "pipeline_parallel_size": spec.pipeline_parallel_size,
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
    if spec.max_lora_rank:
        settings["enable_lora"] = True
        settings["max_lora_rank"] = lora_rank(spec.max_lora_rank)
        settings["max_loras"] = BATCH_ADAPTERS
        settings["max_cpu_loras"] = KEPT_ADAPTERS
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
