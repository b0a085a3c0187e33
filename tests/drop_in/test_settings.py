"""What a user writes, and what vLLM gets."""

from __future__ import annotations

import pytest

from rollout_store.job.engines import EngineError
from rollout_worker import drafting_args
from rollout_worker.drop_in.settings import VARIABLE, settings_of

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


@pytest.mark.parametrize("history", ["redis://redis:6379", "redis:6379/math", "math"])
def test_a_history_without_a_server_or_a_name_is_refused(history: str) -> None:
    with pytest.raises(EngineError, match="redis://redis:6379/math"):
        drafting_args(history)


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


def test_engines_of_a_run_have_the_name_that_they_are_given() -> None:
    first, second = (settings_of({"method": "das"}, {}) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.run != second.run
    named = settings_of({"method": "das", "run": "run 7", "num-speculative-tokens": 8}, {})
    assert named is not None
    assert (named.run, named.num_speculative_tokens) == ("run 7", 8)
