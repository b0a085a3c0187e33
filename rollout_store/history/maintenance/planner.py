"""Plans the maintenance of a history, without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rollout_store.history.catalog import StoredProblem
from rollout_store.history.metadata import HistoryInfo
from rollout_store.history.store import HistoryStore

COMPACTION_DELAY_S = 30.0
"""Seconds without a change after which a problem is compacted; before that, more of its rollouts are likely to come."""
EMPTY_PROBLEM_S = 3600.0
"""Seconds to keep an announced problem without rollouts; its first rollouts may still be running."""
EVICTION_TARGET = 0.95
"""Fraction of the byte cap that an eviction aims at, so that the next one is not due immediately."""


class ProblemSize(NamedTuple):
    """The size of a problem. Its bytes are assumed to be spread evenly over its generations."""

    bytes: int
    generations: int
    """Number of generations, at least 1."""


def generations_to_keep(problems: Sequence[ProblemSize], target: float) -> list[int]:
    """Return how many generations each problem keeps, so that all problems together take at most *target* bytes.

    The oldest generations are deleted first, from all problems alike: the problems with the most generations lose one,
    then all problems with as many as these have now, and so on. Among problems with equally many generations, the least
    recently used ones lose theirs first. A problem that loses its only generation is deleted. That comes last, because
    training returns to its problems in turn and would always miss the problem that was deleted just before. The
    *problems* are given least recently used first.

    Returns:
        For each problem a number from 0 to its number of generations. As few generations as possible are deleted: with
        one more, the total would exceed *target*.
    """
    size = float(sum(problem.bytes for problem in problems))
    bytes_per_generation = [problem.bytes / problem.generations for problem in problems]
    level = max((problem.generations for problem in problems), default=0)
    freed_at_level = [0.0] * (level + 1)
    for problem, share in zip(problems, bytes_per_generation, strict=True):
        freed_at_level[problem.generations] += share
    freed = 0.0
    while size > target and level > 0:
        freed += freed_at_level[level]
        if size - freed <= target:
            break
        size -= freed
        level -= 1
    kept = [min(problem.generations, level) for problem in problems]
    for position, problem in enumerate(problems):
        if size <= target:
            break
        if problem.generations >= level > 0:
            kept[position] = level - 1
            size -= bytes_per_generation[position]
    return kept


@dataclass(frozen=True)
class MaintenancePlan:
    """The maintenance that a history needs in its current state."""

    history: str
    info: HistoryInfo | None
    """Metadata of the history; None if there is none."""
    problems: int
    """Number of problems."""
    bytes: int
    """Size of all problems in Redis."""
    unused: float
    """Seconds since the last append to the history or draft from it."""
    expired: bool
    """Whether the history was unused for longer than the retention time and has to be deleted."""
    empty: tuple[StoredProblem, ...] = ()
    """Problems to delete because they were announced once but have no rollouts."""
    trim: tuple[StoredProblem, ...] = ()
    """Problems with rollouts that have left the window."""
    trim_to_cap: tuple[tuple[StoredProblem, int], ...] = ()
    """Problems that lose their oldest generations because of the byte cap, with the number of generations to keep."""
    evict: tuple[StoredProblem, ...] = ()
    """Problems to delete because of the byte cap, least recently used first."""
    compact: tuple[StoredProblem, ...] = ()
    """Problems with a log to compact that have not changed for some time."""


class MaintenancePlanner:
    """Plans maintenance runs over one history.

    The planner remembers what it has read of each problem until the problem changes, so that a run over an unchanged
    history reads little more than the catalog.
    """

    def __init__(self, store: HistoryStore, *, retention: float | None, clock: Callable[[], float]) -> None:
        """Prepare planning; nothing is read yet.

        A history that was unused for *retention* seconds has expired; *clock* returns the server's time.
        """
        self._store = store
        self._retention = retention
        self._clock = clock
        self._generations: dict[str, tuple[float, tuple[int, ...]]] = {}
        """Problem id → its last change and its generations at that time."""
        self._unreadable: dict[str, float] = {}
        """Problem id → its last change when a key of the wrong type was found."""
        self._compacted: dict[str, float] = {}
        """Problem id → its last change when there was nothing left to compact."""
        self._missing_since: float | None = None
        """When the history was first seen without metadata and problems."""

    def survey(self) -> MaintenancePlan:
        """Return the size of the history and whether it has expired; nothing else is planned."""
        return self._survey(self._clock(), self._store.catalog.problems())

    def plan(self) -> MaintenancePlan:
        """Return what a maintenance run would do now."""
        now, problems = self._clock(), self._store.catalog.problems()
        plan = self._survey(now, problems)
        info = plan.info
        self._discard_all_except(problem.problem_id for problem in problems)
        if plan.expired or info is None:
            return plan
        self._read_generations(problems, now)
        empty, outdated = self._find_empty_and_outdated(problems, info)
        deleted = set(empty)
        remaining = [problem for problem in problems if problem not in deleted]
        trim_to_cap, evicted = self._plan_eviction(remaining, info.max_bytes)
        deleted.update(evicted)
        unchanged = [
            problem
            for problem in remaining
            if problem not in deleted
            and now - problem.last_changed / 1e6 > COMPACTION_DELAY_S
            and self._compacted.get(problem.problem_id) != problem.last_changed
        ]
        return replace(
            plan,
            empty=empty,
            trim=outdated,
            trim_to_cap=trim_to_cap,
            evict=evicted,
            compact=self._with_log_entries(unchanged),
        )

    # Results that a maintenance run reports back

    def note_trimmed(self, problem: StoredProblem) -> None:
        """Read a problem's generations again, because it was trimmed."""
        self._generations.pop(problem.problem_id, None)

    def note_compacted(self, problem: StoredProblem) -> None:
        """Plan no compaction of a problem until it changes, because nothing is left to compact."""
        self._compacted[problem.problem_id] = problem.last_changed

    def note_unreadable(self, problem: StoredProblem) -> None:
        """Leave a problem alone until it changes, because one of its keys has the wrong type."""
        self._compacted[problem.problem_id] = problem.last_changed
        self._unreadable[problem.problem_id] = problem.last_changed

    # Expiry

    def _survey(self, now: float, problems: Sequence[StoredProblem]) -> MaintenancePlan:
        info = self._store.metadata.info()
        size = sum(problem.bytes for problem in problems)
        unused = max(0.0, now - self._last_used(info, problems, now))
        # A name without data is not a history, but a job may be about to open it.
        exists = info is not None or bool(problems)
        retention = self._retention if exists or self._retention is None else COMPACTION_DELAY_S
        expired = retention is not None and unused > retention
        return MaintenancePlan(self._store.keys.full_name, info, len(problems), size, unused, expired)

    def _last_used(self, info: HistoryInfo | None, problems: Sequence[StoredProblem], now: float) -> float:
        """Return when the history was used last, or when it was first seen without problems."""
        if problems:
            return max(problem.last_used for problem in problems)
        if info is None:
            self._missing_since = now if self._missing_since is None else self._missing_since
            return self._missing_since
        empty_since = self._store.metadata.empty_since()
        return now if empty_since is None else empty_since

    # The window

    def _read_generations(self, problems: Sequence[StoredProblem], now: float) -> None:
        """Read the generations of problems that have changed since they were read last."""
        changed = {
            problem.problem_id: problem
            for problem in problems
            if problem.last_changed
            not in (self._generations.get(problem.problem_id, (None,))[0], self._unreadable.get(problem.problem_id))
        }
        for problem_id, sampled in self._store.catalog.generations(list(changed)).items():
            problem = changed[problem_id]
            if sampled is None:
                self._unreadable[problem_id] = problem.last_changed
            elif sampled or now - problem.last_used > EMPTY_PROBLEM_S:
                self._generations[problem_id] = problem.last_changed, tuple(sampled)

    def _find_empty_and_outdated(
        self, problems: Sequence[StoredProblem], info: HistoryInfo
    ) -> tuple[tuple[StoredProblem, ...], tuple[StoredProblem, ...]]:
        """Return problems without rollouts, and problems with rollouts that have left the window."""
        empty, outdated = [], []
        for problem in problems:
            last_changed, generations = self._generations.get(problem.problem_id, (None, ()))
            unreadable = self._unreadable.get(problem.problem_id) == problem.last_changed
            if last_changed != problem.last_changed or unreadable:
                continue  # nothing is deleted of a problem whose generations are unknown
            if not generations:
                empty.append(problem)
            elif min(generations) < info.oldest_kept(generations):
                outdated.append(problem)
        return tuple(empty), tuple(outdated)

    # The byte cap

    def _plan_eviction(
        self, problems: Sequence[StoredProblem], max_bytes: int | None
    ) -> tuple[tuple[tuple[StoredProblem, int], ...], tuple[StoredProblem, ...]]:
        """Return problems to trim, with the number of generations to keep, and problems to delete for the byte cap."""
        if max_bytes is None or sum(problem.bytes for problem in problems) <= max_bytes:
            return (), ()
        sizes = [
            ProblemSize(problem.bytes, len(self._generations.get(problem.problem_id, (0.0, ()))[1]) or 1)
            for problem in problems
        ]
        planned = list(zip(problems, sizes, generations_to_keep(sizes, EVICTION_TARGET * max_bytes), strict=True))
        return (
            tuple((problem, kept) for problem, size, kept in planned if 0 < kept < size.generations),
            tuple(problem for problem, _, kept in planned if kept == 0),
        )

    # Compaction

    def _with_log_entries(self, problems: Sequence[StoredProblem]) -> tuple[StoredProblem, ...]:
        """Return those of *problems* that have entries in their logs."""
        lengths = self._store.catalog.log_lengths(problem.problem_id for problem in problems)
        for problem in problems:
            if not lengths[problem.problem_id]:
                self.note_compacted(problem)
        return tuple(problem for problem in problems if lengths[problem.problem_id])

    def _discard_all_except(self, problem_ids: Iterable[str]) -> None:
        known = set(problem_ids)
        self._generations = {name: value for name, value in self._generations.items() if name in known}
        self._unreadable = {name: value for name, value in self._unreadable.items() if name in known}
        self._compacted = {name: value for name, value in self._compacted.items() if name in known}
