"""The suffix index: drafts for running rollouts, taken from texts that contain the end of the rollout.

The index holds, for each *problem*, the responses of earlier *rollouts*, each with the *generation* of the weights that
sampled it. An open *request* is a response that is being generated; it is identified by a handle. After each
verification step, the caller reports the sampled tokens and receives the next drafts: for a whole batch in one call
with the engine's arrays (`Batch.step`), or with lists (`SuffixIndex.extend_batch` and `SuffixIndex.draft_batch`).

**Sources.** The end of the request's text is searched for in four *sources*:

- ``"history"``: the responses of earlier rollouts of the problem.
- ``"siblings"``: the responses, so far, of other open requests of the problem.
- ``"self"``: the request's own response and prompt.
- ``"cross_problem"``: recent rollouts of other problems, in a pool of limited size.

A response begins with a boundary token, so that the beginnings of responses match each other. In later turns of a
trajectory it begins with its *context* instead: the last tokens before the response, mostly the answer of the
environment. A context is matched but never drafted.

**Occurrences.** An occurrence is a position preceded by the same tokens as the end of the request's text. Its match
length is the number of equal tokens, at most `depth`. A draft uses:

- the 32 occurrences in the history with the longest matches;
- up to 24 occurrences in each of the request's response, its prompt and the responses of its siblings, where responses
  are searched only along chains of recent positions that share their last 2, 4 or 8 tokens. Of equally long matches,
  those that are followed by more tokens are used, since siblings that generate the same text at almost the same time
  provide only the next few tokens;
- 16 occurrences in the cross-problem pool, unless another match has at least 16 tokens, or at least 16 others have two
  tokens or more. Searching the pool takes as long as everything else.

**Probabilities.** The occurrences with the longest match determine the next token with some probability; otherwise
those with the next shorter match do, and so on, in one chain over all sources. Rollouts of the history that the request
has recently followed count as a source of their own (*anchored* occurrences): for each of the last 4 rollouts with a
match of 4 tokens or more, the best match within 32 tokens of the expected position is used for the next 64 tokens,
however short it is.

All probabilities are learned online. The chain is learned by expectation maximization, in buckets of source, match
length, number of votes, share of the votes for the top candidate, and index in the draft. Votes of finished rollouts
are weighted by their age (up to 1, 3, 7, more) and by their reward (unknown, below the mean of the problem, at least
the mean); the weights are learned by gradient ascent on the likelihood of the sampled tokens. A logistic regression
then calibrates the result by the token, the pair of the previous token and the token, the longest match and the index.

**Ages.** The newest generation in the index has the age 0. Any other one has the age 1 plus the number of generations
after it, and before the newest, in which the request's problem was sampled. The rollouts of the previous epoch
therefore have the age 1, whether an epoch has one weight version or a thousand.

**Drafts.** The most probable token is drafted, and the occurrences that propose it determine the next one. At the end
of a response that is being generated, or of a prompt, the occurrence has no vote any more. A draft ends
when its budget is used, after a stop token, where no occurrence has a next token, or before the first token whose
*survival* (the product of the probabilities up to it) is below ``min_survival``. The model also learns from that last
token, so that underestimated probabilities recover.

**Drafting ahead.** The model's forward pass leaves time between two calls of `Batch.step`. With ``draft_ahead``,
threads of the index use it: they learn from the sampled tokens, add them to the live texts, and then compute drafts for
what the verification may result in. The outcomes of a draft are the number of its tokens that are accepted, and the
token that is sampled after them: any that an occurrence proposes, or that follows one of the 256 (if there is time,
2,048) longest matches in the history. The threads share the requests, and each begins with those outcomes that are
worth most (their probability times what a token of the request saves), until the next step interrupts them. Of up to
512 prepared drafts of a request, together up to 1,024 tokens, only the tokens are stored; what is needed to learn from
the one that is used is computed again. The step looks up the drafts for the outcomes that have come true. It computes
the others with the help of those threads, and searches the pool for them only if the history has fewer than 32
occurrences. After a time limit, it leaves them to those threads, and these requests have no draft in this step. A
prepared draft does not see what siblings sampled in the same step, and the mixture does not learn from one that the
threads had no time for. Without ``draft_ahead``, the step does all this itself, and its results do not depend on
timing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rollout_store.history.records import TokenArray
from rollout_worker.drafting import _native
from rollout_worker.drafting._native import Draft
from rollout_worker.drafting.batch import Batch

__all__ = [
    "POOL_TOKENS",
    "SOURCES",
    "Draft",
    "DraftCounts",
    "LearnedState",
    "LookUps",
    "Occurrence",
    "Rollout",
    "Source",
    "SourceCounts",
    "SuffixIndex",
    "TokenArray",
    "TokenCodes",
    "TokenIds",
    "VerificationCounts",
    "VerifiedTokens",
]

Source: TypeAlias = Literal["history", "self", "siblings", "cross_problem"]

LearnedState: TypeAlias = bytes
"""The serialized parameters of an index, which another index of the same version can load."""

TokenCodes: TypeAlias = bytes
"""One byte for each token: 0 for one that was sampled, or 1 + index of its source in `SOURCES` for a draft token."""

SOURCES: tuple[Source, ...] = ("history", "self", "siblings", "cross_problem")

POOL_TOKENS = 2**20
"""Size of the cross-problem pool in engines, in tokens."""

TokenIds: TypeAlias = TokenArray | Sequence[int]
"""Token ids as arguments. A `TokenArray` is read in place and must not change during the call; a list is copied."""
_NO_LIMIT = 2**63 - 1


class Rollout(NamedTuple):
    """A finished response as `SuffixIndex.add` accepts it. A plain tuple of the same shape is accepted as well.

    `context` is the text before the response, in later turns of a trajectory; the index uses as much of it as it
    compares. `reward` is None if it is not known yet.
    """

    rollout_id: str
    generation: int
    tokens: TokenIds
    context: TokenIds = ()
    reward: float | None = None


class Occurrence(NamedTuple):
    """A position that is preceded by the same tokens as the end of a request's text."""

    source: Source
    match_length: int
    """Number of equal tokens, at most the depth of the index."""
    generation: int
    """Generation of the rollout; 0 if it is still running."""
    tokens: list[int]
    """The tokens that follow; fewer than requested at the end of a text."""
    reward: float | None = None
    """Reward of the rollout; in the cross-problem pool, its reward when it was added."""
    anchored: bool = False
    """Whether the request has recently followed this rollout of the history."""


