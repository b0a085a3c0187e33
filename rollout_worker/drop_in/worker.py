"""Starts to draft in a vLLM worker process that belongs to somebody else."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from rollout_worker.drop_in.recorder import IndexHistory, RedisHistory, RolloutRecorder
from rollout_worker.drop_in.reporter import EngineReporter, EngineState
from rollout_worker.drop_in.requests import Requests
from rollout_worker.drop_in.settings import DropInSettings
from rollout_worker.engine.worker_extension import DraftingExtension

logger = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 5.0
_UPDATES = ("add_lora", "finish_weight_update", "reload_weights", "update_weight")
"""What the names of a worker's methods begin with after which the weights are others. Extensions of trainers have
methods such as ``update_weights_from_path``, some of which copy weights without vLLM's ``load_weights``."""


class DropInExtension(DraftingExtension):
    """What a worker can be asked for by ``collective_rpc``, beside what vLLM has."""

    _das_requests: Requests | None = None
    _das_finish: Callable[[Iterable[str]], None] | None = None

    def das_begin_step(self, step: int | str) -> None:
        """Count the current weights as those of a training step, the same generation in all engines of a run."""
        if self._das_requests is not None:
            self._das_requests.begin_step(int(step))  # vLLM's endpoint also takes it as a string

    def das_finish(self, request_ids: list[str]) -> None:
        """Record requests that have ended before the next step does."""
        if self._das_loop is not None and (finish := self._das_finish) is not None:
            self._das_loop.guard(lambda: finish(request_ids))


def attach(worker: Any, settings: DropInSettings) -> None:
    """Draft in a worker from the time when its model is warmed up."""
    worker_class = type(worker)
    if not issubclass(worker_class, DropInExtension):
        # vLLM adds extensions in the same way, but only one, which may be that of a trainer.
        worker_class.__bases__ += (DropInExtension,)
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def warm_up_and_start(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        _start(worker, settings)
        return result

    worker.compile_or_warm_up_model = warm_up_and_start


def _start(worker: Any, settings: DropInSettings) -> None:
    if worker.device.type == "cpu":
        worker.das_rewind_generators()
    engines = worker.vllm_config.parallel_config.data_parallel_size_local
    if not worker.das_start_drafting(asdict(settings.drafting(max(1, engines)))):
        return
    shared = None
    if (sync := worker._das_sync) is not None:
        shared = RedisHistory(sync.store, sync, settings.run, tokenizer_of(worker.vllm_config))
    in_memory = IndexHistory(worker._das_index, settings.window, worker._das_lengths)
    recorder = RolloutRecorder(in_memory, worker._das_controller.set_generation, shared)
    requests = Requests(recorder, worker._das_loop.take_counts)
    worker._das_requests = requests
    worker._das_finish = worker.das_follow(requests.settings_of, requests.finish)

    def change_weights() -> None:
        worker.das_interrupt_timing()
        requests.change_weights()

    updates = [(worker, name) for name in dir(worker) if name.startswith(_UPDATES) and callable(getattr(worker, name))]
    for owner, name in (*updates, (worker.model_runner.get_model(), "load_weights")):
        _call_after(owner, name, lambda *_, **__: change_weights())
    # What the weights are then, only the trainer knows, which may write to their memory.
    _call_after(worker, "sleep", lambda level=1: change_weights() if level > 1 else None)
    reporter = EngineReporter(
        lambda: EngineState(
            requests.version,
            worker._das_loop.num_requests,
            worker.das_stats(),
            recorder.counters.recorded,
            recorder.counters.lost,
        ),
        lambda: worker._das_sync.store.engines if recorder.is_shared else None,
    )

    def stop() -> None:
        recorder.stop(_STOP_TIMEOUT_S)
        reporter.stop(_STOP_TIMEOUT_S)

    _call_before(worker, "shutdown", stop)
    recorder.start()
    reporter.start()


def _call_after(owner: Any, name: str, notify: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            notify(*args, **kwargs)

    setattr(owner, name, call)


def _call_before(owner: Any, name: str, notify: Callable[[], None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        notify()
        return original(*args, **kwargs)

    setattr(owner, name, call)


def tokenizer_of(vllm_config: Any) -> str:
    """Return the fingerprint of a model's tokenizer, even if the engine does not use it.

    It is that of the size of the vocabulary if the model has no tokenizer.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    from rollout_store.models.model_source import tokenizer_fingerprint

    model = copy.copy(vllm_config.model_config)
    model.skip_tokenizer_init = False
    try:
        return tokenizer_fingerprint(cached_tokenizer_from_config(model))
    except (OSError, ValueError):
        return f"{model.get_vocab_size()} tokens"
