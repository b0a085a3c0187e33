"""Drafts for the requests of an engine, step by step; shared by the interfaces to vLLM's two model runners."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from rollout_store.arrays import Integers, with_row
from rollout_worker.drafting.batch import NO_HANDLE, NO_ROW
from rollout_worker.drafting.index import DraftCounts
from rollout_worker.engine.draft_settings import DraftSettings
from rollout_worker.policy.draft_policy import Position
from rollout_worker.policy.governor import StepOutcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollout_worker.drafting.index import SuffixIndex, TokenArray
    from rollout_worker.policy.controller import DraftController
    from rollout_worker.policy.governor import Trial

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_MAX_CONSECUTIVE_FAILURES = 3
"""Number of failures without a success in between after which drafting is paused."""
_PAUSE_STEPS = 1024
"""Number of steps without drafts after repeated failures; doubled each time."""
_MAX_DRAFTING_SHARE = 0.0125
"""Share of the duration of a step without drafts after which no further drafts are computed while the engine waits."""
_TRACKED_REQUEST = np.dtype(
    [
        ("handle", np.int64),  # in the index
        ("expected", np.float64),  # tokens of its last draft that are expected to be accepted
        ("budget", np.int64),  # maximum number of draft tokens in the next step
        ("min_survival", np.float64),  # survival below which the next draft ends
        ("token_gain", np.float64),  # seconds that an accepted token saves
        ("is_planned", np.bool_),  # whether the last three are set
        ("has_decoded", np.bool_),  # whether it was in an earlier step
    ]
)
"""The state of a request, in the row of its rollout."""
_FREE_ROW = (NO_HANDLE, 0.0, 0, 1.0, 0.0, False, False)


class EngineArrays(NamedTuple):
    """Arrays that an engine and the drafting loop share. They have one row for each place of the engine's batch."""

    token_ids: NDArray[np.int32]
    """Prompts and responses, written by the engine, shape (places, maximum number of tokens)."""
    drafts: NDArray[np.int64]
    """The drafts to verify in the next step, written by :meth:`DraftingLoop.draft`, shape (places, max_draft_tokens).

    What follows the end of a draft is undefined."""
    lengths: NDArray[np.int32]
    """Number of tokens of each draft, shape (places,)."""

    @classmethod
    def create(cls, token_ids: NDArray[np.int32], max_draft_tokens: int) -> EngineArrays:
        """Return the engine's *token_ids*, shape (places, maximum number of tokens), with new arrays for drafts."""
        places = len(token_ids)
        return cls(token_ids, np.zeros((places, max_draft_tokens), np.int64), np.zeros(places, np.int32))


class _Unobserved(NamedTuple):
    """A step that the policy has not learned from yet."""

    rows: Integers
    """Row of each request; -1 for those that are not followed."""
    num_tokens: NDArray[np.int32]
    places: Integers
    verified: Integers
    seconds: float | None
    """Time since the step before; None if it is unknown."""
    drafting_s: float
    """Seconds of these for which the engine waited for the drafter."""
    processed_tokens: int
    """Number of tokens that the step processed."""
    waited: bool
    """Whether the step waited for the drafter, although an engine without drafts would have launched it before."""
    drafts: int | None
    """Number of drafts that were made after the step; None if they were late."""


