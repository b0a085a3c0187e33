"""Looks after one history: packs it, keeps it within its bytes and its window, and removes it when nobody uses it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.history.eviction import Held, select_evictions
from rollout_worker.history.server_functions import Call, Function, Redis, concerns_the_server, run
from rollout_worker.history.store import History, HistoryStore, Problem, histories
from rollout_worker.history.window import next_horizon

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

LEASE_S = 15.0
"""How long a history stays with a keeper that is heard of no more."""
REST_S = 30.0
"""A problem that did not change for so long is packed: until then more of its rollouts are likely to come."""
RETENTION_S = 30 * 86400.0
"""How long a history is kept that nobody appends to or drafts from."""
PASS_EVERY_S = 5.0
"""Seconds between two passes over a history."""
_EXPECTED_S = 3600.0
"""How long a problem that was asked for, and has no rollout, stays known: its first may still be made."""
_LONGEST_PASS_S = 10.0
"""What a pass leaves is done by the next one: others wait for their histories."""
_LOW_WATER = 0.95
"""Of the byte cap, which is where an eviction ends: the next one is not due at once."""
_AT_ONCE = 256
"""Problems that are asked for, or dropped, in one round trip."""
_EVERY_WINDOW = 2**31
"""Generations: of a store that reads whatever there is."""
_EMPTY = "empty"
"""Field of a history's meta hash: when it was first seen without problems, by the server's clock."""
_SAY_EVERY_S = 30.0

_LEAD, _DECAY = Function("lead"), Function("decay")


class UnknownHistoryError(LookupError):
    """There is no history of this name; the text names those that there are."""


@dataclass(frozen=True)
class Plan:
    """What is to be done to a history, by what Redis says of it now."""

    history: str
    about: History | None
    problems: int
    bytes: int
    """That its problems take in Redis."""
    unused: float
    """Seconds since it was appended to or drafted from."""
    expired: bool
    """It was unused for too long, and is to be removed."""
    empty: tuple[Problem, ...] = ()
    """Problems that were wanted once and of which nothing is kept."""
    trimmed: tuple[Problem, ...] = ()
    """Problems with rollouts that have left the window."""
    narrowed: tuple[tuple[Problem, int], ...] = ()
    """Problems that lose their oldest generations, so that the history is within its byte cap again: how many stay."""
    evicted: tuple[Problem, ...] = ()
    """Problems, least recently used first, that leave as a whole for that."""
    compacted: tuple[Problem, ...] = ()
    """Problems that have rested and whose log is not packed."""
    horizon: int | None = None
    """Generations after which rollouts are not worth keeping; None: all are."""


@dataclass(frozen=True)
class Pass:
    """What a pass did."""

    plan: Plan | None
    """What was to be done; None if another keeper looks after the history."""
    expired: bool = False
    empty: int = 0
    """Problems that were dropped as nothing was kept of them."""
    trimmed: int = 0
    """Problems of which rollouts were dropped that had left the window."""
    narrowed: int = 0
    """Problems that lost their oldest generations for the byte cap."""
    evicted: int = 0
    evicted_bytes: int = 0
    compacted: int = 0
    failed: int = 0
    """Problems whose keys hold something else; they are not tried again until they change."""
    problems: int = 0
    """That are left."""
    bytes: int = 0
    """That these take in Redis."""
    finished: bool = True
    """Whether all that was to be done was done."""
    seconds: float = 0.0


def new_token() -> str:
    """A token for this process's leases, that says where it runs."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def known_history(client: Redis, keys: HistoryKeys) -> tuple[HistoryStore, History]:
    """A store that reads all of a history, whatever its window, and what the history is.

    Raises:
        UnknownHistoryError: if there is none of this name.
        redis.RedisError: if Redis fails.
    """
    store = HistoryStore(client, keys, window=_EVERY_WINDOW)
    about = store.about()
    if about is not None:
        return store, about
    known = ", ".join(one.full_name for one in histories(client))
    raise UnknownHistoryError(
        f"there is no history {keys.full_name}; " + (f"there are: {known}" if known else "this server has none")
    )