class SourceCounts(NamedTuple):
    """Numbers of draft tokens that got most of their probability from one source, since the index was created."""

    drafted: int
    """Tokens of all drafts; those of `Batch.step` count when the next tokens of the request are reported."""
    verified: int
    """Tokens that the model has verified: all earlier tokens of the draft were accepted."""
    accepted: int
    """Verified tokens that the model sampled."""


class DraftCounts(NamedTuple):
    """Token counts of one request."""

    drafted: int
    """Draft tokens of `Batch.step` that were passed to verification."""
    accepted: int
    """Draft tokens that were accepted."""
    generated: int
    """Response tokens."""
    token_sources: TokenCodes = b""
    """Codes of the response tokens up to the last accepted draft token; tokens that `extend` has appended have 0."""
    drafted_by_source: tuple[int, ...] = (0,) * len(SOURCES)
    """The part of `drafted` that each of the `SOURCES` has proposed."""
    length_class: str = ""
    """The last length class of the rollout; '' if the draft policy determines none. The index does not know it."""


class VerifiedTokens(NamedTuple):
    """Draft tokens of `Batch.step` that were passed to verification."""

    verified: int
    accepted: int


class VerificationCounts(NamedTuple):
    """Draft tokens of all requests that were passed to verification, since the index was created."""

    by_source: dict[Source, VerifiedTokens]
    """By the source that gave a token the most probability."""
    by_position: list[VerifiedTokens]
    """By position of the draft, first position first; the last entry also counts all later positions."""


class LookUps(NamedTuple):
    """Numbers of requests that `Batch.step` was to draft for, by how it obtained the drafts."""

    found: int
    """Drafts that had been prepared."""
    computed: int
    """Drafts that were computed during the call."""
    omitted: int
    """Drafts that there was no time for, because of the time limit or because another thread used the request."""


