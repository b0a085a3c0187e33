"""Drafts for a running batch: the tokens that a step has sampled go in, and the drafts for the next one come out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollout_worker.drafting import _native

NO_HANDLE = -1
"""Stands for a handle in a row of a plan that is not in use."""
NO_ROW = -1
"""Stands for the row of a request that is not followed."""


class Batch(_native.Batch):
    """The requests of an engine that decode at the same time, created by `SuffixIndex.new_batch`.

    An engine keeps the tokens of its requests in arrays with one row for each *place* of its batch. The drafts are
    written to arrays of the same kind. Everything that is known before the tokens are sampled is passed to `plan`, so
    that `step` has little to do, because the engine waits for it. A batch is used by one thread at a time.

    `step` is inherited from the native class, without a Python function around it, because the engine waits for it:

    ``step(num_tokens, rows, places, verified)`` appends the tokens that were sampled to the responses, and drafts for
    the next step. The drafts are written to the arrays of the batch; requests without new tokens get none. It returns
    the number of drafts that are not empty, the number of all their tokens, and the seconds that these are expected to
    save, minus the cost of verifying them.

    - ``num_tokens``: number of tokens of prompt and response, for each place, shape (places,), int32.
    - ``rows``: row of each request in the plan, each once; `NO_ROW` for one that is not followed; shape (n,), int64.
    - ``places``: place of each request, each once, shape (n,), int64.
    - ``verified``: how many tokens of each request's last draft were verified, at most its length (larger numbers count
      as that), shape (n,), int64. Only `SuffixIndex.close` reports it.

    It raises TypeError for an argument that is not an array of the given type, and ValueError for shapes that do not
    agree, a row, a place or a number out of range, more tokens than the engine's array holds, or a negative token id.
    In the last two cases, other requests may have been stepped.

    With drafting ahead, `step` waits for no other thread for longer than some microseconds, or until the time limit. If
    another thread uses a request for longer, because the system has suspended that thread, the request is left out: it
    gets no draft, and counts as if it had no new tokens. The next step takes these tokens together with its own.

    ``keep_only(rows, places, kept)`` drops the drafts of the last step, which had the same `rows` and `places`, so that
    they are not verified; it keeps only the draft of the request with the index `kept`, or none if that is None. The
    lengths of the others become 0. It raises TypeError and ValueError as `step` does.
    """

    def __init__(
        self,
        index: _native.SuffixIndex,
        token_ids: npt.NDArray[np.int32],
        drafts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int32],
    ) -> None:
        places = len(token_ids)
        self.generated = np.zeros(places, np.int64)
        """Number of tokens that were new in the last step, for each of its requests.

        It is 0 for requests that are closed, not followed or left out."""
        self.expected = np.zeros(places, np.float64)
        """Number of draft tokens expected to be accepted, the sum of their survivals, for each request."""
        super().__init__(index, token_ids, drafts, lengths, self.generated, self.expected)

    def plan(
        self,
        handles: npt.NDArray[np.int64],
        budgets: npt.NDArray[np.int64],
        min_survivals: npt.NDArray[np.float64],
        token_gains: npt.NDArray[np.float64],
        costs: npt.NDArray[np.float64],
        *,
        shortens: bool = False,
        uniform_lengths: Sequence[int] = (),
        time_limit_s: float = math.inf,
        min_gain_s: float = -math.inf,
    ) -> None:
        """Set the requests of the next steps, and the limits of their drafts; all arrays have the shape (rows,).

        Args:
            handles: handles of the requests, each once; `NO_HANDLE` in rows that are not in use.
            budgets: maximum number of draft tokens. The limits given to `SuffixIndex.open` apply as well, and the width
                of the drafts array.
            min_survivals: a draft ends before the first token whose survival is below this, 0 to 1.
            token_gains: seconds that an accepted token saves.
            costs: seconds that it takes to verify 0, 1, 2, … draft tokens of all requests together, shape (m,), m ≥ 1.
                The last one also stands for more tokens.
            shortens: whether drafts are shortened so that all of them together gain most, given their costs: tokens
                with less value than others are removed first. Tokens whose values differ by less than 3 % may count as
                equally valuable, and so do those that are worth more than a second. Nothing is removed if no draft
                gains anything.
            uniform_lengths: if not empty, the engine verifies the same number of tokens for all requests of a step,
                with or without a draft: the smallest of these that is not below the length of any draft. The cost
                is that of all these tokens, and `shortens` chooses the one of these lengths that gains most. Drafts end
                at the largest of them.
            time_limit_s: with drafting ahead, seconds after which a step begins no further draft, except for the first
                one. Requests without a prepared draft come first, for example new ones, then those with other
                outcomes than expected, highest gains first. The others have no draft in this step.
            min_gain_s: if a step makes drafts, but these gain no more than this together, the caller must decide by
                `keep_only` which are verified. Drafting ahead waits for that.

        Raises:
            KeyError: for a handle that is not open; the plan is unchanged.
            TypeError: for an argument that is not an array of the given type.
            ValueError: for shapes that do not agree, or a value out of range; the plan is unchanged.
        """
        super().plan(
            handles,
            budgets,
            min_survivals,
            token_gains,
            costs,
            shortens=shortens,
            uniform_lengths=uniform_lengths,
            time_limit_s=time_limit_s,
            min_gain_s=min_gain_s,
        )
