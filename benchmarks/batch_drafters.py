"""A batch of recorded rollouts, and the drafters of :mod:`benchmarks.hot_path`: an engine's loop, and two peers.

Rollouts start in groups of :data:`GROUP` rollouts of one problem. One that has ended is replaced by the next one. A
draft token is accepted if it agrees with the recording. Only the first turn of a trajectory is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.replay import END_OF_TURN, with_end_of_turn
from benchmarks.rollout_bench.policies import MAX_BATCHED_TOKENS
from benchmarks.suffix_drafters import PEERS_DIRECTORY
from benchmarks.traces import Problem, Tokens, Trajectory
from rollout_api.manifest.spec import PolicyName
from rollout_store.history.known_lengths import KnownLengths
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.index import POOL_TOKENS, LookUps
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.engine.drafting_loop import DraftingLoop, EngineArrays
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits
from rollout_worker.policy.named_policies import make_policy
from rollout_worker.policy.step_cost import H100_7B

GROUP = 8
"""Rollouts of one problem that start together."""
_PADDING = -2
"""Follows the recorded tokens; no drafter drafts it."""
MAX_DRAFT = 16
"""Maximum tokens of a draft, a job's default."""
VLLM_TREE_DEPTH = 24
"""vLLM's default depth of the suffix trees."""
_NO_CONTEXT = np.empty(0, np.uint32)


