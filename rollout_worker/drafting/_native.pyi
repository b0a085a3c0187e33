# Type stubs of the C++ extension, whose source is in native/.

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

_TokenIds: TypeAlias = npt.NDArray[np.uint32] | Sequence[int]

class Draft:
    @property
    def tokens(self) -> list[int]: ...
    @property
    def probabilities(self) -> list[float]: ...
    @property
    def sources(self) -> list[Literal["history", "self", "siblings", "cross_problem"]]: ...
    @property
    def ages(self) -> list[int | None]: ...
    @property
    def expected(self) -> float: ...
    @property
    def match_length(self) -> int: ...
    def __len__(self) -> int: ...

class SuffixIndex:
    # Methods that return Any, or take it, are overridden by rollout_worker.drafting.index.SuffixIndex.

    def __init__(self, depth: int, threads: int, max_bytes: int, pool_tokens: int, draft_ahead: bool) -> None: ...
    def add(
        self,
        problem: str,
        rollouts: Iterable[
            tuple[str, int, _TokenIds]
            | tuple[str, int, _TokenIds, _TokenIds]
            | tuple[str, int, _TokenIds, _TokenIds, float | None]
        ],
    ) -> int:
        """Add finished responses to a problem's history and return how many were new.

        All become visible to drafts at the same time. A rollout id that the problem already has, or that occurred
        earlier in the same call, is ignored, whatever its tokens are. An empty response is recorded, but contributes
        nothing to drafts. A generation is a signed 64-bit integer.

        Raises:
            ValueError: for a token id out of range, an array that is not one-dimensional, or a reward that is not
                finite; nothing is added.
            TypeError: for a rollout that is not (str, int, token ids[, token ids[, reward]]); nothing is added.
        """

    def set_rewards(self, problem: str, rewards: dict[str, float]) -> int: ...
    def drop_rollout(self, problem: str, rollout_id: str) -> bool:
        """Remove a rollout and return whether it existed. Its id can be added again."""

    def drop_before(self, problem: str, generation: int) -> int:
        """Remove the problem's rollouts of generations older than *generation*, and return their number."""

    def drop_problem(self, problem: str) -> bool:
        """Remove all rollouts of a problem and return whether there were any. Its open requests remain open."""

    def take_evicted(self) -> list[str]:
        """Return the problems whose history was evicted since the last call, in this order."""

    def wait_idle(self) -> None:
        """Wait until nothing is left to index, merge or evict, and all likely drafts are prepared."""

    def problems(self) -> list[str]:
        """Return the problems that have rollouts, sorted."""

    def rollouts(self, problem: str) -> list[str]:
        """Return a problem's rollout ids in the order in which they were added; an unknown problem has none.

        Waits for a concurrent `add` or drop of the same problem.
        """

    def tokens(self, problem: str) -> int:
        """Return the number of response tokens of a problem's history; 0 for an unknown problem."""

    def pool_tokens(self) -> int:
        """Return the number of tokens in the cross-problem pool, including removed rollouts that still occupy space."""

    def total_bytes(self) -> int: ...
    def problem_bytes(self, problem: str) -> int: ...
    def open(self, *args: Any, **kwargs: Any) -> int: ...
    def extend(self, handle: int, tokens: _TokenIds) -> None:
        """Append sampled tokens to a request's response and learn from them.

        They are compared with the request's last draft, from the position that the previous call has reached.

        Raises:
            KeyError: for a handle that is not open.
            ValueError: for a token id out of range; the request is unchanged.
        """

    def extend_batch(self, handles: Sequence[int], tokens: Iterable[_TokenIds]) -> None:
        """Extend many requests in one call without the GIL: request ``handles[i]`` by ``tokens[i]``.

        Raises the same errors as `extend`, and ValueError for arguments of different lengths; all requests are
        unchanged then.
        """

    def close(self, handle: int) -> Any: ...
    def count_step(self, handle: int, verified: int, accepted: int) -> bytes:
        """Count a step that has verified a request's last draft, but whose tokens are reported by a later step.

        Args:
            handle: handle of the request.
            verified: how many tokens of the draft were verified, at most its length (larger numbers count as that).
            accepted: how many of them were accepted.

        Returns:
            The codes of the accepted tokens. `DraftCounts.token_sources` will lack them.

        Raises:
            KeyError: for a handle that is not open.
            ValueError: for a negative number.
        """

    def num_tokens(self, handle: int) -> int:
        """Return the number of tokens of a request's prompt and response.

        Raises:
            KeyError: for a handle that is not open.
        """

    def look_ups(self) -> Any: ...
    def draft(self, handle: int, budget: int, min_survival: float) -> Draft: ...
    def draft_batch(
        self, handles: Sequence[int], budgets: Sequence[int], min_survival: float | Sequence[float]
    ) -> list[Draft]: ...
    def occurrences(self, *args: Any, **kwargs: Any) -> Any: ...
    def text_position(self, handle: int) -> tuple[float | None, int, int]:
        """Compare the end of a request's response with the earlier rollouts of its problem.

        This reads up to 32 of these to their ends, which takes a tenth of a millisecond for long ones.

        Returns:
            How many tokens follow the end of the response in them, counting one that ends each: the geometric mean of
            the best matches, which are at least half as long as the longest (None if no earlier rollout contains its
            last token); how many tokens the longest match has in common with the end of the response; and how many
            tokens at its end occur earlier in the response.

        Raises:
            KeyError: for a handle that is not open.
        """

    def has_ended(self, handle: int) -> bool:
        """Return whether a stop token, or the maximum number of tokens, has ended a request's response.

        Raises:
            KeyError: for a handle that is not open.
        """

    def state_dict(self) -> bytes:
        """Return the learned parameters, for `load_state_dict` of another index of the same version.

        The state has about 450 kB, most of which are initial values, so it compresses well.
        """

    def load_state_dict(self, state: bytes) -> None:
        """Replace the learned parameters by those of another index.

        The distribution of tokens may have changed in the meantime, so each parameter counts as at most 256
        observations, however many there were.

        Raises:
            ValueError: if `state` was not returned by `state_dict` of this version; nothing is changed.
        """

    def counters(self) -> Any: ...
    def verification_counts(self) -> Any: ...
    def request_lock(self, handle: int, *, live_texts: bool = False) -> RequestLock:
        """Return the lock of a request, or of the live texts of its problem, for tests.

        The thread that acquires it must release it.

        Raises:
            KeyError: for a handle that is not open.
        """

class RequestLock:
    def acquire(self) -> None: ...
    def release(self) -> None: ...

class Batch:
    def __init__(
        self,
        index: SuffixIndex,
        token_ids: npt.NDArray[np.int32],
        drafts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int32],
        generated: npt.NDArray[np.int64],
        expected: npt.NDArray[np.float64],
    ) -> None: ...
    def plan(
        self,
        handles: npt.NDArray[np.int64],
        budgets: npt.NDArray[np.int64],
        min_survivals: npt.NDArray[np.float64],
        token_gains: npt.NDArray[np.float64],
        costs: npt.NDArray[np.float64],
        *,
        shortens: bool,
        uniform_lengths: Sequence[int],
        time_limit_s: float,
        min_gain_s: float,
    ) -> None: ...
    def clear(self) -> None:
        """Remove the plan, which keeps the requests in memory after they were closed."""

    def step(
        self,
        num_tokens: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        verified: npt.NDArray[np.int64],
    ) -> tuple[int, int, float]: ...
    def keep_only(self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], kept: int | None) -> None: ...
