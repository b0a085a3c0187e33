"""The vLLM plugin, which vLLM loads in each of its processes: patches with which its V2 model runner drafts.

vLLM has no hook for speculators of V2. It builds one of a fixed list, counts the method ``custom_class`` among those
that V2 does not support, and permits asynchronous scheduling only for methods of another list. The functions below
replace these decisions for engines that are configured for this drafter, and for no others. :func:`check` verifies the
effect in a running engine.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import EXTENSIONS
from rollout_worker.engine.draft_settings import PROPOSER

logger = logging.getLogger(__name__)
_METHOD = "custom_class"
_ACCEPTED_METHOD = "ngram_gpu"
"""A method that vLLM's configuration permits with V2 and asynchronous scheduling."""
_INSTALLED = "_das_rollout_original"
_MAX_MATCHING_S, _MATCHING_S_PER_TOKEN = 2.0, 0.001
"""CPU time for comparing a response with its grammar: at most the first number, plus the second for each token.

Usually, a token takes some microseconds. With nested repetitions, the time grows with a high power of the length."""


def uses_drafter(vllm_config: Any) -> bool:
    """Return whether an engine with this configuration drafts by :mod:`rollout_worker`."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method == _METHOD and speculative.model == PROPOSER


def install() -> None:
    """Replace vLLM's decisions; further calls have no effect."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    replace(VllmConfig, "__post_init__", _configure)
    replace(VllmConfig, "_get_v2_model_runner_unsupported_features", _unsupported_features)
    replace(WorkerWrapperBase, "init_device", _init_device)


def check(runner: Any, vllm_config: Any) -> None:
    """Check that an engine with the V2 model runner drafts with :class:`HistorySpeculator`.

    Raises:
        EngineError: if the installed vLLM does not do what :func:`install` intends.
    """
    from vllm import __version__

    problem = ""
    if not vllm_config.scheduler_config.async_scheduling:
        problem = "schedules synchronously"
    elif runner.is_last_pp_rank and type(runner.speculator).__name__ != "HistorySpeculator":
        problem = f"created {type(runner.speculator).__name__} instead of the drafter"
    elif runner.device.type != "cpu" and not hasattr(runner.req_states.all_token_ids, "_uva_buf"):
        problem = "keeps the sampled tokens where the host cannot read them (there is no pinned memory)"
    if problem:
        raise EngineError(
            f"vLLM {__version__} {problem}; set the environment variable VLLM_USE_V2_MODEL_RUNNER=0 to use its V1 "
            "model runner"
        )


def is_output_rank() -> bool:
    """Return whether vLLM uses the drafts of this worker process: the first tensor rank of the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_pp_group().is_last_rank) and int(get_tp_group().rank_in_group) == 0


def broadcast_drafts(vllm_config: Any) -> Callable[[Any], Any] | None:
    """Return a function that returns the object that the drafting rank passes, on every rank; None for a single rank.

    The drafting rank is the first tensor rank of the last pipeline stage. Tensor ranks of one host share memory.
    """
    from vllm.distributed.parallel_state import get_tp_group, get_world_group

    parallel = vllm_config.parallel_config
    if parallel.world_size == 1:
        return None
    if parallel.pipeline_parallel_size == 1:
        return lambda drafts: get_tp_group().broadcast_object(drafts, src=0)
    source = parallel.world_size - parallel.tensor_parallel_size
    return lambda drafts: get_world_group().broadcast_object(drafts, src=source)


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of *owner* by the one that *make* returns for it; further calls have no effect."""
    original = getattr(owner, name)
    if hasattr(original, _INSTALLED):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _INSTALLED, original)
    setattr(owner, name, replacement)


