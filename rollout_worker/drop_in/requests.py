"""The requests of an engine whose caller knows nothing of drafting."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_api.protocol.messages import problem_id_of
from rollout_store.history.records import TokenArray
from rollout_worker.drafting.index import DraftCounts
from rollout_worker.drop_in.recorder import FinishedRollout, RolloutRecorder, Version
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.sampling_params import end_token_ids

PROBLEM, PURPOSE = "rollout_problem", "rollout_purpose"
"""Keys of ``extra_args`` (``vllm_xargs`` over HTTP), with the meaning that they have for a job."""
_EVALUATION = "eval"


class _Request(NamedTuple):
    problem: str
    version: Version
    prompt_tokens: int
    end_tokens: frozenset[int]
    min_tokens: int
    max_tokens: int
    is_recorded: bool


class Requests:
    """Decides what each request is drafted from, and records its rollout when it has ended.

    A request without settings of its own belongs to the problem that its prompt names, like the requests of a job.
    """

    def __init__(self, recorder: RolloutRecorder, take_counts: Callable[[list[str]], dict[str, DraftCounts]]) -> None:
        self._recorder, self._take_counts = recorder, take_counts
        self._requests: dict[str, _Request] = {}
        self._version = Version(0)
        self._has_new_weights = True

    @property
    def version(self) -> int:
        """The version of the weights that sample the last requests."""
        return self._version.number

    def change_weights(self) -> None:
        """Begin a new version with the next request. A trainer loads the tensors of one version in many calls."""
        self._has_new_weights = True

    def begin_step(self, step: int) -> None:
        """Begin the version of a training step that the trainer names."""
        self._begin_version(Version(step, is_step=True))

    def _begin_version(self, version: Version) -> None:
        self._version, self._has_new_weights = version, False
        self._recorder.begin_version(version)

    def settings_of(self, request: Any) -> DraftSettings | None:
        """Return the drafting settings of a request that begins; None if it gets no drafts."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or not prompt:
            return None
        if self._has_new_weights:
            self._begin_version(self._version._replace(number=self._version.number + 1))
        extra = params.extra_args or {}
        images = [str(feature.identifier) for feature in request.mm_features or ()]
        problem = str(extra.get(PROBLEM) or problem_id_of(prompt, images))
        limit = sys.maxsize if params.max_tokens is None else params.max_tokens
        ends = end_token_ids(params)
        self._requests[request.req_id] = _Request(
            problem,
            self._version,
            len(prompt),
            frozenset(ends),
            params.min_tokens,
            limit,
            is_recorded=_is_recorded(extra),
        )
        self._recorder.use(problem)
        return DraftSettings(request.req_id, problem, max_tokens=limit, min_tokens=params.min_tokens)

    def finish(self, request_id: str, tokens: Sequence[int] | TokenArray) -> None:
        """Record a request that has ended, with its prompt and response and what the engine may have sampled since."""
        request = self._requests.pop(request_id, None)
        counts = self._take_counts([request_id]).get(request_id)
        if request is None or not request.is_recorded:
            return
        response, reason = _response_of(request, np.asarray(tokens[request.prompt_tokens :], np.uint32))
        if len(response):
            sources = b""
            if counts is not None and counts.drafted:
                sources = counts.token_sources[: len(response)].ljust(len(response), b"\0")
            # Ids of requests may occur again, in other engines or after a restart.
            rollout_id = f"{request_id}/{uuid.uuid4().hex}"
            self._recorder.record(
                FinishedRollout(rollout_id, request.problem, request.version, response, reason, sources)
            )


def _is_recorded(extra: Mapping[str, Any]) -> bool:
    return extra.get(PURPOSE) != _EVALUATION


def _response_of(request: _Request, tokens: TokenArray) -> tuple[TokenArray, str]:
    """Return a response up to its end, and why it has ended.

    With asynchronous scheduling, an engine samples further tokens before it knows that the response has ended.
    """
    tokens = tokens[: request.max_tokens]
    ends = np.flatnonzero(np.isin(tokens, list(request.end_tokens)))
    ends = ends[ends + 1 >= request.min_tokens]
    if len(ends):
        return tokens[: ends[0] + 1], "stop"
    return tokens, "length" if len(tokens) == request.max_tokens else "abort"
