"""What a user writes to draft in a vLLM engine of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.spec import PolicyName
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.address import split_history_url, without_password
from rollout_store.job.engines import EngineError
from rollout_worker.engine.config import cuda_graph_sizes, scheduled_tokens
from rollout_worker.engine.draft_settings import PROPOSER, DraftingConfig, HistoryLocation

logger = logging.getLogger(__name__)
METHOD = "das"
"""The method of vLLM's speculative configuration that stands for this drafter."""
CONFIG_KEY = "das"
"""Key of the settings in vLLM's ``additional_config``."""
VARIABLE = "DAS_DRAFTING"
"""Environment variable for trainers that pass no speculative configuration to vLLM: the URL of the history,
``memory``, or the settings as JSON."""
_IN_MEMORY = "memory"
_EXTERNAL_LAUNCHER = "external_launcher"
"""vLLM's executor for ranks that ``torchrun`` or a trainer has started. Each rank schedules the requests by itself."""
_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_MAX_PLACES_SHARE = 0.75
"""Share of ``max_num_batched_tokens`` that may be places for drafts, if the user has set it; the others are for
prompts."""
_MAX_DEFAULT_PLACES = 8192
"""Places for drafts of an engine whose user has not set ``max_num_seqs``. vLLM allows 1,024 requests on large GPUs, and
the logits of 17 tokens of each of them would take 10 GB for a vocabulary of 150,000."""


class DropInSettings(BaseModel):
    """The settings beside ``method`` in vLLM's speculative configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    history: str | None = None
    """URL of the Redis server with the history, and the history's name as its path: ``redis://HOST:PORT/NAME``.

    Engines that name the same history draft from the rollouts of each other. Without it, rollouts are kept in the
    engine's memory. The history of a job of the operator has the name ``NAMESPACE/NAME``."""
    run: str = Field(default="trainer", min_length=1)
    """Name of the training run. Engines with the same name count the same weights as the same generation, and go on
    from the newest one after a restart. Trainings that use a history at the same time should have different names."""
    policy: PolicyName = "marginal"
    """See ``spec.speculation.policy`` of a RolloutJob."""
    num_speculative_tokens: int = Field(default=16, ge=1, le=64)
    """Maximum number of draft tokens per request and step."""
    min_survival: float = Field(default=0.0, ge=0, le=1)
    """See ``spec.speculation.minSurvival`` of a RolloutJob."""
    window: int = Field(default=16, ge=1, le=1024)
    """Number of generations whose rollouts are kept and drafted from, counted per problem."""
    index_bytes: str = "2Gi"
    """Limit of the drafter's index in main memory."""

    @field_validator("history")
    @classmethod
    def _check_history(cls, url: str | None) -> str | None:
        if url is not None:
            split_history_url(url)
        return url

    @field_validator("index_bytes")
    @classmethod
    def _check_index_bytes(cls, size: str) -> str:
        parse_quantity(size)
        return size

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> DropInSettings:
        """Read the settings of a speculative configuration.

        Raises:
            EngineError: if a setting is unknown or has an invalid value.
        """
        try:
            return cls.model_validate({name: value for name, value in values.items() if name != "method"})
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()
            )
            known = ", ".join(cls.model_fields)
            raise EngineError(
                f"vLLM's speculative configuration with the method {METHOD!r} is invalid: {faults}; known settings are "
                f"{known}"
            ) from None

    def location(self) -> HistoryLocation | None:
        """Return where the history is; None if it is in the engine's memory."""
        if self.history is None:
            return None
        redis_url, full_name = split_history_url(self.history)
        keys = HistoryKeys.from_full_name(full_name)
        return HistoryLocation(redis_url, keys.namespace, keys.name, window=self.window)

    def drafting(self, engines: int) -> DraftingConfig:
        """Return the drafting configuration of one of several engines of a machine."""
        limit = int(parse_quantity(self.index_bytes))
        return DraftingConfig(
            self.policy,
            self.num_speculative_tokens,
            limit,
            self.location(),
            engines,
            self.min_survival,
        )


def drafting_args(history: str | None = None, **settings: Any) -> dict[str, Any]:
    """Return the arguments with which ``vllm.LLM`` or ``AsyncEngineArgs`` drafts from earlier rollouts.

    >>> from vllm import LLM
    >>> llm = LLM("Qwen/Qwen3-8B", **drafting_args(history="redis://redis:6379/math-qwen3-8b"))

    Args:
        history: see :attr:`DropInSettings.history`; without it, rollouts are kept in the engine's memory.
        **settings: other fields of :class:`DropInSettings`.

    Raises:
        EngineError: if a setting is unknown or has an invalid value.
    """
    values = {**settings, **({} if history is None else {"history": history})}
    DropInSettings.parse(values)
    return {"speculative_config": {"method": METHOD, **values}}


