"""Prompts with their settings, and multi-turn trajectories."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, TypedDict, TypeVar

from typing_extensions import Self

from rollout_api.errors import InvalidRequestError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import DraftMode, Partial, Purpose, Rollout, problem_id_of
from rollout_api.str_enum import StrEnum

_Choice = TypeVar("_Choice", bound=StrEnum)


class SamplingOverrides(TypedDict, total=False):
    """Fields of :class:`Sampling`; each overrides the job's ``spec.sampling``."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    allowed_token_ids: list[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    structured_outputs: dict[str, Any]
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    top_prompt_logprobs: int
    kept_tokens: bool
    routed_experts: bool
    seed: int | None


@dataclass(frozen=True)
class Prompt:
    """A prompt to be sampled ``n`` times.

    The fields have the same meaning as in :class:`~rollout_api.protocol.messages.RolloutRequest`.
    """

    token_ids: Sequence[int]
    """Token ids of the prompt."""
    problem_id: str = ""
    """Id under which the history keeps the rollouts, for drafts of later ones; default: a hash of the token ids and the
    images."""
    sampling: Sampling | SamplingOverrides | Mapping[str, Any] = field(default_factory=dict)
    """Settings that override the job's."""
    purpose: Purpose = Purpose.TRAIN
    """Whether the rollouts are for training, or for an evaluation that stays out of the history."""
    priority: int = 0
    """Priority; requests with a higher one start earlier."""
    deadline_seconds: float | None = None
    """Seconds after the request's arrival at which its rollouts end with the tokens sampled so far; default: none."""
    weight_version: int | None = None
    """Weight version that samples all tokens; default: the newest."""
    min_weight_version: int | None = None
    """Oldest weight version that may sample a token; default: any."""
    max_staleness: int | None = None
    """How many weight versions tokens may be behind the newest one at most when an engine starts or resumes a
    rollout; default: any. See :class:`~rollout_api.protocol.messages.RolloutRequest`."""
    trajectory_id: str | None = None
    """Id of the multi-turn trajectory that the prompt continues. :meth:`~rollout_api.Step.turn` sets it itself."""
    turn: int = 0
    """Number of the turn within its trajectory."""
    prefix: Partial | None = None
    """Beginning of the response, to be continued; see :meth:`continue_from`."""
    draft_mode: DraftMode = DraftMode.HISTORY
    """Where drafts may come from."""
    draft_budget: int | None = None
    """Maximum number of draft tokens per verification step; default: the job's."""
    half_logprobs: bool = False
    """Whether log-probabilities are returned as float16 instead of float32."""
    images: Sequence[bytes] = ()
    """Encoded images, for example the content of PNG or JPEG files. For each, the token ids contain what the chat
    template of the model writes for an image; the engine replaces it by as many tokens as the image has."""
    image_positions: Sequence[tuple[int, int]] | None = None
    """If the token ids contain all tokens of the images already, as those that a processor of transformers returns:
    for each image, the index of its first token and the number of its tokens; default: they do not."""

    def continue_from(self, rollout: Rollout) -> Self:
        """Return a prompt that requests the rest of an interrupted rollout: one that was cancelled or hit its deadline.

        The new rollout (one sample) begins with the tokens of the interrupted one, and its weight spans cover both. It
        is not pinned to a weight version, because its beginning was sampled by an earlier one.

        Raises:
            InvalidRequestError: *rollout* was not interrupted.
        """
        if rollout.finish_reason.complete:
            raise InvalidRequestError(f"rollout {rollout.rollout_id} is complete; there is nothing to continue")
        return replace(
            self, sampling=overrides_of(self.sampling) | {"n": 1}, weight_version=None, prefix=partial_of(rollout)
        )


def partial_of(rollout: Rollout) -> Partial | None:
    """Return a rollout's response as the prefix of a new request; None if it has no tokens."""
    if not rollout.token_ids:
        return None
    return rollout.since(0)


def make_prompts(
    prompts: Sequence[Sequence[int]],
    problem_ids: Sequence[str] | None,
    sampling: Sampling | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    purpose: Purpose | str,
    priority: int,
    deadline_seconds: float | None,
    weight_version: int | None,
    min_weight_version: int | None,
    max_staleness: int | None,
    draft_mode: DraftMode | str,
) -> list[Prompt]:
    """Return the prompts for the arguments of ``generate``.

    Raises:
        InvalidRequestError: the arguments are inconsistent.
    """
    if problem_ids is not None and len(problem_ids) != len(prompts):
        raise InvalidRequestError(f"{len(problem_ids)} problem_ids for {len(prompts)} prompts")
    return [
        Prompt(
            tokens,
            problem_id=problem_ids[index] if problem_ids is not None else "",
            sampling=overrides_of(sampling or {}) | dict(overrides),
            purpose=parse_choice(Purpose, purpose, "purpose"),
            priority=priority,
            deadline_seconds=deadline_seconds,
            weight_version=weight_version,
            min_weight_version=min_weight_version,
            max_staleness=max_staleness,
            draft_mode=parse_choice(DraftMode, draft_mode, "draft_mode"),
        )
        for index, tokens in enumerate(prompts)
    ]


def parse_choice(kind: type[_Choice], value: str, name: str) -> _Choice:
    """Convert *value*, given for the argument *name*, to the enumeration *kind*.

    Raises:
        InvalidRequestError: *kind* has no such value.
    """
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequestError(f"{name}: {value!r} is not one of {', '.join(kind)}") from None


