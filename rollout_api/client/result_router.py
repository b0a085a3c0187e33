"""Decides which step a result belongs to, and which results are no longer needed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from rollout_api.client.step_state import StepState
from rollout_api.errors import RolloutClientError
from rollout_api.protocol.messages import Refusal, Rollout, RolloutId

logger = logging.getLogger(__name__)


class ResultRouter:
    """Puts the results of one client into the states of the steps that requested them.

    It performs no I/O. Results that no step has requested yet are *held*: the router remembers the ids of their
    entries, and the rollouts stay in Redis. Results that no step will request again are *dropped*: their entries
    are returned to the caller, which acknowledges them.

    Args:
        client_name: name of the client, with which its request ids begin.
    """

    def __init__(self, client_name: str) -> None:
        self._own_id = re.compile(rf"{re.escape(client_name)}:(\d+):")
        self._states: dict[str, StepState] = {}
        """Request id → state of the step that requested it."""
        self._open: dict[StepState, int] = {}
        """State of an open step → number of steps that were opened before it."""
        self._num_opened = 0
        self._released: dict[int, int] = {}
        """Number of a step that was left by an exception → number of steps that were opened before it was left."""
        self._held: dict[str, dict[str, int]] = {}
        """Request id → id of the entry → sample, of held results."""
        self._newest_ended = -1
        """Greatest number of a step that has ended."""
        self._abandoned_ids: set[str] = set()
        """Ids of requests whose step has ended without all of their rollouts."""

    # State.

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that were requested and have not been received, over all open steps."""
        return sum(state.num_awaited for state in self._open)

    @property
    def num_unread(self) -> int:
        """Number of rollouts in memory that have not been consumed, over all open steps."""
        return sum(state.num_unread for state in self._open)

    @property
    def has_waiter(self) -> bool:
        """Whether a consumer waits for a rollout of an open step."""
        return any(state.has_waiter for state in self._open)

    @property
    def num_held(self) -> tuple[int, int]:
        """Number of held results, and number of the requests that they belong to."""
        return sum(map(len, self._held.values())), len(self._held)

    def is_registered(self, request_id: str) -> bool:
        """Return whether an open step has requested this id."""
        return request_id in self._states

    # Steps.

    def register(self, state: StepState, request_ids: Iterable[str]) -> None:
        """Route the results of these requests to *state* from now on, beginning with those that are held."""
        if state not in self._open:
            self._open[state] = self._num_opened
            self._num_opened += 1
            self._released.pop(state.number, None)
        for request_id in request_ids:
            self._states[request_id] = state
            for entry_id, sample in self._held.pop(request_id, {}).items():
                state.receive(entry_id, request_id, sample, None, is_full=False)

    def release(self, state: StepState) -> None:
        """Hold the results of a step that was left by an exception until it is opened again.

        They are dropped once a later step that is opened after this call has ended, because the trainer has then
        skipped this one.
        """
        self._open.pop(state, None)
        self._released[state.number] = self._num_opened
        for request_id in state.request_ids:
            self._states.pop(request_id, None)
            self._abandoned_ids.discard(request_id)
        for request_id, entry_ids in state.entry_ids.items():
            self._held.setdefault(request_id, {}).update(entry_ids)

    def finish(self, state: StepState) -> list[str]:
        """Stop routing results to a step that has ended.

        Returns:
            Ids of the entries of held results that are dropped, because they belong to this step or to an earlier one.
        """
        num_opened_before = self._open.pop(state)
        for request_id in state.request_ids:
            self._states.pop(request_id, None)
        self._newest_ended = max(self._newest_ended, state.number)
        self._released = {
            number: num_opened
            for number, num_opened in self._released.items()
            if number >= state.number or num_opened_before < num_opened
        }
        # Results of all other steps are recognized by their number.
        self._abandoned_ids = {one for one in self._abandoned_ids if not self._is_of_past_step(one)}
        self._abandoned_ids.update(state.incomplete_ids)
        dropped: list[str] = []
        for request_id in [request_id for request_id in self._held if self._is_past(request_id)]:
            dropped += self._drop(request_id, self._held.pop(request_id))
        return dropped

    # Results.

    def route(self, entry_id: str, rollout_id: RolloutId, rollout: Rollout, *, is_full: bool) -> list[str]:
        """Put a rollout into the state of its step, or hold it.

        Args:
            entry_id: id of its entry in the result stream.
            rollout_id: its parsed id.
            rollout: the rollout.
            is_full: whether as many rollouts are unread as may be in memory.

        Returns:
            The id of the entry, if the rollout is dropped.
        """
        request_id, sample = rollout_id.request_id, rollout_id.sample
        state = self._states.get(request_id)
        if state is not None:
            state.receive(entry_id, request_id, sample, rollout, is_full=is_full)
        elif self._is_past(request_id):
            return self._drop(request_id, [entry_id])
        else:
            self._held.setdefault(request_id, {})[entry_id] = sample
        return []

    def refuse(self, entry_id: str, refusal: Refusal) -> None:
        """Report a refusal to the step that sent the request; *entry_id* is the id of the refusal's entry."""
        if (state := self._states.get(refusal.request_id)) is not None:
            state.refuse(entry_id, refusal)

    def mark_unreadable(self, rollout_id: RolloutId, reason: str) -> None:
        """Report to the step that requested it that a rollout cannot be read."""
        if (state := self._states.get(rollout_id.request_id)) is not None:
            state.mark_unreadable(rollout_id.request_id, rollout_id.sample, reason)

    def fail_all(self, error: RolloutClientError) -> None:
        """Report to all open steps that nothing more will be received."""
        for state in self._open:
            state.fail(error)

    def request_resend(self) -> None:
        """Make all open steps send their open requests again, because Redis may have lost them."""
        for state in self._open:
            state.request_resend()

    # Past steps.

    def _is_past(self, request_id: str) -> bool:
        """Return whether no step will request this id again: its step or a later one has ended."""
        return request_id in self._abandoned_ids or self._is_of_past_step(request_id)

    def _is_of_past_step(self, request_id: str) -> bool:
        match = self._own_id.match(request_id)
        if match is None:
            return True
        number = int(match[1])
        is_needed = number in self._released or any(state.number == number for state in self._open)
        return number < self._newest_ended and not is_needed

    def _drop(self, request_id: str, entry_ids: Iterable[str]) -> list[str]:
        dropped = list(entry_ids)
        logger.info("Dropped %d results of request %s, which no step will request again.", len(dropped), request_id)
        return dropped