def settings_of(speculative_config: Any, environment: Mapping[str, str]) -> DropInSettings | None:
    """Return the settings of an engine; None if it does not use this drafter.

    Args:
        speculative_config: what vLLM was passed, usually a dictionary or None.
        environment: the environment variables.

    Raises:
        EngineError: if a setting is unknown or has an invalid value.
    """
    if speculative_config is None and (variable := environment.get(VARIABLE)):
        return DropInSettings.parse(_settings_in(variable))
    if not isinstance(speculative_config, Mapping) or speculative_config.get("method") != METHOD:
        return None
    return DropInSettings.parse({name.replace("-", "_"): value for name, value in speculative_config.items()})


def for_log(speculative_config: Any) -> Any:
    """Return what vLLM was passed as its speculative configuration, without the password of a history."""
    if not isinstance(speculative_config, Mapping) or not isinstance(speculative_config.get("history"), str):
        return speculative_config
    return {**speculative_config, "history": without_password(speculative_config["history"])}


def _settings_in(variable: str) -> Mapping[str, Any]:
    if not variable.startswith("{"):
        return {} if variable == _IN_MEMORY else {"history": variable}
    try:
        return dict(json.loads(variable))
    except ValueError as error:
        raise EngineError(
            f"The environment variable {VARIABLE} is neither the URL of a history, nor {_IN_MEMORY!r}, nor valid JSON "
            f"({error})"
        ) from None


def apply(settings: DropInSettings, args: Any, *, default_max_num_seqs: int, is_cpu: bool) -> None:
    """Let vLLM's ``EngineArgs`` draft. What the user has set explicitly stays.

    Args:
        settings: the user's settings.
        args: the arguments, which are changed.
        default_max_num_seqs: vLLM's value of ``max_num_seqs``, if the user has not set it.
        is_cpu: whether the engine runs on CPUs.
    """
    max_num_seqs = args.max_num_seqs or default_max_num_seqs
    places = settings.num_speculative_tokens
    limit = _MAX_DEFAULT_PLACES if args.max_num_seqs is None else None
    if args.max_num_batched_tokens is not None:
        limit = int(_MAX_PLACES_SHARE * args.max_num_batched_tokens)
    if limit is not None and max_num_seqs * (1 + places) > limit:
        places = max(1, limit // max_num_seqs - 1)
        logger.warning(
            "Drafts have at most %d tokens instead of %d, so that those of max_num_seqs = %d requests fit in a step.",
            places,
            settings.num_speculative_tokens,
            max_num_seqs,
        )
    args.speculative_config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": places}
    applied = settings.model_copy(update={"num_speculative_tokens": places})
    args.additional_config = {**args.additional_config, CONFIG_KEY: applied.model_dump()}
    if is_cpu:
        return
    if args.max_num_batched_tokens is None:
        args.max_num_batched_tokens = scheduled_tokens(max_num_seqs, places)
    if not args.enforce_eager and args.cudagraph_capture_sizes is None and args.max_cudagraph_capture_size is None:
        args.cudagraph_capture_sizes = cuda_graph_sizes(max_num_seqs, places) or args.cudagraph_capture_sizes


def check_runner(vllm_config: Any, environment: Mapping[str, str], *, is_cpu: bool) -> None:
    """Check that an engine on a GPU uses vLLM's V2 model runner, or V1 because the user has chosen it.

    Raises:
        EngineError: if vLLM has chosen V1, with which drafting may cost more than it saves; if V1 would give drafts to
            one of several ranks that each schedule by themselves; or if V1 has several pipeline stages.
    """
    parallel, uses_v1 = vllm_config.parallel_config, not vllm_config.use_v2_model_runner
    if uses_v1 and parallel.pipeline_parallel_size > 1:
        # It fails with any drafter (seen in 0.32).
        raise EngineError(
            f"vLLM's V1 model runner cannot draft with {parallel.pipeline_parallel_size} pipeline stages. Use V2, "
            "which needs a GPU, or pipeline_parallel_size=1"
        )
    if uses_v1 and parallel.distributed_executor_backend == _EXTERNAL_LAUNCHER and parallel.world_size > 1:
        raise EngineError(
            f"An engine with {parallel.world_size} ranks and the distributed executor {_EXTERNAL_LAUNCHER!r} cannot "
            "draft with vLLM's V1 model runner. Use V2, which needs a GPU, or one rank for each engine, such as "
            "vllm_tensor_parallel_size=1 in TRL"
        )
    if is_cpu or vllm_config.use_v2_model_runner or _RUNNER_VARIABLE in environment:
        return
    missing = ", ".join(vllm_config._get_v2_model_runner_unsupported_features()) or "this machine, which lacks Triton"
    raise EngineError(
        f"vLLM's V2 model runner does not support {missing}. With V1, each step would wait for the drafts of the step "
        f"before. Start the engine without that or without drafts, or set the environment variable "
        f"{_RUNNER_VARIABLE}=0 to draft with V1"
    )