class SuffixIndex(_native.SuffixIndex):
    """A suffix index with its open requests; see the module's documentation.

    **Threads.** Every method may be called from any thread. `add` and the `drop_*` methods build new data aside,
    without the GIL, and then replace the old data; a background thread merges segments. `Batch.step`, `extend`,
    `draft` and `draft_batch` never wait for any of these, and `open` and `close` wait at most for a look-up. With
    drafting ahead, calls for a request, other than `Batch.step`, may wait for the draft that is being computed for it,
    which takes some microseconds. Calls of `Batch.step` wait for each other. They keep the GIL, because another Python
    thread that takes it may keep it for longer than a step lasts. A draft uses the history as of the moment at which it
    is computed, even if the request was opened before a change.

    The methods that are not defined here are those of the native class; ``_native.pyi`` describes them.
    """

    def __init__(
        self,
        depth: int = 64,
        threads: int = 1,
        *,
        max_bytes: int | None = None,
        pool_tokens: int = 0,
        draft_ahead: bool = False,
    ) -> None:
        """Create an empty index.

        Args:
            depth: number of tokens that are compared, 1 to 255, including the boundary token.
            threads: number of threads that draft for a batch, including the caller's. With `draft_ahead`, as many
                draft between two calls of `Batch.step`. There should be a processor for each of these besides the
                caller's, because they wait actively for the next step, for up to 20 ms.
            max_bytes: limit for `bytes`, including open requests; None: no limit. Beyond the limit, the histories of
                the problems that were opened or added to least recently are evicted, those with open requests last, and
                finally the cross-problem pool. `take_evicted` returns the evicted problems, so that they can be added
                again when they are needed. New data counts while it is being built and may exceed the limit until the
                background thread evicts; `add` waits for that. Open requests, with their prompts and live texts, are
                never evicted. The histories and the pool may always use half of the limit, so if open requests need
                more than the other half, `bytes` may exceed the limit by what they need beyond it.
            pool_tokens: size of the cross-problem pool, which holds the last rollouts of all problems. One call of
                `add` contributes at most a sixteenth of it, or one rollout. Without a pool (0), the source
                ``"cross_problem"`` finds nothing.
            draft_ahead: whether `threads` threads of its own compute drafts between two calls of `Batch.step`, for the
                outcomes that the verification of the last drafts may have. The step then looks most drafts up and takes
                much less time, but what it returns depends on how much time those threads had. Besides, another thread
                indexes prompts of more than 256 tokens, which are searched when that is done.

        Raises:
            ValueError: for arguments out of range.
        """
        if threads < 1:
            raise ValueError(f"threads must be 1 or more, got {threads}")
        if not 1 <= depth <= 255:
            raise ValueError(f"depth must be 1 to 255 tokens, got {depth}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be 1 or more, or None for no limit, got {max_bytes}")
        if pool_tokens < 0:
            raise ValueError(f"pool_tokens must be 0 or more, got {pool_tokens}")
        super().__init__(depth, threads, max_bytes or 0, pool_tokens, draft_ahead)

    def set_rewards(self, problem: str, rewards: Mapping[str, float]) -> int:
        """Set rewards of a problem's rollouts by rollout id, and return how many of these rollouts exist.

        Unknown ids are ignored.

        Raises:
            TypeError: for keys or values of the wrong type; nothing is set.
            ValueError: for a reward that is not finite; nothing is set.
        """
        return super().set_rewards(problem, dict(rewards))

    def bytes(self, problem: str | None = None) -> int:
        """Return the memory in use, for one problem (its history and live texts) or for everything; 0 if unknown.

        The number covers what the index requested from the allocator, including the spare capacity of its arrays:
        texts, sorted positions, look-up tables, rollout ids, segments and requests. It does not cover the overhead of
        the allocator, buffers that exist only during a call, and the learned parameters, whose size is constant.
        Replaced history counts until the last draft that reads it has ended.
        """
        return self.total_bytes() if problem is None else self.problem_bytes(problem)

    def open(
        self,
        problem: str,
        prompt: TokenIds = (),
        sources: Collection[str] = SOURCES,
        *,
        context_length: int = 0,
        stop_tokens: TokenIds = (),
        undrafted_tokens: int = 0,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        max_draft_tokens: int | None = None,
    ) -> int:
        """Open a request with an empty response and return its handle.

        To resume a request, open it with its prompt and extend it by its tokens so far.

        Args:
            problem: its problem, which need not have any history.
            prompt: the text before the response, of any length. Only the source ``"self"`` searches it.
            sources: where to search for occurrences; not empty.
            context_length: number of tokens at the end of the prompt that are the response's context. This is 0 for the
                first turn of a trajectory, and the length of the text after the trajectory's prompt for later turns.
            stop_tokens: tokens after which nothing is sampled, so that a draft ends with them.
            undrafted_tokens: number of the first response tokens that get no drafts.
            min_tokens: while the response is shorter than this, a draft and the token after it end before this length.
            max_tokens: maximum length of the response, which a draft and the token after it do not exceed; None: no
                limit.
            max_draft_tokens: maximum length of a draft; None: no limit.

        Raises:
            ValueError: for a token id out of range, a negative number, or invalid `sources`.
        """
        unknown = set(sources) - set(SOURCES)
        if unknown or not sources or isinstance(sources, str):
            raise ValueError(f"sources must be some of {', '.join(map(repr, SOURCES))}, got {sources!r}")
        numbers = {
            "context_length": context_length,
            "undrafted_tokens": undrafted_tokens,
            "min_tokens": min_tokens,
            "max_tokens": _NO_LIMIT if max_tokens is None else max_tokens,
            "max_draft_tokens": _NO_LIMIT if max_draft_tokens is None else max_draft_tokens,
        }
        for name, number in numbers.items():
            if not 0 <= number <= _NO_LIMIT:
                raise ValueError(f"{name} must be 0 or more tokens, got {number}")
        _, *limits = numbers.values()
        used = [source in sources for source in SOURCES]
        return super().open(problem, prompt, context_length, used, stop_tokens, limits)

    def close(self, handle: int) -> DraftCounts:
        """Close a request, release its state and return its token counts.

        Raises:
            KeyError: for a handle that is not open.
        """
        return DraftCounts(*super().close(handle))

    def new_batch(
        self, token_ids: npt.NDArray[np.int32], drafts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]
    ) -> Batch:
        """Create a batch of requests. All arrays are C-contiguous and have one row for each place of an engine's batch.

        Args:
            token_ids: prompts and responses, which the engine keeps up to date, shape (places, maximum number).
            drafts: receives the drafts, shape (places, K). What follows a draft is undefined.
            lengths: receives the lengths of the drafts, shape (places,).

        Raises:
            TypeError: for an argument that is not an array of the given type and number of dimensions.
            ValueError: for arrays of different numbers of rows.
        """
        return Batch(self, token_ids, drafts, lengths)

    def look_ups(self) -> LookUps:
        """Return how many drafts `Batch.step` has looked up, computed and omitted since the index was created."""
        return LookUps(*super().look_ups())

    def draft(self, handle: int, budget: int, min_survival: float = 0.0) -> Draft:
        """Draft up to `budget` tokens for one request; see `draft_batch`."""
        return super().draft(handle, budget, min_survival)

    def draft_batch(
        self, handles: Sequence[int], budgets: Sequence[int], min_survival: float | Sequence[float] = 0.0
    ) -> list[Draft]:
        """Draft for many requests in one call without the GIL.

        Args:
            handles: handles of the requests.
            budgets: the maximum number of tokens for each; 0 returns an empty draft at no cost and changes nothing.
            min_survival: a draft ends before the first token whose survival is below this; one value from 0 to 1 for
                all requests, or one for each.

        Returns:
            A draft for each request, with lists of equal length: `tokens`, their `probabilities` of being accepted if
            the tokens before them are, the `sources` that give them the most probability, and their `ages` (the age of
            the newest finished rollout of that source that proposes the token, or None if the source has only running
            rollouts). `expected` is the expected number of accepted tokens according to the
            probabilities; `match_length` is the length of the longest match, 0 for an empty draft.

        Raises:
            KeyError: for a handle that is not open; nothing is drafted.
            ValueError: for a negative budget, a `min_survival` outside 0 to 1, or arguments of different lengths;
                nothing is drafted.
        """
        return super().draft_batch(handles, budgets, min_survival)

    def occurrences(self, handle: int, *, length: int = 16) -> list[Occurrence]:
        """Return the occurrences that a draft of this request would use, with up to `length` tokens of each.

        Raises:
            KeyError: for a handle that is not open.
            ValueError: for a negative `length`.
        """
        return [Occurrence(*row) for row in super().occurrences(handle, length)]

    def counters(self) -> dict[Source, SourceCounts]:
        """Return how many tokens were drafted, verified and accepted from each source."""
        return {source: SourceCounts(*counts) for source, *counts in super().counters()}

    def verified(self) -> int:
        """Return how many draft tokens of all sources were verified."""
        return sum(counts.verified for counts in self.counters().values())

    def verification_counts(self) -> VerificationCounts:
        """Return how many draft tokens of `Batch.step` were verified and accepted, by source and by position.

        A step counts when the next tokens of the request are reported, or when the request is closed. Other than
        `counters`, this counts a token that follows a rejected one as verified, and no token that was not passed to
        verification.
        """
        sources, positions = super().verification_counts()
        return VerificationCounts(
            {source: VerifiedTokens(*row) for source, row in zip(SOURCES, sources, strict=True)},
            [VerifiedTokens(*row) for row in positions],
        )
