"""One vLLM engine, which runs in processes of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_api.protocol.messages import Partial, RolloutRequest, UpdateMode
from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import EngineConfig, engine_args, engine_environment, vllm_settings
from rollout_worker.engine.generation import DecodingPause, PartialCallback, ResponseGenerator, TokensCallback
from rollout_worker.engine.response import GenerationResult
from rollout_worker.engine.vllm_client import Adapters, VllmClient, WeightVersionTracker
from rollout_worker.engine.vllm_patches import accept_settings_without_drafts
from rollout_worker.engine.weight_loading import Updates, WeightLoader

_HISTORY_POLL_INTERVAL_S = 0.02
"""Seconds between two checks whether the announced history can be drafted from."""
_STARTING = threading.Lock()
"""Held while an engine of this process starts. vLLM inherits this process's environment variables and replaces its
metrics in the process's registry, so that two engines that start at the same time can take each other's variables, or
fail with "Duplicated timeseries"."""


@dataclass
class EngineCounters:
    """Counters since the engine started, except where noted."""

    running: int = 0
    """Rollouts in the batch of the last step."""
    waiting: int = 0
    """Rollouts that vLLM has queued, at the last step."""
    kv_cache_usage: float = 0.0
    """Share of the KV cache that is in use at the last step, 0 to 1."""
    prompt_tokens: int = 0
    """Tokens of prompts and prefixes that were read."""
    cached_tokens: int = 0
    """The part of them whose keys and values were cached."""
    tokens: int = 0
    """Response tokens."""
    preemptions: int = 0
    """How often a running rollout lost its keys and values, because of a lack of memory or a weight update."""
    draft_tokens: int = 0
    """Draft tokens that were verified; with V2, as of the last :meth:`Engine.stats`."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""

    def as_stat_logger(self) -> Any:
        """Return a factory of a vLLM stat logger that updates these counters."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counters = self

        class CounterUpdater(StatLoggerBase):  # type: ignore[misc]  # mypy skips vLLM, so the base class is Any
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                # V2 counts the places that it has planned for drafts; the worker process counts the drafts.
                self._counts_drafts = not vllm_config.use_v2_model_runner

            def log_engine_initialized(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    counters.running = scheduler_stats.num_running_reqs
                    counters.waiting = scheduler_stats.num_waiting_reqs
                    counters.kv_cache_usage = scheduler_stats.kv_cache_usage
                    if scheduler_stats.spec_decoding_stats is not None:
                        if self._counts_drafts:
                            counters.draft_tokens += scheduler_stats.spec_decoding_stats.num_draft_tokens
                        counters.accepted_tokens += scheduler_stats.spec_decoding_stats.num_accepted_tokens
                if iteration_stats is not None:
                    counters.prompt_tokens += iteration_stats.prompt_token_stats.total
                    counters.cached_tokens += iteration_stats.prompt_token_stats.cached_tokens
                    counters.tokens += iteration_stats.num_generation_tokens
                    counters.preemptions += iteration_stats.num_preempted_reqs

        return CounterUpdater


class Engine:
    """A running engine, created by :meth:`start` and stopped by :meth:`close`. Use it from one asyncio event loop."""

    def __init__(self, llm: Any, config: EngineConfig, counters: EngineCounters) -> None:
        """Wrap an ``AsyncLLM``; use :meth:`start` instead."""
        self.counters = counters
        self.config = config
        self.weight_versions = WeightVersionTracker(llm, config.weight_version)
        """Records which weight version samples which tokens."""
        self.adapters = Adapters(llm)
        """The loaded LoRA adapters."""
        self._client = VllmClient(llm)
        self._generator = ResponseGenerator(self._client, config, self.weight_versions, self.adapters)
        self._pause = DecodingPause(self._client, self._generator)
        self._loader = WeightLoader(
            self._client, config, self._generator, self.weight_versions, self.adapters, self._pause
        )

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Start vLLM's processes and load the model.

        The environment variables of :func:`engine_environment` are added to those of this process, so that vLLM's
        processes inherit them. Engines of one process start one after another.

        Raises:
            EngineError: if vLLM does not start. The cause is in the message and in vLLM's log.
        """
        counters = EngineCounters()
        try:
            # In a thread, because it blocks while the model is loaded.
            llm = await asyncio.to_thread(_start_vllm, config, counters)
        except Exception as error:  # arguments of wrong types cause errors of any type
            extra = f" and engine.extraArgs {', '.join(config.spec.extra_args)}" if config.spec.extra_args else ""
            cause = str(error) or type(error).__name__
            if "Model Runner V2" in cause:
                cause += "; the environment variable VLLM_USE_V2_MODEL_RUNNER=0 selects V1, which is slower on GPUs"
            raise EngineError(f"vLLM does not start with {config.model}{extra}: {cause}") from error
        engine = cls(llm, config, counters)
        try:
            await engine._prepare()
        except BaseException:
            engine.close()
            raise
        return engine

    async def _prepare(self) -> None:
        await self._client.collective_rpc(
            "das_exit_with_host", os.getpid(), action="starting to watch the host process"
        )
        await self.weight_versions.change(self.config.weight_version)
        if self.config.cpu:
            await self._client.collective_rpc("das_rewind_generators", action="patching its random generators")
        if self.config.cpu and self.config.spec.max_lora_rank:
            await self._client.collective_rpc("das_patch_adapters", action="patching its operators for adapters")
        drafting = self.config.drafting
        if drafting is None:
            return
        ranks = await self._client.collective_rpc("das_start_drafting", asdict(drafting), action="starting the drafter")
        if not any(ranks):
            raise EngineError("no rank of the engine drafts, because vLLM has no output rank")

    @property
    def weight_version(self) -> int:
        """The version that samples new responses."""
        return self._loader.weight_version

    @property
    def full_weight_version(self) -> int:
        """The version of the current full weights, regardless of an adapter."""
        return self.weight_versions.version

    @property
    def stopped(self) -> bool:
        """Whether the engine was closed, has died, or could load neither new nor previous weights."""
        return self._client.stopped

    @property
    def admission_paused(self) -> bool:
        """Whether new responses wait until a weight update has finished."""
        return self._generator.admission_paused

    def running_tokens(self) -> dict[str, int]:
        """Return how many tokens the responses that vLLM is generating have, by rollout id."""
        return self._generator.running_tokens()

    async def generate(
        self,
        request: RolloutRequest,
        sample: int,
        *,
        images: Sequence[Any] = (),
        prefix: Partial | None = None,
        on_partial: PartialCallback | None = None,
        partial_interval: int = 0,
        on_tokens: TokensCallback | None = None,
        stop_event: asyncio.Event | None = None,
    ) -> GenerationResult:
        """Generate one response of a request. Cancelling this call aborts the response.

        Args:
            request: the request.
            sample: index of the response, less than ``sampling.n``.
            images: the images of the request, from :func:`~rollout_worker.engine.images.decode_image`.
            prefix: tokens of the model to continue from, instead of the request's own prefix; see
                :func:`rollout_store.job.admission_rules.can_continue`.
            on_partial: receives all tokens of the response so far, after at most *partial_interval* new ones. If the
                engine is killed, no more than these tokens and those of one verification step are lost.
            partial_interval: maximum number of tokens between two calls of *on_partial*; 0 for no calls. Tokens that
                vLLM returns while this process is busy come together in one call, and may exceed it.
            on_tokens: receives a reference to the tokens of the response so far after each decoding step, except for
                the last one.
            stop_event: once it is set, the response ends, and its tokens so far are returned.

        Raises:
            AdmissionError: if this engine cannot serve the request as it is.
            UnusableOutputError: if the model returns log-probabilities that are not numbers.
            EngineError: if the engine has died, or vLLM fails to generate this response.
        """
        return await self._generator.generate(
            request,
            sample,
            images=images,
            prefix=prefix,
            on_partial=on_partial,
            partial_interval=partial_interval,
            on_tokens=on_tokens,
            stop_event=stop_event,
        )

    async def pause(self, *, finish_running: bool) -> None:
        """Decode nothing until :meth:`resume` is called. Responses can be started and cancelled meanwhile.

        Weights can be loaded meanwhile, unless they wait for responses to end.

        Args:
            finish_running: whether responses that vLLM has end first, while later ones wait; otherwise they continue
                after the pause.

        Raises:
            EngineError: if the engine has died.
        """
        await self._pause.hold(finish_running=finish_running)

    async def resume(self) -> None:
        """Decode again. Does nothing if the engine is not paused.

        Raises:
            EngineError: if the engine has died.
        """
        await self._pause.release()

    async def sleep(self, level: int) -> None:
        """Decode nothing and hold no memory of GPUs until :meth:`wake` is called. Weights wait to be loaded until then.

        Does nothing if the engine sleeps. On CPUs, the engine keeps its memory.

        Args:
            level: vLLM's level: 1 keeps the weights in main memory; 2 does not, and they are read again.

        Raises:
            EngineError: if the engine has died.
        """
        await self._loader.sleep(level)

    async def wake(self) -> None:
        """Claim the memory again, and decode. Does nothing if the engine does not sleep.

        Raises:
            EngineError: if the engine has died, or cannot read its weights again, which ends it.
        """
        await self._loader.wake()

    async def load_weights(self, directory: Path, weight_version: int, mode: UpdateMode = UpdateMode.DRAIN) -> float:
        """Replace the weights. An update that has started is not cancelled; if it fails, the previous weights stay.

        Args:
            directory: safetensors with the same names, shapes and data types as the model's.
            weight_version: version of the new weights.
            mode: what happens to running responses. With DRAIN, all responses that vLLM has end first, including queued
                ones; later ones wait. With RECOMPUTE and KEEP, running responses continue with the new weights, except
                that those with an adapter end first. Queued responses start with the new weights; with KEEP, some of
                them use keys and values of their prompt from the old ones.

        Returns:
            Seconds during which nothing was decoded.

        Raises:
            EngineError: if these are not weights of this model, or vLLM fails to load them. The message names the
                version that the engine continues with.
        """
        return await self._loader.load_checkpoint(directory, weight_version, mode)

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Call vLLM's ``init_weight_transfer_engine``, after releasing the connection to an earlier trainer.

        Nothing is decoded meanwhile.

        Raises:
            EngineError: if the trainer cannot be reached, or another engine of its group is missing.
        """
        await self._loader.init_transfer(init_info)

    async def load_transferred(
        self,
        updates: Updates,
        weight_version: int,
        mode: UpdateMode = UpdateMode.RECOMPUTE,
        update_info: dict[str, Any] | None = None,
    ) -> float:
        """Replace the weights by those that a trainer sends from its memory; see :meth:`load_weights`.

        The engine decodes until the first update is announced. If receiving fails half-way, it loads the weights of the
        last directory again. If its current weights came from a trainer's memory as well, it stops.

        Args:
            updates: what the trainer announces.
            weight_version: version of the new weights.
            mode: what happens to running responses.
            update_info: describes all tensors, if they are known before the trainer sends them.
        """
        return await self._loader.load_transferred(updates, weight_version, mode, update_info)

    async def load_adapter(self, directory: Path, weight_version: int) -> float:
        """Generate new responses with a LoRA adapter; running ones keep theirs. Full weights replace the adapter.

        Args:
            directory: the adapter in PEFT's format, of a rank of at most ``engine.maxLoraRank``.
            weight_version: version of the current full weights together with the adapter.

        Returns:
            Seconds that it took to load the adapter, while nothing was decoded.

        Raises:
            EngineError: if vLLM cannot load it. The message names the version that the engine continues with.
        """
        return await self._loader.load_adapter(directory, weight_version)

    async def announce(
        self,
        problems: Sequence[str],
        generation: int,
        *,
        wanted: Sequence[str] | None = None,
        timeout_s: float = 0.0,
    ) -> bool:
        """Announce the problems of upcoming rollouts, so that their history is fetched in the background.

        Those that are *wanted*, by default all, are about to start. Wait up to *timeout_s* seconds until all of their
        history can be drafted from.

        Returns:
            Whether all of it can be drafted from.
        """
        if self.config.drafting is None:
            return True
        wanted_list = None if wanted is None else list(wanted)
        await self._client.collective_rpc(
            "das_announce", list(problems), generation, wanted_list, action="announcing problems to the drafter"
        )
        deadline = time.monotonic() + timeout_s
        while not (ready := await self._is_history_ready()) and time.monotonic() < deadline:
            await asyncio.sleep(_HISTORY_POLL_INTERVAL_S)
        return ready

    async def _is_history_ready(self) -> bool:
        ranks = await self._client.collective_rpc(
            "das_history_ready", action="asking whether the history can be drafted from"
        )
        return all(ranks)

    async def stats(self) -> dict[str, Any]:
        """Return the statistics of ``DraftingExtension.das_stats``; empty for an engine without speculation."""
        ranks = await self._client.collective_rpc("das_stats", action="reading statistics")
        stats: dict[str, Any] = next((stats for stats in ranks if stats), {})
        if "draft_tokens" in stats:
            self.counters.draft_tokens = stats["draft_tokens"]
        return stats

    async def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of vLLM's workers on all ranks, and return their replies in the order of ranks.

        Raises:
            EngineError: if the method fails, or the engine has died.
        """
        return await self._client.collective_rpc(method, *args, action=f"calling {method}")

    def close(self) -> None:
        """Stop the engine's processes."""
        self._client.close()


def _start_vllm(config: EngineConfig, counters: EngineCounters) -> Any:
    """Return a new ``AsyncLLM``."""
    with _STARTING:
        os.environ.update(engine_environment(config, os.environ))
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(engine_args(vllm_settings(config)), stat_loggers=[counters.as_stat_logger()])
        if config.drafting is not None:
            accept_settings_without_drafts(llm)
        return llm
