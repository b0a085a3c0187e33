"""What a user writes, and what vLLM gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_store.job.engines import EngineError
from rollout_worker import drafting_args
from rollout_worker.drop_in.plugin import _environment_of, logging_modules, register
from rollout_worker.drop_in.settings import CONFIG_KEY, VARIABLE, DropInSettings, apply, check_runner, settings_of
from rollout_worker.engine.config import EXTENSIONS, cuda_graph_sizes

URL = "redis://user:secret@redis.rl:6379/math?socket_timeout=3"


def test_two_lines_are_enough() -> None:
    assert drafting_args() == {"speculative_config": {"method": "das"}}
    assert drafting_args(URL)["speculative_config"] == {"method": "das", "history": URL}


def test_the_history_is_the_path_of_its_server() -> None:
    settings = settings_of({"method": "das", "history": URL}, {})
    assert settings is not None
    location = settings.location()
    assert location is not None
    assert location.redis_url == "redis://user:secret@redis.rl:6379?socket_timeout=3"
    assert (location.namespace, location.name) == ("default", "math")


def test_the_history_of_a_job_has_a_namespace() -> None:
    settings = settings_of({"method": "das", "history": "rediss://redis:1/team/math"}, {})
    assert settings is not None
    location = settings.location()
    assert location is not None
    assert (location.namespace, location.name, location.redis_url) == ("team", "math", "rediss://redis:1")


@pytest.mark.parametrize("history", ["redis://:secret@redis:6379/", "redis:6379/math", "redis://redis/a/b/c"])
def test_a_history_without_a_server_or_a_name_is_refused(history: str) -> None:
    with pytest.raises(EngineError, match="redis://redis:6379/math") as caught:
        drafting_args(history)
    assert "secret" not in str(caught.value)


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"histroy.*known settings are history, run"):
        drafting_args(histroy="redis://redis/math")


def test_other_methods_stay_as_they_are() -> None:
    assert settings_of(None, {}) is None
    assert settings_of({"method": "ngram", "num_speculative_tokens": 4}, {VARIABLE: "memory"}) is None


def test_a_variable_stands_for_the_configuration_that_a_trainer_does_not_pass() -> None:
    in_memory, shared = settings_of(None, {VARIABLE: "memory"}), settings_of(None, {VARIABLE: "redis://redis/math"})
    assert in_memory is not None
    assert shared is not None
    assert in_memory.location() is None
    assert shared.history == "redis://redis/math"


def test_a_variable_may_have_all_settings() -> None:
    settings = settings_of(None, {VARIABLE: '{"history": "redis://redis/math", "run": "math-7"}'})
    assert settings is not None
    assert (settings.history, settings.run) == ("redis://redis/math", "math-7")


def test_a_variable_that_is_no_json_is_refused_without_its_secrets() -> None:
    with pytest.raises(EngineError, match=r"DAS_DRAFTING is neither .* nor valid JSON \(Expecting") as refused:
        settings_of(None, {VARIABLE: f"{{'history': '{URL}'}}"})
    assert "secret" not in str(refused.value)


def test_the_arguments_that_vllm_logs_have_no_password() -> None:
    register()
    (module,) = logging_modules()
    logged = module.redact_sensitive_args({"model": "a model", **drafting_args(URL)})
    assert logged["speculative_config"]["method"] == "das"
    assert "redis.rl:6379/math" in str(logged)
    assert "secret" not in str(logged)
    assert module.redact_sensitive_args({"model": "a model"}) == {"model": "a model"}


@pytest.mark.parametrize("chosen", [{"runner": "pooling"}, {"worker_extension_cls": f"{EXTENSIONS}.EngineExtension"}])
def test_the_variable_does_not_apply_to_engines_that_pool_or_belong_to_a_job(
    chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "memory")
    assert _environment_of(SimpleNamespace(**{"runner": "auto", "worker_extension_cls": "", **chosen})) == {}
    others = SimpleNamespace(runner="auto", worker_extension_cls="trainer.Extension")
    assert settings_of(None, _environment_of(others)) == DropInSettings()


def test_a_policy_and_a_threshold_of_survival_reach_the_engine() -> None:
    settings = settings_of({"method": "das", "policy": "das-classes", "min-survival": 0.25}, {})
    assert settings is not None
    drafting = settings.drafting(engines=2)
    assert (drafting.policy, drafting.min_survival, drafting.engines) == ("das-classes", 0.25, 2)
    assert DropInSettings().drafting(1).min_survival == 0.0


@pytest.mark.parametrize("invalid", [{"policy": "das"}, {"min_survival": 1.5}, {"min_survival": float("nan")}])
def test_an_unknown_policy_or_survival_is_refused(invalid: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=next(iter(invalid))):
        drafting_args(**invalid)


def test_engines_are_of_one_run_unless_they_name_another() -> None:
    first, second = (settings_of({"method": "das"}, {}) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.run == second.run
    named = settings_of({"method": "das", "run": "run 7", "num-speculative-tokens": 8}, {})
    assert named is not None
    assert (named.run, named.num_speculative_tokens) == ("run 7", 8)


def applied(*, num_speculative_tokens: int = 16, is_cpu: bool = False, **chosen: Any) -> SimpleNamespace:
    """Return the arguments of an engine on a GPU that vLLM would give 1,024 requests, with those that a user sets."""
    args = SimpleNamespace(
        max_num_seqs=None,
        max_num_batched_tokens=None,
        enforce_eager=False,
        cudagraph_capture_sizes=None,
        max_cudagraph_capture_size=None,
        additional_config={"other": 1},
    )
    vars(args).update(chosen)
    settings = DropInSettings(num_speculative_tokens=num_speculative_tokens)
    apply(settings, args, default_max_num_seqs=1024, is_cpu=is_cpu)
    places = args.speculative_config["num_speculative_tokens"]
    assert args.additional_config[CONFIG_KEY]["num_speculative_tokens"] == places
    assert args.additional_config["other"] == 1
    return args


def test_a_step_has_places_for_the_drafts_of_all_requests_and_for_prompts() -> None:
    args = applied(max_num_seqs=256)
    assert args.speculative_config["num_speculative_tokens"] == 16
    assert args.max_num_batched_tokens == 256 * 17 + 8192
    assert args.cudagraph_capture_sizes == cuda_graph_sizes(256, 16) != []


def test_drafts_are_shorter_where_the_trainer_limits_the_tokens_of_a_step() -> None:
    args = applied(max_num_seqs=256, max_num_batched_tokens=4096)  # as TRL's GRPOTrainer does
    assert args.max_num_batched_tokens == 4096
    assert args.speculative_config["num_speculative_tokens"] == 11
    assert applied(max_num_seqs=1024, max_num_batched_tokens=1024).speculative_config["num_speculative_tokens"] == 1
    assert applied(max_num_seqs=16, max_num_batched_tokens=4096).speculative_config["num_speculative_tokens"] == 16


def test_drafts_are_shorter_where_vllm_chooses_the_number_of_requests() -> None:
    args = applied()
    assert args.max_num_seqs is None
    assert args.speculative_config["num_speculative_tokens"] == 7
    assert args.max_num_batched_tokens == 16384


def test_what_the_user_has_chosen_stays() -> None:
    args = applied(max_num_seqs=256, cudagraph_capture_sizes=[1, 2], max_num_batched_tokens=10_000)
    assert (args.cudagraph_capture_sizes, args.max_num_batched_tokens) == ([1, 2], 10_000)
    assert applied(max_num_seqs=256, enforce_eager=True).cudagraph_capture_sizes is None
    assert applied(max_num_seqs=256, is_cpu=True).max_num_batched_tokens is None


def configured(*, uses_v2: bool) -> SimpleNamespace:
    """Return what is read of vLLM's configuration."""
    return SimpleNamespace(
        use_v2_model_runner=uses_v2,
        parallel_config=SimpleNamespace(world_size=2, distributed_executor_backend="mp", pipeline_parallel_size=1),
        _get_v2_model_runner_unsupported_features=lambda: ["pooling", "KV sharing"],
    )


def test_v1_is_refused_on_gpus_unless_the_user_has_chosen_it() -> None:
    with pytest.raises(EngineError, match=r"pooling, KV sharing.*VLLM_USE_V2_MODEL_RUNNER=0"):
        check_runner(configured(uses_v2=False), {}, is_cpu=False)
    check_runner(configured(uses_v2=False), {"VLLM_USE_V2_MODEL_RUNNER": "0"}, is_cpu=False)
    check_runner(configured(uses_v2=False), {}, is_cpu=True)
    check_runner(configured(uses_v2=True), {}, is_cpu=False)


def test_v1_is_refused_with_several_pipeline_stages() -> None:
    config = configured(uses_v2=False)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(EngineError, match="cannot draft with 2 pipeline stages"):
        check_runner(config, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, is_cpu=True)
