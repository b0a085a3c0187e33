"""Requests of callers that know nothing of drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.messages import problem_id_of
from rollout_worker.drafting.index import DraftCounts
from rollout_worker.drop_in.recorder import FinishedRollout, Version
from rollout_worker.drop_in.requests import Requests

END = 2
PROMPT = [5, 6, 7]


@dataclass
class Params:
    """The fields of vLLM's ``SamplingParams`` that are read."""

    max_tokens: int | None = 10
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    eos_token_id: int | None = END
    extra_args: dict[str, Any] | None = None


@dataclass
class Feature:
    """An image of a prompt."""

    identifier: str


@dataclass
class Request:
    """The fields of vLLM's requests that are read."""

    req_id: str
    sampling_params: Params | None = field(default_factory=Params)
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(PROMPT))
    mm_features: list[Feature] = field(default_factory=list)


class Recorder:
    """Remembers what is recorded."""

    def __init__(self) -> None:
        self.versions: list[Version] = []
        self.problems: list[str] = []
        self.rollouts: list[FinishedRollout] = []
        self.begin_version, self.use, self.record = self.versions.append, self.problems.append, self.rollouts.append


@pytest.fixture
def recorder() -> Recorder:
    """A recorder without rollouts."""
    return Recorder()


@pytest.fixture
def requests(recorder: Recorder) -> Requests:
    """The requests of an engine."""
    return Requests(recorder, lambda _: {})  # type: ignore[arg-type]  # it has what is called


def test_a_request_belongs_to_the_problem_that_its_prompt_names(requests: Requests, recorder: Recorder) -> None:
    settings = requests.settings_of(Request("a"))
    assert settings is not None
    assert (settings.problem, settings.max_tokens) == (problem_id_of(PROMPT), 10)
    assert recorder.problems == [settings.problem]


def test_the_caller_may_name_another_problem(requests: Requests) -> None:
    settings = requests.settings_of(Request("a", Params(extra_args={"rollout_problem": "17"})))
    assert settings is not None
    assert settings.problem == "17"


def test_other_images_are_another_problem(requests: Requests) -> None:
    problems = set()
    for number, images in enumerate(([], ["x"], ["y"], ["x", "y"], ["x"])):
        settings = requests.settings_of(Request(str(number), mm_features=[Feature(image) for image in images]))
        assert settings is not None
        problems.add(settings.problem)
    assert len(problems) == 4


@pytest.mark.parametrize("request_", [Request("a", None), Request("a", prompt_token_ids=None)])
def test_requests_without_tokens_get_no_drafts(requests: Requests, request_: Request) -> None:
    assert requests.settings_of(request_) is None
    requests.finish("a", [1, 2, 3])


@given(
    response=st.lists(st.integers(0, 9), max_size=20),
    overshoot=st.lists(st.integers(0, 9), max_size=5),
    min_tokens=st.integers(0, 6),
    max_tokens=st.integers(1, 20),
)
def test_a_response_ends_where_vllm_ends_it(
    response: list[int], overshoot: list[int], min_tokens: int, max_tokens: int
) -> None:
    recorder = Recorder()
    requests = Requests(recorder, lambda _: {})  # type: ignore[arg-type]
    requests.settings_of(Request("a", Params(max_tokens, min_tokens)))
    expected: list[int] = []
    reason = "abort"
    sampled = response + overshoot
    for token in sampled:
        expected.append(token)
        if token == END and len(expected) >= min_tokens:
            reason = "stop"
            break
        if len(expected) == max_tokens:
            reason = "length"
            break
    requests.finish("a", np.array(PROMPT + sampled, np.int32))
    if expected:
        (rollout,) = recorder.rollouts
        assert (rollout.tokens.tolist(), rollout.finish_reason) == (expected, reason)
    else:
        assert not recorder.rollouts


def test_rollouts_of_an_evaluation_are_not_recorded(requests: Requests, recorder: Recorder) -> None:
    assert requests.settings_of(Request("a", Params(extra_args={"rollout_purpose": "eval"})))
    requests.finish("a", [*PROMPT, 4, END])
    assert not recorder.rollouts


def test_a_version_begins_with_the_first_request_after_its_weights(requests: Requests, recorder: Recorder) -> None:
    for request_id in "ab":
        requests.settings_of(Request(request_id))
    for _ in range(3):  # tensor by tensor
        requests.change_weights()
    requests.settings_of(Request("c"))
    requests.begin_step(40)
    requests.settings_of(Request("d"))
    for request_id in "abcd":
        requests.finish(request_id, [*PROMPT, END])
    first, second, named = Version(1), Version(2), Version(40, is_step=True)
    assert recorder.versions == [first, second, named]
    assert [rollout.version for rollout in recorder.rollouts] == [first, first, second, named]


def test_rollouts_of_equal_request_ids_are_different_ones(requests: Requests, recorder: Recorder) -> None:
    """Callers may choose the ids of vLLM's requests, and use them again after a restart."""
    for _ in range(2):
        requests.settings_of(Request("a"))
        requests.finish("a", [*PROMPT, END])
    assert len({rollout.rollout_id for rollout in recorder.rollouts}) == 2


def test_the_source_of_each_token_is_recorded(recorder: Recorder) -> None:
    counts = DraftCounts(drafted=3, accepted=1, generated=4, token_sources=b"\0\1")
    requests = Requests(recorder, lambda _: {"a": counts})  # type: ignore[arg-type]
    requests.settings_of(Request("a"))
    requests.finish("a", [*PROMPT, 4, 4, 4, END])
    assert recorder.rollouts[0].draft_sources == b"\0\1\0\0"