class BatchDrafter(Protocol):
    """A drafter for a batch with a fixed number of places; one rollout occupies each of them."""

    name: str
    drafts: npt.NDArray[np.int64]
    """The tokens of the drafts, shape (places, maximum draft length)."""
    lengths: npt.NDArray[np.int32]
    """The lengths of the drafts, shape (places,)."""

    def open(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """Begin a rollout of *tokens*; the drafter may use only their number."""

    def close(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """End the rollout at a place; its tokens become history."""

    def before_step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """Bring the arguments of :meth:`step` into the form that an engine passes."""

    def step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """Draft for all places. This is the critical path of a decoding step.

        Args:
            sampled: the sampled tokens, shape (places, maximum draft length + 1).
            num_sampled: how many tokens of each row are valid, shape (places,).
        """

    def after_step(self, num_sampled: npt.NDArray[np.int32], verified: npt.NDArray[np.int32]) -> None:
        """Do what is not needed before the forward pass begins.

        Args:
            num_sampled: how many tokens the last step sampled at each place, shape (places,).
            verified: how many draft tokens it verified, shape (places,).
        """


def first_turn(trajectory: Trajectory) -> Tokens:
    """Return the first turn of the model, with the token that ends it."""
    return with_end_of_turn(next(segment.tokens for segment in trajectory.segments if segment.generated))


def in_groups(problems: Sequence[Problem]) -> Iterator[Trajectory]:
    """Yield the evaluated rollouts in groups of :data:`GROUP` rollouts of one problem, again and again."""
    groups = [
        problem.evaluated[start : start + GROUP]
        for start in range(0, max(len(problem.evaluated) for problem in problems), GROUP)
        for problem in problems
    ]
    for group in cycle(groups):
        yield from group


class RecordedBatch:
    """The rollouts that run at the same time."""

    def __init__(self, problems: Sequence[Problem], size: int, max_draft: int) -> None:
        self._waiting = in_groups(problems)
        longest = max(len(first_turn(trajectory)) for problem in problems for trajectory in problem.evaluated)
        self._recorded = np.full((size, longest + max_draft + 1), _PADDING, np.int64)
        self._lengths = np.zeros(size, np.int64)
        self._position = np.zeros(size, np.int64)
        self._prompt_tokens = np.zeros(size, np.int64)
        self._columns = np.arange(max_draft + 1)
        self._rollouts: list[tuple[Trajectory, Tokens]] = []
        self.sampled = np.zeros((size, max_draft + 1), np.int64)
        """The tokens that the last step sampled, shape (places, maximum draft length + 1)."""
        self.num_sampled = np.zeros(size, np.int32)
        """How many of them are valid, shape (places,)."""

    @property
    def context_tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens of prompt and response of each rollout, shape (places,)."""
        return self._prompt_tokens + self._position

    def start(self, drafter: BatchDrafter) -> None:
        """Fill all places."""
        for place in range(len(self._lengths)):
            self._rollouts.append(self._start(place, drafter))

    def _start(self, place: int, drafter: BatchDrafter) -> tuple[Trajectory, Tokens]:
        trajectory = next(self._waiting)
        tokens = first_turn(trajectory)
        self._recorded[place] = _PADDING
        self._recorded[place, : len(tokens)] = tokens
        self._lengths[place], self._position[place] = len(tokens), 0
        self._prompt_tokens[place] = len(trajectory.prompt)
        drafter.open(place, trajectory, tokens)
        return trajectory, tokens

    def verify(self, drafts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> None:
        """Sample the accepted draft tokens of each rollout and one more.

        Args:
            drafts: draft tokens, shape (places, maximum draft length).
            lengths: how many of them are valid, shape (places,).
        """
        recorded = np.take_along_axis(self._recorded, self._position[:, None] + self._columns, axis=1)
        is_accepted = (recorded[:, :-1] == drafts) & (self._columns[:-1] < lengths[:, None])
        accepted = np.logical_and.accumulate(is_accepted, axis=1).sum(axis=1)
        self.sampled[:] = recorded
        self.num_sampled[:] = np.minimum(accepted + 1, self._lengths - self._position)
        self._position += self.num_sampled

    def replace_ended(self, drafter: BatchDrafter) -> npt.NDArray[np.int64]:
        """Replace the rollouts that have ended, and return their places, shape (ended rollouts,)."""
        ended = np.flatnonzero(self._position >= self._lengths)
        for place in ended.tolist():
            drafter.close(place, *self._rollouts[place])
            self._rollouts[place] = self._start(place, drafter)
        return ended


class _Drafts:
    """The arrays that every drafter fills in."""

    def __init__(self, size: int) -> None:
        self.drafts = np.full((size, MAX_DRAFT), -1, np.int64)
        self.lengths = np.zeros(size, np.int32)

    def before_step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""


class LoopDrafter(_Drafts):
    """The drafting loop of an engine: the index with all sources, and a draft policy."""

    name = "das-rollout"

    def __init__(
        self,
        problems: Sequence[Problem],
        size: int,
        longest: int,
        *,
        threads: int,
        draft_ahead: bool = True,
        policy: PolicyName = "marginal",
    ) -> None:
        """Create a drafter with the problems' history for rollouts of at most *longest* tokens."""
        super().__init__(size)
        lengths = KnownLengths()
        self.index = SuffixIndex(threads=threads, pool_tokens=POOL_TOKENS, draft_ahead=draft_ahead)
        for problem in problems:
            turns = [first_turn(trajectory) for trajectory in problem.history]
            rollouts = [(f"{problem.name}/{number}", 0, turn, _NO_CONTEXT) for number, turn in enumerate(turns)]
            self.index.add(problem.name, rollouts)
            lengths.add(problem.name, [(0, len(turn), False) for turn in turns])
        self.index.wait_idle()
        # A step does not last as long as in an engine, so that it must neither change the budgets nor disable drafts.
        controller = DraftController(
            make_policy(policy, DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths), H100_7B, governed=False
        )
        self._token_ids = np.zeros((size, longest + 2 * MAX_DRAFT), np.int32)
        arrays = EngineArrays(self._token_ids, self.drafts, self.lengths)
        self.loop = DraftingLoop(self.index, controller, arrays)
        self._request_ids = [""] * size
        self._num_tokens, self._places = np.zeros(size, np.int32), np.arange(size)
        self._verified = np.zeros(size, np.int64)
        self._num_started = 0

    def open(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """See :class:`BatchDrafter`."""
        self._num_started += 1
        request_id, prompt_tokens = f"started/{self._num_started}", len(trajectory.prompt)
        settings = DraftSettings(request_id, trajectory.problem, max_tokens=len(tokens) + MAX_DRAFT)
        self.loop.add(request_id, settings, trajectory.prompt, [END_OF_TURN])
        self._request_ids = [*self._request_ids[:place], request_id, *self._request_ids[place + 1 :]]
        self._token_ids[place, :prompt_tokens] = trajectory.prompt
        self._num_tokens[place] = prompt_tokens

    def close(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """See :class:`BatchDrafter`."""
        request_id = self._request_ids[place]
        self.loop.remove([request_id])
        self.loop.take_counts([request_id])
        self.index.add(trajectory.problem, [(request_id, 1, tokens, _NO_CONTEXT)])

    def before_step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """Write the sampled tokens where the sampler writes them."""
        self.loop.plan(self._request_ids)  # which an engine does while it reads the prompts of new rollouts
        self._verified = self.lengths.astype(np.int64)
        for column in range(int(num_sampled.max())):
            written = np.flatnonzero(num_sampled > column)
            self._token_ids[written, self._num_tokens[written] + column] = sampled[written, column]
        self._num_tokens = self._num_tokens + num_sampled

    def step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        self.loop.skip_step()
        self.loop.draft(self._request_ids, self._num_tokens, self._places, self._verified)

    def after_step(self, num_sampled: npt.NDArray[np.int32], verified: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        self.loop.plan(self._request_ids)

    def look_ups(self) -> LookUps:
        """See :meth:`SuffixIndex.look_ups`."""
        return self.index.look_ups()


class SuffixProposerDrafter(_Drafts):
    """vLLM's suffix proposer, which runs arctic-inference's suffix trees on the CPU, with its default settings.

    Requests are started and stopped between steps, although vLLM does so within the step.
    """

    name = "vLLM's suffix proposer (arctic-inference)"

    def __init__(self, problems: Sequence[Problem], size: int, longest: int) -> None:
        """Create a drafter with the problems' history for rollouts of at most *longest* tokens."""
        super().__init__(size)
        if PEERS_DIRECTORY not in sys.path:
            sys.path.append(PEERS_DIRECTORY)
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        speculative = SimpleNamespace(
            num_speculative_tokens=MAX_DRAFT,
            suffix_decoding_max_tree_depth=VLLM_TREE_DEPTH,
            suffix_decoding_max_spec_factor=1.0,
            suffix_decoding_min_token_prob=0.1,
            suffix_decoding_max_cached_requests=10_000,
        )
        config: Any = SimpleNamespace(
            speculative_config=speculative, model_config=SimpleNamespace(max_model_len=longest + MAX_DRAFT)
        )
        self._proposer = SuffixDecodingProposer(config)
        for problem in problems:
            for number, trajectory in enumerate(problem.history):
                self._add(f"{problem.name}/{number}", trajectory.prompt, first_turn(trajectory))
        self._num_started = 0
        self._batch: Any = SimpleNamespace(
            req_ids=[""] * size,
            req_id_to_index={},
            num_tokens_no_spec=np.zeros(size, np.int32),
            num_prompt_tokens=np.zeros(size, np.int32),
            token_ids_cpu=np.zeros((size, longest + MAX_DRAFT), np.int32),
        )

    def _add(self, request_id: str, prompt: Tokens, tokens: Tokens) -> None:
        cache = self._proposer.suffix_cache
        cache.start_request(request_id, prompt.astype(np.int32))
        cache.add_active_response(request_id, tokens.astype(np.int32))
        cache.stop_request(request_id)

    def open(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """See :class:`BatchDrafter`."""
        self._num_started += 1
        request_id = f"started/{self._num_started}"
        self._proposer.suffix_cache.start_request(request_id, trajectory.prompt.astype(np.int32))
        batch, length = self._batch, len(trajectory.prompt)
        batch.req_ids[place] = request_id
        batch.req_id_to_index[request_id] = place
        batch.token_ids_cpu[place, :length] = trajectory.prompt
        batch.num_tokens_no_spec[place] = batch.num_prompt_tokens[place] = length

    def close(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """See :class:`BatchDrafter`. The tree holds the response already."""
        request_id = self._batch.req_ids[place]
        self._proposer.suffix_cache.stop_request(request_id)
        del self._batch.req_id_to_index[request_id]

    def step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        drafts = self._proposer.propose(MAX_DRAFT, self._batch, self._sampled)
        self._proposed = drafts

    def before_step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        batch = self._batch
        self._sampled = [row[:count].tolist() for row, count in zip(sampled, num_sampled.tolist(), strict=True)]
        for place, tokens in enumerate(self._sampled):
            start = int(batch.num_tokens_no_spec[place])
            batch.token_ids_cpu[place, start : start + len(tokens)] = tokens
            batch.num_tokens_no_spec[place] += len(tokens)

    def after_step(self, num_sampled: npt.NDArray[np.int32], verified: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        for place, draft in enumerate(self._proposed):
            self.drafts[place, : len(draft)] = draft
            self.lengths[place] = len(draft)


class SuffixGpuDrafter(_Drafts):
    """suffix-gpu's drafter on the CPU, where it runs PyTorch code instead of its Triton kernels.

    Settings are the package's defaults, with the index over earlier responses enabled and vLLM's cut at a token
    probability of 0.1. Running responses are not ingested.
    """

    name = "suffix-gpu on the CPU"

    def __init__(self, problems: Sequence[Problem], size: int, longest: int) -> None:
        """Create a drafter with the problems' history for rollouts of at most *longest* tokens."""
        super().__init__(size)
        if PEERS_DIRECTORY not in sys.path:
            sys.path.append(PEERS_DIRECTORY)
        import torch
        from suffix_gpu.proposer import SuffixGPUDrafter

        self._torch: Any = torch
        self._drafter: Any = SuffixGPUDrafter(
            MAX_DRAFT, enable_global=True, max_spec_factor=1.0, min_token_prob=0.1, coordinated_rebuild=False
        )
        self._token_ids = torch.zeros((size, longest + MAX_DRAFT), dtype=torch.int32)
        self._num_tokens = torch.zeros(size, dtype=torch.int32)
        turns = [first_turn(trajectory) for problem in problems for trajectory in problem.history]
        rows = [torch.from_numpy(turn.astype(np.int32)) for turn in turns]
        self._drafter.harvest_rows(rows, [len(row) for row in rows])
        self._drafter.poll()

    def open(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """See :class:`BatchDrafter`."""
        length = len(trajectory.prompt)
        self._token_ids[place, :length] = self._torch.from_numpy(trajectory.prompt.astype(np.int32))
        self._num_tokens[place] = length

    def close(self, place: int, trajectory: Trajectory, tokens: Tokens) -> None:
        """See :class:`BatchDrafter`."""
        self._drafter.harvest_rows([self._torch.from_numpy(tokens.astype(np.int32))], [len(tokens)])

    def before_step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        valid = np.arange(sampled.shape[1]) < num_sampled[:, None]
        self._sampled = self._torch.from_numpy(np.where(valid, sampled, -1).astype(np.int32))

    def step(self, sampled: npt.NDArray[np.int64], num_sampled: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        self._proposed = self._drafter.propose_with_update(self._num_tokens, self._token_ids, self._sampled)

    def after_step(self, num_sampled: npt.NDArray[np.int32], verified: npt.NDArray[np.int32]) -> None:
        """See :class:`BatchDrafter`."""
        drafts, lengths, self._num_tokens = self._proposed
        self.drafts[:], self.lengths[:] = drafts.numpy(), lengths.numpy()
        self._drafter.poll()
