"""The vLLM plugin, which vLLM loads in each of its processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rollout_worker.drop_in.metrics import serve_reports
from rollout_worker.drop_in.settings import CONFIG_KEY, DropInSettings, apply, settings_of
from rollout_worker.engine import vllm_plugin


def register() -> None:
    """Let vLLM's engines use the drafter, those of jobs and those with :mod:`rollout_worker.drop_in.settings`.

    Engines that use neither are not affected. Further calls have no effect.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    vllm_plugin.register()
    vllm_plugin.replace(EngineArgs, "create_engine_config", _create_engine_config)
    vllm_plugin.replace(WorkerWrapperBase, "initialize_from_config", _attach)


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, usage_context: Any = None, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of(self.speculative_config, os.environ)
        if settings is not None:
            from vllm.platforms import current_platform
            from vllm.v1.engine.core_client import InprocClient

            from rollout_worker.engine.vllm_version import check_vllm

            check_vllm()
            _, max_num_seqs = self.get_batch_defaults(self.pipeline_parallel_size * self.tensor_parallel_size)
            default = max_num_seqs.get(usage_context, max(max_num_seqs.values()))
            apply(settings, self, default_max_num_seqs=default, is_cpu=current_platform.is_cpu())
            serve_reports()
            vllm_plugin.replace(InprocClient, "get_output", _report_ends)
        return original(self, usage_context, *args, **kwargs)

    return create_engine_config


def _attach(original: Callable[..., Any]) -> Callable[..., Any]:
    """Start to draft in a worker process when its model has been loaded and warmed up."""

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        settings = self.vllm_config.additional_config.get(CONFIG_KEY)
        if settings is not None and vllm_plugin.uses_drafter(self.vllm_config):
            from rollout_worker.drop_in.worker import attach

            attach(self.worker, DropInSettings.model_validate(settings))

    return initialize_from_config


def _report_ends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the workers at once which requests have ended when an engine without a process of its own becomes idle.

    vLLM tells them with the next step. The engine's own process makes one for that alone; its caller does not (seen in
    0.32).
    """

    def get_output(self: Any) -> Any:
        outputs = original(self)
        core = self.engine_core
        if core.vllm_config.additional_config.get(CONFIG_KEY) is not None:
            scheduler = core.scheduler
            if scheduler.finished_req_ids and not scheduler.has_unfinished_requests():
                core.collective_rpc("das_finish", args=(list(scheduler.finished_req_ids),))
        return outputs

    return get_output