class DraftingLoop:
    """Follows an engine's requests and drafts for them within the budgets of the policy.

    Each step consists of two calls. :meth:`draft` is on the critical path, between sampling and the next forward pass.
    It consists of one call of the index, unless the requests of the batch have changed. :meth:`plan`, which may be
    called while the forward pass runs, lets the policy learn from the step before and decides the budgets of the next
    drafts.

    A fault in drafting costs drafts, never the engine: no method raises, and callers pass what else may fail to
    :meth:`guard`. After a failure all requests are forgotten and followed again from their tokens. If drafting fails
    repeatedly, it is paused.
    """

    def __init__(
        self,
        index: SuffixIndex,
        controller: DraftController,
        arrays: EngineArrays,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a loop without requests."""
        self.steps = 0
        """Number of steps."""
        self.tokens = 0
        """Number of tokens of responses that were sampled, up to the step before the last."""
        self.seconds = 0.0
        """Seconds spent in :meth:`draft`."""
        self.proposed_tokens = 0
        """Number of tokens of all drafts."""
        self.failures = 0
        """How often drafting failed."""
        self.last_failure = ""
        """The exception of the last failure, for reports."""
        self._index, self._controller, self._arrays, self._clock = index, controller, arrays, clock
        self._batch = index.new_batch(*arrays)
        self._settings: dict[str, _Request] = {}
        """Requests that have draft settings, by request id."""
        self._rows: dict[str, int] = {}
        """Request id → row of the rollout, for requests that were not forgotten after a failure."""
        self._tracked = np.array([_FREE_ROW], _TRACKED_REQUEST)
        self._next_batch: list[str] | None = None
        """The requests of the batch that is expected next."""
        self._batch_rows = np.zeros(0, np.int64)
        """Their rows; -1 for those that are not followed."""
        self._context_tokens = 0
        """Number of tokens of all prompts and responses of the last step."""
        self._has_unplanned = False
        """Whether there may be requests without a budget."""
        self._finished: dict[str, DraftCounts] = {}
        self._earlier: dict[str, DraftCounts] = {}
        """Counts of requests that were forgotten after a failure or reset, by key, and those that the index lacks."""
        self._unobserved: _Unobserved | None = None
        self._trial: Trial | None = None
        """The trial among the last drafts."""
        self._last_end: float | None = None
        """When the last step ended that was drafted for; None if the step since then is not timed."""
        self._waits = False
        """Whether the next step waits for the drafter, although an engine without drafts would have launched it."""
        self._drafting_s = 0.0
        """Seconds for which the engine has waited for the drafter since the step began."""
        self._predicts = True
        """Whether the policy may predict lengths."""
        self._consecutive_failures = 0
        self._pause_steps = _PAUSE_STEPS
        self._paused_until = 0

    @property
    def num_tracked(self) -> int:
        """Number of responses that are drafted for, or whose counts were not taken yet."""
        return len(self._rows) + len(self._finished)

    def interrupt_timing(self) -> None:
        """Do not measure the current step, because the engine does something else before the next one."""
        self._last_end = None

    # The requests

    def add(
        self, request_id: str, settings: DraftSettings, prompt: TokenArray | Sequence[int], end_tokens: list[int]
    ) -> None:
        """Follow a request from now on. Best called before its first token is sampled, because it indexes the prompt.

        The *prompt* is the one that the engine sees, that is, with the prefix.
        """
        self._settings[request_id] = _Request(settings, len(prompt), end_tokens)
        self.guard(lambda: self._open(request_id, np.asarray(prompt, np.uint32)))

    def knows(self, request_id: str) -> bool:
        """Return whether the request was added."""
        return request_id in self._settings

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Forget a request's tokens from *num_tokens* on, which the engine has discarded, as it may in a preemption."""
        self.guard(lambda: self._rewind(request_id, num_tokens))

    def _rewind(self, request_id: str, num_tokens: int) -> None:
        row = self._rows.get(request_id)
        if row is not None and self._index.num_tokens(int(self._tracked["handle"][row])) > num_tokens:
            self._suspend(request_id)
        request = self._settings[request_id]
        earlier = self._earlier.get(request.settings.key)
        if earlier is not None:
            kept = earlier.token_sources[: max(0, num_tokens - request.first_token)]
            self._earlier[request.settings.key] = earlier._replace(token_sources=kept)

    def count_steps(self, request_id: str, steps: Iterable[tuple[int, int]]) -> None:
        """Count the draft tokens of a request's last steps before a preemption, because no drafting follows them.

        Of each step, the number of tokens of prompt and response after it is given, and the number of draft tokens that
        it verified.
        """
        self.guard(lambda: self._count_steps(request_id, steps))

    def _count_steps(self, request_id: str, steps: Iterable[tuple[int, int]]) -> None:
        row = self._rows.get(request_id)
        if row is None:
            return
        handle, request = int(self._tracked["handle"][row]), self._settings[request_id]
        known, key = self._index.num_tokens(handle), request.settings.key
        for num_tokens, verified in steps:
            codes = self._index.count_step(handle, verified, max(0, min(verified, num_tokens - known - 1)))
            sources = bytes(known - request.first_token) + codes
            self._earlier[key] = _sum(DraftCounts(0, 0, 0, sources), self._earlier.pop(key, None))
            known = num_tokens

    def remove(self, request_ids: Iterable[str]) -> None:
        """Stop following requests that have ended; others are ignored."""
        if ended := self._settings.keys() & request_ids:
            self.guard(lambda: self._close(ended))

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Stop following all requests but these."""
        self.remove(self._settings.keys() - request_ids)

    @property
    def num_requests(self) -> int:
        """Number of requests that were added and have not been removed."""
        return len(self._settings)

    def take_counts(self, keys: list[str]) -> dict[str, DraftCounts]:
        """Return the counts of responses that have ended, by key; each is returned once."""
        ended = set(keys)
        closing = [request_id for request_id, request in self._settings.items() if request.settings.key in ended]
        self.guard(lambda: self._close(closing))
        return {key: self._finished.pop(key) for key in keys if key in self._finished}

    def _open(self, request_id: str, prompt: TokenArray) -> None:
        """Start to draft for a request; see :meth:`add`. If that fails, the request is not followed any more."""
        try:
            self._track(request_id, prompt)
        except BaseException:
            self._close([request_id])
            raise

    def _track(self, request_id: str, prompt: TokenArray) -> None:
        settings, _, end_tokens = self._settings[request_id]
        earlier = self._earlier.get(settings.key)
        if earlier is not None:
            # All tokens of the response are counted again.
            self._earlier[settings.key] = earlier._replace(generated=0)
        # The prefix belongs to the response, although it is part of the engine's prompt.
        prompt_tokens = len(prompt) - settings.prefix_tokens
        handle = self._index.open(
            settings.problem,
            prompt[:prompt_tokens],
            sources=tuple(settings.sources),
            context_length=prompt_tokens if settings.later_turn else 0,
            stop_tokens=end_tokens,
            undrafted_tokens=settings.undrafted_tokens,
            min_tokens=settings.min_tokens,
            max_tokens=settings.max_tokens,
            max_draft_tokens=settings.budget,
        )
        row = self._controller.open(
            settings.problem,
            prompt_tokens=prompt_tokens,
            generated=settings.prefix_tokens,
            max_tokens=settings.max_tokens,
        )
        self._tracked = with_row(self._tracked, row, _FREE_ROW)
        self._tracked[row] = (handle, *_FREE_ROW[1:])
        self._has_unplanned = True
        self._set_row(request_id, row)
        if settings.prefix_tokens:
            self._index.extend(handle, prompt[prompt_tokens:])

    def _set_row(self, request_id: str, row: int | None) -> None:
        if row is None:
            del self._rows[request_id]
        else:
            self._rows[request_id] = row
        self._next_batch = None

    def _forget_last_step(self) -> None:
        """Do not learn from the outcome of the last step, because it refers to rows that change."""
        if self._unobserved is not None:
            self._record_drafts(self._unobserved)
            self._unobserved = None

    def _suspend(self, request_id: str, *, is_last: bool = False) -> None:
        """Forget what the drafter knows about a request, which is not followed again if *is_last*, but not itself."""
        row = self._rows[request_id]
        self._set_row(request_id, None)
        self._forget_last_step()
        classes = self._controller.length_classes
        length_class = "" if classes is None else classes.of(row).value
        handle = int(self._tracked["handle"][row])
        # Only policies that predict lengths must know whether the response was aborted.
        self._controller.close(row, ended=is_last and classes is not None and self._index.has_ended(handle))
        self._tracked[row] = _FREE_ROW
        if len(self._rows) == 0:
            self._batch.clear()
        counts = self._index.close(handle)._replace(length_class=length_class)
        key = self._settings[request_id].settings.key
        self._earlier[key] = _sum(counts, self._earlier.pop(key, None))

    def _close(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            if request_id in self._rows:
                self._suspend(request_id, is_last=True)
            key = self._settings.pop(request_id).settings.key
            counts = self._earlier.pop(key, None)
            if counts is not None:
                self._finished[key] = counts

    # The steps

    def skip_step(self) -> bool:
        """Return whether nothing is drafted in this step, so that the sampled tokens are not needed. Call it once."""
        self.steps += 1
        if self.steps <= self._paused_until or self._controller.skip_step():
            self._last_end = None
            return True
        return False

    def rest(self) -> bool:
        """Return whether the next step is to be decoded as if there were no drafter, to compare others with it.

        The engine launches it without waiting for the step before, and calls :meth:`draft` for both afterwards. An
        engine that always waits for each step need not call this; its drafts are dropped instead.
        """
        return self._controller.rest()

    def draft(
        self,
        request_ids: list[str],
        num_tokens: NDArray[np.int32],
        places: Integers,
        verified: Integers,
        processed_tokens: int = 0,
        *,
        ended_s: float | None = None,
        is_late: bool = False,
    ) -> None:
        """Write drafts for a batch, given the tokens that were just sampled, to the engine's arrays.

        Tokens of skipped steps are caught up. Requests that were not added, and those without a new token, get no
        drafts.

        Args:
            request_ids: the requests of the batch.
            num_tokens: number of tokens of prompt and response, including the sampled ones, for each place of the
                engine's batch. It must not change before the next call of :meth:`plan`.
            places: place of each request, shape (requests,).
            verified: number of draft tokens that the step verified, shape (requests,).
            processed_tokens: number of tokens that the step processed. Those that are neither draft tokens nor the ones
                before them belong to prompts. 0 means that the step has read no prompts.
            ended_s: when the step ended, in seconds of any clock, if an engine without drafts launches the next step
                before; by default, it ends now.
            is_late: whether the next step was launched already, so that nothing is to be drafted for it.
        """
        started = self._clock()
        waited, self._waits = self._waits, ended_s is not None and not is_late
        ended_s = started if ended_s is None else ended_s
        try:
            self._draft(
                request_ids, num_tokens, places, verified, processed_tokens, ended_s, waited=waited, is_late=is_late
            )
        except Exception as error:
            self._record_failure(error)
            self._arrays.lengths[places] = 0
        self._last_end = ended_s
        drafting_s = self._clock() - started
        self._drafting_s = 0.0 if is_late else drafting_s
        self.seconds += drafting_s

    def plan(self, request_ids: list[str] | None = None) -> None:
        """Learn from the step before the last drafts, and decide the budgets of the next ones.

        If the requests of the running step are known, :meth:`draft` finds them at once. If not, no step is running, and
        the engine waits.
        """
        started = self._clock()
        self.guard(lambda: self._plan(request_ids))
        self._examine()
        if request_ids is None:
            self._drafting_s += self._clock() - started

    def _draft(
        self,
        request_ids: list[str],
        num_tokens: NDArray[np.int32],
        places: Integers,
        verified: Integers,
        processed_tokens: int,
        ended_s: float,
        *,
        waited: bool,
        is_late: bool,
    ) -> None:
        if self._unobserved is not None:
            self._plan(None)
        if len(self._rows) != len(self._settings):
            self._open_forgotten(request_ids, places)
        if request_ids is not self._next_batch:
            self._find_rows(request_ids)
        rows = self._batch_rows
        if self._has_unplanned and not self._tracked["is_planned"][rows[rows != NO_ROW]].all():
            self._compute_budgets()
        drafts, tokens, gain_s = self._batch.step(num_tokens, rows, places, verified)
        if not drafts and not self._batch.generated[: len(rows)].any():
            return  # No request has a new token.
        seconds = None if self._last_end is None else ended_s - self._last_end
        self._unobserved = _Unobserved(
            rows,
            num_tokens,
            places,
            verified,
            seconds,
            self._drafting_s,
            processed_tokens,
            waited,
            None if is_late else drafts,
        )
        if is_late:
            tokens = self._keep_only(places, None)
        elif drafts and gain_s <= self._controller.min_gain_s:
            tokens = self._select(places, gain_s)
        self.proposed_tokens += tokens
        self._consecutive_failures = 0

    def _select(self, places: Integers, gain_s: float) -> int:
        """Remove all drafts but that of a trial, and return its number of tokens."""
        drafted = self._arrays.lengths[places].astype(np.int64)
        return self._keep_only(places, self._controller.select_trial(self._batch_rows, drafted, gain_s))

    def _keep_only(self, places: Integers, selected: int | None) -> int:
        """Remove all drafts but one, or all, and return its number of tokens."""
        self._batch.keep_only(self._batch_rows, places, selected)
        self._batch.expected[: len(places)][np.arange(len(places)) != selected] = 0.0
        return 0 if selected is None else int(self._arrays.lengths[places[selected]])

    def _find_rows(self, request_ids: list[str]) -> None:
        if request_ids != self._next_batch:
            rows = [self._rows.get(request_id, NO_ROW) for request_id in request_ids]
            self._batch_rows = np.array(rows, np.int64)
        self._next_batch = request_ids

    def _open_forgotten(self, request_ids: list[str], places: Integers) -> None:
        """Follow requests of the batch again that were forgotten after a failure."""
        for place, request_id in zip(places.tolist(), request_ids, strict=True):
            request = self._settings.get(request_id)
            if request is not None and request_id not in self._rows:
                prompt = self._arrays.token_ids[place, : request.prompt_tokens]
                self._open(request_id, prompt.astype(np.uint32))

    def _plan(self, request_ids: list[str] | None) -> None:
        self._observe()
        self._compute_budgets()
        if request_ids is not None:
            self._find_rows(request_ids)

    def _examine(self) -> None:
        """Let the policy predict the lengths of some rollouts anew; never again if that fails."""
        if not self._predicts:
            return
        handles = self._tracked["handle"]
        try:
            self._controller.examine(
                self._followed_rows(), lambda row: Position(*self._index.text_position(int(handles[row])))
            )
        except Exception as error:
            self._predicts = False
            self.failures += 1
            self.last_failure = f"{type(error).__name__}: {error}"
            logger.exception("Lengths are not predicted any more, because that failed.")

    def _followed_rows(self) -> Integers:
        return np.fromiter(self._rows.values(), np.int64, len(self._rows))

    def _compute_budgets(self) -> None:
        rows = self._followed_rows()
        if not len(rows):
            return
        budgets = self._controller.compute_budgets(rows, len(self._batch_rows) or None)
        cost, tracked = self._controller.fit.cost, self._tracked
        tracked["budget"][rows] = budgets.tokens
        tracked["min_survival"][rows] = budgets.min_survivals
        tracked["token_gain"][rows] = budgets.token_values_s
        tracked["is_planned"][rows] = True
        self._batch.plan(
            np.ascontiguousarray(tracked["handle"]),
            np.ascontiguousarray(tracked["budget"]),
            np.ascontiguousarray(tracked["min_survival"]),
            np.ascontiguousarray(tracked["token_gain"]),
            self._controller.draft_costs_s,
            shortens=budgets.shortens,
            uniform_lengths=self._controller.uniform_lengths,
            time_limit_s=_MAX_DRAFTING_SHARE * cost.step_time(len(rows), self._context_tokens),
            min_gain_s=self._controller.min_gain_s,
        )
        self._has_unplanned = False

    def _record_drafts(self, step: _Unobserved) -> None:
        self._trial = self._controller.governor.trial
        if step.drafts is not None:
            self._controller.record_drafts(step.drafts)

    def _observe(self) -> None:
        step, self._unobserved = self._unobserved, None
        if step is None:
            return
        trial = self._trial
        self._record_drafts(step)
        count = len(step.rows)
        generated, seconds = self._batch.generated[:count].copy(), step.seconds
        self.tokens += int(generated.sum())
        rows, verified, expected = step.rows, step.verified, self._batch.expected[:count]
        num_tokens = step.num_tokens[step.places].astype(np.int64)
        self._context_tokens = int(num_tokens.sum())
        # Of requests that are not followed, it is unknown what the step has done. Some that have ended do not matter.
        if 2 * np.count_nonzero(rows == NO_ROW) > count:
            seconds = None
        if not generated.all():
            chosen = np.flatnonzero(generated)
            rows, generated, verified = rows[chosen], generated[chosen], verified[chosen]
            expected, num_tokens = expected[chosen], num_tokens[chosen]
        tracked = self._tracked
        last_expected = tracked["expected"][rows]
        tracked["expected"][rows] = expected
        # A step samples one token more than it accepts. Further tokens were sampled in steps that were skipped.
        in_step = np.minimum(generated, verified + 1)
        for index in np.flatnonzero(generated > in_step):
            self._controller.add_unobserved(int(rows[index]), int(generated[index] - in_step[index]))
        # If all requests are new, the engine may have waited for them.
        if not tracked["has_decoded"][rows].any():
            seconds = None
        tracked["has_decoded"][rows] = True
        outcome = StepOutcome(
            rows,
            in_step,
            verified,
            np.where(verified > 0, last_expected, 0.0),
            num_tokens - in_step,
            trial,
            prompt_tokens=max(0, step.processed_tokens - len(rows) - int(verified.sum())),
            waited=step.waited,
        )
        self._controller.observe_step(outcome, seconds, step.drafting_s)

    # Failures

    def guard(self, work: Callable[[], _Result]) -> _Result | None:
        """Return the result of *work*; if it fails, record that, forget the state of all requests and return None."""
        try:
            return work()
        except Exception as error:
            self._record_failure(error)
            return None

    def _record_failure(self, error: Exception) -> None:
        self.failures += 1
        self._consecutive_failures += 1
        self.last_failure = f"{type(error).__name__}: {error}"
        if self.failures == 1:
            logger.exception("Drafting failed; the engine goes on without drafts in this step.")
        else:
            logger.error("Drafting failed (%d times in all): %s", self.failures, self.last_failure)
        if self._consecutive_failures >= _MAX_CONSECUTIVE_FAILURES:
            self._paused_until = self.steps + self._pause_steps
            logger.error("Drafting is paused for %d steps after repeated failures.", self._pause_steps)
            self._pause_steps *= 2
            self._consecutive_failures = 0
        self._forget_last_step()
        for request_id in list(self._rows):
            try:
                self._suspend(request_id)
            except Exception:
                logger.debug("The drafter has lost a request.", exc_info=True)


class _Request(NamedTuple):
    settings: DraftSettings
    prompt_tokens: int
    """Number of tokens of the engine's prompt, that is, with the prefix."""
    end_tokens: list[int]

    @property
    def first_token(self) -> int:
        """Index of the first token of the response in prompt and response."""
        return self.prompt_tokens - self.settings.prefix_tokens


def _sum(first: DraftCounts, second: DraftCounts | None) -> DraftCounts:
    if second is None:
        return first
    by_source = tuple(map(operator.add, first.drafted_by_source, second.drafted_by_source))
    # A token that one of them does not know has the code 0 there.
    sources = bytes(map(max, zip_longest(first.token_sources, second.token_sources, fillvalue=0)))
    return DraftCounts(
        first.drafted + second.drafted,
        first.accepted + second.accepted,
        first.generated + second.generated,
        sources,
        by_source,
        first.length_class or second.length_class,
    )