def _configure(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(self: Any, *args: Any) -> None:
        if not uses_drafter(self):
            original(self, *args)
            return
        from rollout_worker.engine.recurrent_states import limit_draft_tokens

        if self.use_v2_model_runner:
            self.speculative_config.method = _ACCEPTED_METHOD
        try:
            original(self, *args)
        finally:
            self.speculative_config.method = _METHOD
        limit_draft_tokens(self)

    return post_init


def _unsupported_features(original: Callable[..., Any]) -> Callable[..., Any]:
    def unsupported_features(self: Any) -> list[str]:
        features: list[str] = original(self)
        if uses_drafter(self):
            features = [feature for feature in features if _METHOD not in feature]
        return features

    return unsupported_features


def _init_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parts of the model runner before a rank creates it, on all pipeline stages."""

    def init_device(self: Any) -> None:
        if uses_drafter(self.vllm_config) and self.vllm_config.use_v2_model_runner:
            from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
            from vllm.v1.worker.gpu import model_runner
            from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

            replace(model_runner, "init_speculator", _init_speculator)
            replace(model_runner, "maybe_create_adaptive_verification_manager", _create_verification_manager)
            replace(CudaGraphManager, "_init_candidates", _choose_graphs)
            if self.vllm_config.aux_output_config.enabled:
                places = self.vllm_config.speculative_config.num_speculative_tokens
                replace(AuxOutputWorkerConnector, "process_output", functools.partial(_process_aux_output, places))
        original(self)

    return init_device


def _init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not uses_drafter(vllm_config):
            return original(vllm_config, device, req_states)
        from rollout_worker.engine.speculator import HistorySpeculator

        return HistorySpeculator(vllm_config, device, req_states)

    return init_speculator


def _process_aux_output(places: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let routed experts be captured although a step has fewer draft tokens than the scheduler has planned.

    The scheduler has counted *places* draft tokens as computed, which vLLM takes for a gap in what it has captured if
    it has not seen that many rows. Rows are placed by what was captured before in either case.
    """

    def process_output(self: Any, pending: Any) -> Any:
        output = original(self, pending)
        with self._lock:
            for request_id in pending.request_ids:
                if (state := self._requests.get(request_id)) is not None:
                    state.scheduled_cursor += places
        return output

    return process_output


def _create_verification_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(**arguments: Any) -> Any:
        vllm_config = arguments["vllm_config"]
        if not uses_drafter(vllm_config):
            return original(**arguments)
        if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            return None
        from rollout_worker.engine.exact_verification import ExactVerification

        reason = ""
        try:
            # Only the last pipeline stage has a speculator, which asks for the manager.
            original(**(arguments | {"enable_adaptive_verification": True}))
        except ValueError as error:
            reason = str(error)
        if reason := _first_of_stages(reason):
            logger.info("All drafts of a step have the same length, because of their CUDA graphs: %s", reason)
            return None
        names = ("req_states", "query_start_loc", "max_total_logits")
        return ExactVerification(*map(arguments.__getitem__, names), drafts=is_output_rank())

    return create


def _first_of_stages(reason: str) -> str:
    """Return the first reason that is not empty, of all pipeline stages.

    Their layers may have different attention backends, but they must pad steps to the same number of tokens.
    """
    from torch.distributed import all_gather_object
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    reasons = [reason] * group.world_size
    if len(reasons) > 1:
        all_gather_object(reasons, reason, group=group.cpu_group)
    return next(filter(None, reasons), "")


def _choose_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Capture graphs for several lengths of drafts where there are none for drafts of different lengths.

    vLLM (seen in 0.32) captures several only if the number of draft tokens depends on the size of the batch, and else
    has graphs for the longest drafts alone, so that even steps without drafts have none.
    """

    def init_candidates(self: Any) -> None:
        from vllm.v1.worker.gpu import cudagraph_utils

        config = self.vllm_config.speculative_config
        if self.varlen_decode or not self.cudagraph_mode or not uses_drafter(self.vllm_config):
            original(self)
            return
        lengths = uniform_lengths(config.num_speculative_tokens)
        compilation = self.compilation_config
        # vLLM rounds sizes up to whole responses, and drops those that are larger than a full batch then.
        full = {self.max_num_reqs * (1 + length) for length in lengths}
        sizes = full.union(compilation.cudagraph_capture_sizes or ())
        compilation.cudagraph_capture_sizes = sorted(
            size for size in sizes if size <= compilation.max_cudagraph_capture_size
        )
        lookup, cudagraph_utils.build_dynamic_sd_schedule_lookup = (
            cudagraph_utils.build_dynamic_sd_schedule_lookup,
            lambda *_, **__: [0, *lengths],  # by the size of the batch
        )
        config.num_speculative_tokens_per_batch_size = lengths
        try:
            original(self)
        finally:
            config.num_speculative_tokens_per_batch_size = None
            cudagraph_utils.build_dynamic_sd_schedule_lookup = lookup

    return init_candidates


def uniform_lengths(max_draft_tokens: int) -> list[int]:
    """Return the lengths of drafts for which CUDA graphs are captured if all drafts of a step have the same length.

    Each is twice the one before, so that the longest draft of a step is more than half as long.
    """
    powers = [2**exponent for exponent in range(max_draft_tokens.bit_length())]
    return sorted({0, *powers, max_draft_tokens})


def _compile_grammar(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_grammar(self: Any, *args: Any, **kwargs: Any) -> Any:
        grammar = original(self, *args, **kwargs)
        if self.vllm_config.parallel_config.worker_extension_cls.startswith(EXTENSIONS):
            _limit_matching(grammar)
        return grammar

    return compile_grammar


def _limit_matching(grammar: Any) -> None:
    """Let a grammar of xgrammar reject all tokens, so that its response ends, once comparing them takes too long.

    vLLM compares the tokens of each step between two steps of the whole batch, so that a single request would otherwise
    stop an engine. xgrammar has no limit of its own (seen in 0.2.8).
    """
    spent = 0.0

    def limited(match: Callable[..., Any], rejection: Callable[[], Any]) -> Callable[..., Any]:
        def limited_match(*args: Any) -> Any:
            nonlocal spent
            if spent > _MAX_MATCHING_S + _MATCHING_S_PER_TOKEN * grammar.num_processed_tokens:
                logger.warning("A response ends, because comparing it with its grammar has taken %.1f s.", spent)
                return rejection()
            begun = time.thread_time()  # not the time of the clock, which passes for other processes, too
            result = match(*args)
            spent += time.thread_time() - begun
            return result

        return limited_match

    grammar.accept_tokens = limited(grammar.accept_tokens, bool)
    grammar.validate_tokens = limited(grammar.validate_tokens, list)


def register() -> None:
    """Let vLLM's V2 model runner use the drafter, and engines on CPUs receive weights over gloo.

    In engines of jobs, also limit the time that a grammar takes. Other engines are not affected. Further calls have no
    effect.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    from rollout_api.weights.gloo import GLOO

    install()
    replace(XgrammarBackend, "compile_grammar", _compile_grammar)
    if GLOO not in WeightTransferEngineFactory._registry:
        module = "rollout_worker.engine.gloo_weight_transfer"
        WeightTransferEngineFactory.register_engine(GLOO, module, "GlooWeightTransferEngine")
