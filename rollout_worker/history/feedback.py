"""Reports an engine's drafting results to the history: used problems, acceptance by age, and learned state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import redis

from rollout_api.redis_client.retry import is_transient
from rollout_worker.history.limits import FEEDBACK_INTERVAL_S, FIRST_STATE_TOKENS, MAX_STATE_TOKENS
from rollout_worker.history.metadata import HistoryInfo
from rollout_worker.history.store import HistoryStore

logger = logging.getLogger(__name__)


class DrafterStatistics(Protocol):
    """Measurements and learned state of a suffix index."""

    def accepted_by_age(self) -> Mapping[int, tuple[float, float]]:
        """Return the numbers of (verified, accepted) draft tokens so far, by the age of their rollouts."""
        ...

    def verified(self) -> int:
        """Return the number of draft tokens so far that were verified."""
        ...

    def state_dict(self) -> bytes:
        """Return the learned state."""
        ...

    def load_state_dict(self, state: bytes) -> None:
        """Continue from the state that another index has learned; raise ValueError if that is impossible."""
        ...


class DraftingFeedback:
    """Writes one engine's drafting results to the history, and reads what other engines have learned.

    Drafting does not depend on the writes: a full server refuses them, and drafts still come from what is there.
    """

    def __init__(
        self,
        store: HistoryStore,
        index: DrafterStatistics,
        *,
        interval: float = FEEDBACK_INTERVAL_S,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Prepare reporting; nothing is sent yet.

        Args:
            store: store of the history.
            index: the suffix index.
            interval: seconds between two reports.
            on_failure: called with the error when a write was refused.
        """
        self.history_info: HistoryInfo | None = None
        """Metadata of the history, as of the last report that found it; None before."""
        self._store = store
        self._index = index
        self._interval = interval
        self._on_failure = on_failure
        self._state_loaded = False
        """Whether the learned state of other engines was read."""
        self._saved_at = 0
        """Number of verified tokens when the learned state was saved last."""
        self._reported: dict[int, tuple[float, float]] = {}
        """Acceptance by age as of the last report."""
        self._next_report = 0.0
        self._used: set[str] = set()
        """Problems whose use was not reported yet."""

    def load_drafter_state(self) -> None:
        """Continue from what other engines have learned; an engine may replace one of them."""
        if self._state_loaded:
            return
        try:
            state = self._store.drafter_state()
            if state is not None:
                self._index.load_state_dict(state)
        except (ValueError, redis.ResponseError) as error:
            if isinstance(error, redis.RedisError) and is_transient(error):
                raise
            key = self._store.keys.drafter_state
            logger.warning(
                "The drafter state in %s cannot be used (%s); this engine learns from the start.", key, error
            )
        self._state_loaded = True

    def mark_used(self, problem_ids: set[str]) -> None:
        """Add problems that are drafted from, which the next report marks as used."""
        self._used |= problem_ids

    def report(self) -> None:
        """Report used problems at once; if a report is due, report other results, and read metadata."""
        if self._used:
            self._write(lambda: self._store.catalog.mark_used(self._used))
            self._used = set()
        if time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + self._interval
        self.history_info = self._store.metadata.info() or self.history_info
        self._report_acceptance()
        self._save_drafter_state()

    def _report_acceptance(self) -> None:
        """Report acceptance by age since the last report; maintenance derives the age limit from it."""
        total = dict(self._index.accepted_by_age())
        new: dict[int, tuple[float, float]] = {}
        for age, (drafted, accepted) in total.items():
            reported = self._reported.get(age, (0.0, 0.0))
            if drafted > reported[0]:
                new[age] = drafted - reported[0], accepted - reported[1]
        if new:
            self._write(lambda: self._store.statistics.add_acceptance(new))
        self._reported = total

    def _save_drafter_state(self) -> None:
        """Save the learned state for engines that start later, if enough was learned since the last save."""
        verified = self._index.verified()
        if verified - self._saved_at >= min(FIRST_STATE_TOKENS + self._saved_at // 4, MAX_STATE_TOKENS):
            self._write(lambda: self._store.save_drafter_state(self._index.state_dict()))
            self._saved_at = verified

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except redis.ResponseError as error:
            self._on_failure(error)