def token_list(tokens: Sequence[int], where: str) -> list[int]:
    """Return token ids as a list of integers, from any sequence, array or tensor of them.

    Args:
        tokens: token ids.
        where: name of the prompt in errors.

    Raises:
        InvalidRequestError: *tokens* is not a sequence of integers.
    """
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        if isinstance(plain, str | bytes):
            raise TypeError(f"{type(plain).__name__} was given")
        return [operator.index(token) for token in plain]
    except TypeError as error:
        raise InvalidRequestError(f"{where}: token ids must be a sequence of integers ({error})") from None


def images_by_hash(images: Sequence[bytes], where: str) -> tuple[list[str], dict[str, bytes]]:
    """Return the SHA-256 of each image, in hex, and the images by hash.

    Args:
        images: encoded images.
        where: name of the prompt in errors.

    Raises:
        InvalidRequestError: *images* is not a sequence of bytes.
    """
    hashes, by_hash = [], {}
    if isinstance(images, bytes | bytearray | memoryview | str):
        raise InvalidRequestError(
            f"{where}: images must be a sequence of encoded images; pass [image] for a single one"
        )
    for index, image in enumerate(images):
        if not isinstance(image, bytes | bytearray | memoryview) or not image:
            raise InvalidRequestError(
                f"{where}: image {index} is {type(image).__name__}; pass the bytes of a PNG, JPEG or similar file"
                if image
                else f"{where}: image {index} is empty"
            )
        data = bytes(image)
        hashes.append(digest := sha256(data).hexdigest())
        by_hash[digest] = data
    return hashes, by_hash


def overrides_of(sampling: Sampling | Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are set explicitly."""
    if isinstance(sampling, Sampling):
        return sampling.model_dump(include=sampling.model_fields_set)
    return dict(sampling)


class Trajectory:
    """A conversation between the model and an environment, begun with ``step.trajectory(prompt)``::

        trajectory = step.trajectory(prompt)
        while not done:
            [rollout] = await step.turn([trajectory])
            observation, done = environment(rollout.token_ids)
            trajectory.observe(observation)

    Args:
        trajectory_id: id that is unique within the job.
        prompt: token ids of the prompt.
        problem_id: problem id; default: a hash of *prompt* and *images*.
        purpose: purpose of all rollouts of the trajectory.
        images: encoded images of the prompt; see :class:`Prompt`.

    Raises:
        InvalidRequestError: *prompt* is empty or not a sequence of integers, or *images* are not encoded images.
    """

    def __init__(
        self,
        trajectory_id: str,
        prompt: Sequence[int],
        *,
        problem_id: str = "",
        purpose: Purpose = Purpose.TRAIN,
        images: Sequence[bytes] = (),
    ) -> None:
        self.trajectory_id = trajectory_id
        """Id of the trajectory."""
        self.prompt_token_ids = token_list(prompt, f"trajectory {trajectory_id}")
        """Token ids of the prompt."""
        if not self.prompt_token_ids:
            raise InvalidRequestError(f"trajectory {trajectory_id}: no token ids")
        hashes, _ = images_by_hash(images, f"trajectory {trajectory_id}")
        self.images = list(images)
        """Encoded images of the prompt and of the environment."""
        self.problem_id = problem_id or problem_id_of(self.prompt_token_ids, hashes)
        """Problem id of all turns."""
        self.purpose = purpose
        """Purpose of all turns."""
        self.response_token_ids: list[int] = []
        """Token ids after the prompt, both the model's and the environment's."""
        self.mask: list[int] = []
        """For each response token, 1 if the model sampled it and 0 if it came from the environment."""
        self._logprobs: list[float] | None = []
        self.turns: list[Rollout] = []
        """The model's turns."""

    @property
    def context(self) -> list[int]:
        """Token ids of the prompt and the response so far, which are the prompt of the next turn."""
        return self.prompt_token_ids + self.response_token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """Behavior log-probability of each response token, 0 for the environment's tokens; None if a turn was sampled
        without ``sampling.logprobs``.
        """
        return self._logprobs

    @property
    def rollout_ids(self) -> list[str]:
        """Rollout ids of the turns, for ``report_rewards``."""
        return [turn.rollout_id for turn in self.turns]

    def append(self, rollout: Rollout) -> None:
        """Append a turn of the model. ``step.turn`` does this."""
        self.turns.append(rollout)
        self._extend(rollout.token_ids, rollout.logprobs if rollout.token_ids else [], 1)

    def observe(self, token_ids: Sequence[int], *, images: Sequence[bytes] = ()) -> None:
        """Append tokens from the environment, with the *images* that some of them stand for; see :class:`Prompt`.

        Raises:
            InvalidRequestError: *token_ids* is not a sequence of integers, or *images* are not encoded images.
        """
        where = f"trajectory {self.trajectory_id}, after turn {len(self.turns) - 1}"
        tokens = token_list(token_ids, where)
        images_by_hash(images, where)
        self.images += images
        self._extend(tokens, [0.0] * len(tokens), 0)

    def _extend(self, tokens: Sequence[int], logprobs: Sequence[float] | None, mask: int) -> None:
        self.response_token_ids += tokens
        if logprobs is None:
            self._logprobs = None
        elif self._logprobs is not None:
            self._logprobs += logprobs
        self.mask += [mask] * len(tokens)
