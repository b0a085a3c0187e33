"""The vLLM plugin, which vLLM loads in each of its processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rollout_worker.drop_in.metrics import serve_reports
from rollout_worker.drop_in.settings import CONFIG_KEY, DropInSettings, apply, check_runner, for_log, settings_of
from rollout_worker.engine import vllm_plugin
from rollout_worker.engine.config import EXTENSIONS

_LOGGING_MODULES = ("vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.common.startup")
_REDACT = "redact_sensitive_args"


def register() -> None:
    """Let vLLM's engines use the drafter, those of jobs and those with :mod:`rollout_worker.drop_in.settings`.

    Engines that use neither are not affected. Further calls have no effect.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    vllm_plugin.register()
    vllm_plugin.replace(EngineArgs, "create_engine_config", _create_engine_config)
    vllm_plugin.replace(WorkerWrapperBase, "initialize_from_config", _attach)
    if multiprocessing.parent_process() is None:  # others do not log arguments
        for module in logging_modules():
            vllm_plugin.replace(module, _REDACT, _redact_password)


def logging_modules() -> Iterator[Any]:
    """Yield the modules of vLLM that log the arguments of an engine: the first one in 0.32, the second in 0.33."""
    for name in _LOGGING_MODULES:
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            if hasattr(module, _REDACT):
                yield module


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, usage_context: Any = None, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self.speculative_config, _environment_of(self))
        if settings is not None:
            from vllm.platforms import current_platform
            from vllm.v1.engine.core_client import InprocClient

            from rollout_worker.engine.vllm_version import check_vllm

            check_vllm()
            _, max_num_seqs = self.get_batch_defaults(self.pipeline_parallel_size * self.tensor_parallel_size)
            default = max_num_seqs.get(usage_context, max(max_num_seqs.values()))
            apply(settings, self, default_max_num_seqs=default, is_cpu=current_platform.is_cpu())
            serve_reports()
            for name in ("get_output", "abort_requests"):  # vLLM ends requests at a stop string with the second
                vllm_plugin.replace(InprocClient, name, _report_ends)
        config = original(self, usage_context, *args, **kwargs)
        if settings is not None:
            check_runner(config, os.environ, is_cpu=current_platform.is_cpu())
        return config

    return create_engine_config


def _redact_password(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Let vLLM log the history's URL without its password."""

    def redact_sensitive_args(args: dict[str, Any]) -> dict[str, Any]:
        redacted = original(args)
        config = redacted.get("speculative_config")
        return redacted if config is None else {**redacted, "speculative_config": for_log(config)}

    return redact_sensitive_args


def _environment_of(args: Any) -> Mapping[str, str]:
    """Return the environment variables that apply to an engine: none to those of jobs, nor to those that pool."""
    is_of_job = (args.worker_extension_cls or "").startswith(EXTENSIONS)
    return {} if is_of_job or args.runner == "pooling" else os.environ


def _settings_in(vllm_config: Any) -> Mapping[str, Any] | None:
    additional = vllm_config.additional_config  # a plugin of another project may have an object here
    return additional.get(CONFIG_KEY) if isinstance(additional, Mapping) else None


def _attach(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start to draft in a worker process when its model has been loaded and warmed up."""

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        settings = _settings_in(self.vllm_config)
        if settings is not None and vllm_plugin.uses_drafter(self.vllm_config):
            from rollout_worker.drop_in.worker import attach

            attach(self.worker, DropInSettings.model_validate(settings))

    return initialize_from_config


def _report_ends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the workers at once which requests have ended when an engine without a process of its own becomes idle.

    vLLM tells them with the next step. The engine's own process makes one for that alone; its caller does not (seen in
    0.32).
    """

    def call(self: Any, *args: Any) -> Any:
        outputs = original(self, *args)
        core = self.engine_core
        if _settings_in(core.vllm_config) is not None:
            scheduler = core.scheduler
            if scheduler.finished_req_ids and not scheduler.has_unfinished_requests():
                core.collective_rpc("das_finish", args=(list(scheduler.finished_req_ids),))
        return outputs

    return call