def as_old(horizon: int | None) -> str:
    """A horizon in words."""
    return "any age" if horizon is None else f"the last {horizon} generations"


class HistoryMaintainer:
    """Makes passes over one history; every method may raise :class:`redis.RedisError`.

    One keeper at a time has the lease of a history. That saves work and is not what keeps it whole: each effect is
    atomic, and done twice it is done once, so a second keeper, or one that was killed half-way, does no harm.
    """

    def __init__(
        self,
        client: Redis,
        keys: HistoryKeys,
        *,
        token: str,
        clock: Callable[[], float] | None = None,
        retention: float | None = RETENTION_S,
        stopping: threading.Event | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            client: of the server or cluster.
            keys: of the history.
            token: by which the lease is known to be this process's.
            clock: seconds since the epoch by the server's clock [default: ask it].
            retention: seconds after which an unused history is removed; None: never.
            stopping: ends a pass early when it is set.
        """
        self.keys = keys
        self.leading = False
        """Whether the lease was this keeper's when it asked last."""
        self._client = client
        self._token = token
        self._clock = clock or self._server_clock
        self._retention = retention
        self._stopping = stopping or threading.Event()
        self._store = HistoryStore(client, keys, window=_EVERY_WINDOW)
        self._asked = 0.0
        """When the lease was asked for last."""
        self._generations: dict[str, tuple[float, tuple[int, ...]]] = {}
        """Problem → its last change, its generations then."""
        self._unreadable: dict[str, float] = {}
        """Problem → its last change when its keys were found to hold something else."""
        self._packed: dict[str, float] = {}
        """Problem → its last change when there was nothing left to pack."""
        self._faded = 0
        """The generation at which counts by age faded last."""
        self._misread = False
        """Whether it was said that counts by age cannot be read."""
        self._nothing_since: float | None = None
        """When there was first nothing at all of the history."""

    def lead(self) -> bool:
        """Take the history's lease, or renew it; whether it is this keeper's now."""
        self._asked = time.monotonic()
        self.leading = bool(self._lease(LEASE_S))
        return self.leading

    def resign(self) -> None:
        """Give the lease up, so that another need not wait for its end."""
        self.leading = False
        self._lease(0)

    def run_once(self, *, unasked: bool = False) -> Pass:
        """Make one pass, if no other keeper has the lease.

        Args:
            unasked: make it whoever has the lease.
        """
        began = time.monotonic()
        if not unasked and not self.lead():
            return Pass(None)
        plan = self.plan()
        done = Pass(plan, problems=plan.problems, bytes=plan.bytes)

        def may_go_on() -> bool:
            if self._stopping.is_set() or time.monotonic() - began > _LONGEST_PASS_S:
                return False
            return unasked or self._still_leading()

        if plan.expired:
            done = self._expire(plan, done)
        else:
            self._note_emptiness(plan)
            # what makes room comes first, as a full server refuses what takes room
            for step in (self._drop_empty, self._trim, self._narrow, self._evict, self._compact, self._judge):
                done = step(plan, done, may_go_on)
            if may_go_on():
                self._store.forget_versions()
        return replace(done, finished=may_go_on(), seconds=time.monotonic() - began)

    def survey(self) -> Plan:
        """How much there is of the history, and whether it has expired; nothing else is planned."""
        return self._survey(self._clock(), self._store.problems())

    def plan(self) -> Plan:
        """What a pass would do now; nothing is changed."""
        now, problems = self._clock(), self._store.problems()
        plan = self._survey(now, problems)
        about = plan.about
        self._forget_all_but(problems)
        if plan.expired or about is None:
            return plan
        empty, trimmed = self._outdated(problems, about, now)
        gone = set(empty)
        left = [problem for problem in problems if problem not in gone]
        narrowed, evicted = self._surplus(left, about.max_bytes)
        gone.update(evicted)
        rested = [
            problem
            for problem in left
            if problem not in gone
            and now - problem.changed / 1e6 > REST_S
            and self._packed.get(problem.problem) != problem.changed
        ]
        return replace(
            plan,
            empty=empty,
            trimmed=trimmed,
            narrowed=narrowed,
            evicted=evicted,
            compacted=self._unpacked(rested),
            horizon=self._judged(about),
        )

    # what a pass does

    def _expire(self, plan: Plan, done: Pass) -> Pass:
        # not the problems of a job that comes back to the history just now
        problems = self._store.problems()
        for some in _parts(problems):
            if self._stopping.is_set():
                return done
            self._store.drop(some)
        if self._store.problems():
            return done
        self._store.delete()
        logger.info(
            "History %s is removed, with its %d problems: it was unused for %.1f days.",
            plan.history,
            plan.problems,
            plan.unused / 86400,
        )
        return replace(done, expired=True, problems=0, bytes=0)

    def _drop_empty(self, plan: Plan, done: Pass, may_go_on: Callable[[], bool]) -> Pass:
        for some in _parts(plan.empty):
            if not may_go_on():
                return done
            gone = self._store.drop(some)
            done = replace(
                done,
                empty=done.empty + len(gone),
                problems=done.problems - len(gone),
                bytes=done.bytes - sum(one.bytes for one in gone),
            )
        return done

    def _trim(self, plan: Plan, done: Pass, may_go_on: Callable[[], bool]) -> Pass:
        for one in plan.trimmed:
            if not may_go_on():
                return done
            now = self._tried(one, self._trim_one)
            if now is None:
                done = replace(done, failed=done.failed + 1)
            else:
                done = replace(done, trimmed=done.trimmed + 1, bytes=done.bytes + now - one.bytes)
        return done

    def _narrow(self, plan: Plan, done: Pass, may_go_on: Callable[[], bool]) -> Pass:
        for one, most in plan.narrowed:
            if not may_go_on():
                break
            now = self._tried(one, partial(self._trim_one, most=most))
            if now is None:
                done = replace(done, failed=done.failed + 1)
            else:
                done = replace(done, narrowed=done.narrowed + 1, bytes=done.bytes + now - one.bytes)
        if done.narrowed and plan.about is not None:
            logger.info(
                "History %s took %d bytes of its %s: %d of its %d problems lost their oldest rollouts.",
                plan.history,
                plan.bytes,
                plan.about.max_bytes,
                done.narrowed,
                plan.problems,
            )
        return done

    def _evict(self, plan: Plan, done: Pass, may_go_on: Callable[[], bool]) -> Pass:
        for some in _parts(plan.evicted):
            if not may_go_on():
                break
            gone = self._store.drop(some)
            size = sum(one.bytes for one in gone)
            done = replace(
                done,
                evicted=done.evicted + len(gone),
                evicted_bytes=done.evicted_bytes + size,
                problems=done.problems - len(gone),
                bytes=done.bytes - size,
            )
        if done.evicted and plan.about is not None:
            logger.warning(
                "History %s took %d bytes of its %s: %d of its %d problems were evicted, those used least recently, "
                "which took %d. Raise spec.history.maxBytes if they are still sampled.",
                plan.history,
                plan.bytes,
                plan.about.max_bytes,
                done.evicted,
                plan.problems,
                done.evicted_bytes,
            )
        return done

    def _judge(self, plan: Plan, done: Pass, may_go_on: Callable[[], bool]) -> Pass:
        if plan.about is None or not may_go_on():
            return done
        if plan.horizon != plan.about.horizon:
            self._store.set_horizon(plan.horizon)
            self._store.forget_ages()
            logger.info(
                "History %s keeps rollouts of %s from now on, not of %s: what was accepted of drafts by age says so.",
                plan.history,
                as_old(plan.horizon),
                as_old(plan.about.horizon),
            )
        elif plan.about.generation > self._faded:
            # counts of all time would show too late what has changed
            half_life = plan.horizon or plan.about.window
            run(self._client, Call(_DECAY, [self.keys.ages, self.keys.meta], [plan.about.generation, half_life]))
            self._faded = plan.about.generation
        return done

    def _compact(self, plan: Plan, done: Pass, may_go_on: Callable[[], bool]) -> Pass:
        for one in plan.compacted:
            if not may_go_on():
                return done
            packed = self._tried(one, lambda problem: self._pack(problem, may_go_on))
            if packed is None:
                done = replace(done, failed=done.failed + 1)
            else:
                if may_go_on():  # else there may be more to pack
                    self._packed[one.problem] = one.changed
                done = replace(done, compacted=done.compacted + packed)
        return done

    def _trim_one(self, problem: str, most: int | None = None) -> int:
        """Bytes that the problem takes now."""
        now = self._store.trim(problem, most=most)
        self._generations.pop(problem, None)
        return now

    def _pack(self, problem: str, may_go_on: Callable[[], bool]) -> bool:
        """Pack a problem's log, part by part if it is long; whether there was anything to pack."""
        packed = self._store.compact(problem)
        while packed and may_go_on() and self._store.compact(problem):
            pass
        return packed

    def _tried(self, problem: Problem, effect: Callable[[str], _Result]) -> _Result | None:
        """What *effect* gives for a problem; None for one whose keys hold something else: it must not stop the pass."""
        try:
            return effect(problem.problem)
        except redis.ResponseError as error:
            if concerns_the_server(error):
                raise
            self._packed[problem.problem] = problem.changed
            self._unreadable[problem.problem] = problem.changed
            logger.warning(
                "Problem %r of history %s is left as it is, its keys are not what they should be: %s",
                problem.problem,
                self.keys.full_name,
                error,
            )
            return None

    # what a plan is made from

    def _survey(self, now: float, problems: Sequence[Problem]) -> Plan:
        about = self._store.about()
        total = sum(problem.bytes for problem in problems)
        unused = max(0.0, now - self._last_used(about, problems, now))
        # a name without anything is no history, but somebody may be about to open it
        patience = self._retention if about or problems or self._retention is None else REST_S
        expired = patience is not None and unused > patience
        return Plan(self.keys.full_name, about, len(problems), total, unused, expired)

    def _server_clock(self) -> float:
        seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6

    def _last_used(self, about: History | None, problems: Sequence[Problem], now: float) -> float:
        """When the history was used last; of one without problems, when that was first noted."""
        if problems:
            return max(problem.used for problem in problems)
        if about is None:
            self._nothing_since = now if self._nothing_since is None else self._nothing_since
            return self._nothing_since
        since: Any = self._client.hget(self.keys.meta, _EMPTY)
        return now if since is None else float(since)

    def _note_emptiness(self, plan: Plan) -> None:
        """Keep in Redis since when the history has been without problems: a keeper may not live for so long."""
        if self._retention is None or plan.about is None:
            return
        if plan.problems:
            self._client.hdel(self.keys.meta, _EMPTY)
        elif not plan.unused:
            self._client.hsetnx(self.keys.meta, _EMPTY, repr(self._clock()))

    def _outdated(
        self, problems: Sequence[Problem], about: History, now: float
    ) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
        """Problems of which nothing is kept, and those of which some rollouts have left the window."""
        unknown = {
            one.problem: one
            for one in problems
            if one.changed not in (self._generations.get(one.problem, (None,))[0], self._unreadable.get(one.problem))
        }
        for problem, sampled in self._store.generations_of(list(unknown)).items():
            one = unknown[problem]
            if sampled is None:
                self._unreadable[problem] = one.changed
            elif sampled or now - one.used > _EXPECTED_S:
                self._generations[problem] = one.changed, tuple(sampled)
        empty, outdated = [], []
        for one in problems:
            changed, generations = self._generations.get(one.problem, (None, ()))
            if changed != one.changed or self._unreadable.get(one.problem) == one.changed:
                continue  # of what is not known nothing is dropped
            if not generations:
                empty.append(one)
            elif min(generations) < about.oldest_kept(generations):
                outdated.append(one)
        return tuple(empty), tuple(outdated)

    def _surplus(
        self, problems: Sequence[Problem], max_bytes: int | None
    ) -> tuple[tuple[tuple[Problem, int], ...], tuple[Problem, ...]]:
        """Problems that keep fewer generations, and how many, and those that leave; none if all is within the cap."""
        if max_bytes is None or sum(problem.bytes for problem in problems) <= max_bytes:
            return (), ()
        held = [Held(one.bytes, len(self._generations.get(one.problem, (0.0, ()))[1]) or 1) for one in problems]
        kept = list(zip(problems, held, select_evictions(held, _LOW_WATER * max_bytes), strict=True))
        return (
            tuple((one, most) for one, had, most in kept if 0 < most < had.generations),
            tuple(one for one, _, most in kept if most == 0),
        )

    def _judged(self, about: History) -> int | None:
        """After how many generations rollouts are not worth keeping; as now if the counts cannot be read."""
        try:
            return next_horizon(about.horizon, self._store.ages())
        except (ValueError, redis.ResponseError) as error:
            if isinstance(error, redis.ResponseError) and concerns_the_server(error):
                raise
            if not self._misread:
                logger.warning("Drafts by age of history %s cannot be read: %s", self.keys.full_name, error)
            self._misread = True
            return about.horizon

    def _unpacked(self, problems: Sequence[Problem]) -> tuple[Problem, ...]:
        """Those of *problems* that have anything in their logs: to read all blocks for that would take long."""
        lengths = self._store.unpacked(one.problem for one in problems)
        self._packed |= {one.problem: one.changed for one in problems if not lengths[one.problem]}
        return tuple(one for one in problems if lengths[one.problem])

    def _forget_all_but(self, problems: Iterable[Problem]) -> None:
        known = {problem.problem for problem in problems}
        self._generations = {name: what for name, what in self._generations.items() if name in known}
        self._unreadable = {name: what for name, what in self._unreadable.items() if name in known}
        self._packed = {name: what for name, what in self._packed.items() if name in known}

    # the lease

    def _still_leading(self) -> bool:
        if time.monotonic() - self._asked > LEASE_S / 3:
            self.lead()
        return self.leading

    def _lease(self, seconds: float) -> int:
        return int(run(self._client, Call(_LEAD, [self.keys.keeper], [self._token, int(seconds * 1000)])))


class MaintenanceThread:
    """Looks after a job's history within the job, for where no service does; while there is one, it does nothing."""

    def __init__(self, client: Redis, keys: HistoryKeys) -> None:
        self.failure: Exception | None = None
        """Why the last pass failed."""
        self._stopping = threading.Event()
        # the job's own history is in use, however long it takes to make a rollout
        self._keeper = HistoryMaintainer(client, keys, token=new_token(), retention=None, stopping=self._stopping)
        self._thread = threading.Thread(target=self._run, name="history-keeper", daemon=True)

    def start(self) -> None:
        """Begin; :meth:`stop` ends it."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the effect under way, and give the lease up."""
        self._stopping.set()
        self._thread.join(timeout=15)

    def _run(self) -> None:
        said = float("-inf")
        while not self._stopping.is_set():
            pause = PASS_EVERY_S
            try:
                pause = pause_after(self._keeper.run_once())
                self.failure = None
            except Exception as error:  # whatever it is, the job goes on; its history is a cache in the end
                self.failure = error
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    known = isinstance(error, redis.RedisError)
                    logger.warning(
                        "History %s is not looked after: %s: %s",
                        self._keeper.keys.full_name,
                        type(error).__name__,
                        error,
                        exc_info=not known,
                    )
            self._stopping.wait(pause)
        try:
            self._keeper.resign()
        except redis.RedisError as error:
            logger.info("The lease of history %s ends by itself: %s", self._keeper.keys.full_name, error)


def pause_after(done: Pass) -> float:
    """Seconds to rest after a pass: to look through a large history often would keep its server busy."""
    return max(PASS_EVERY_S, 9 * done.seconds) if done.finished else PASS_EVERY_S


def _parts(problems: Sequence[Problem]) -> Iterable[Sequence[Problem]]:
    for at in range(0, len(problems), _AT_ONCE):
        yield problems[at : at + _AT_ONCE]
