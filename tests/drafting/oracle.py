"""What the suffix index must answer, by trying everything: lists, loops, no structure."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

MAX_OCCURRENCES = 64
START = -1
LENGTHS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
SHARES = [0.0, 0.25, 0.5, 0.7, 0.9, 1.0]
VOTES = [1, 2, 3, 5, 9, 17, 33]
FADE = 1.0 - 1.0 / 2048.0
PRIOR_OBSERVATIONS = 2.0

Cell = tuple[str, int, float, int]


@dataclass
class Drafted:
    """A draft, field by field as the index gives it."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    source: str = "none"
    match_length: int = 0


@dataclass
class _Proposal:
    source: str
    match_length: int
    positions: list[tuple[int, Cell, float]]
    drafted: int
    expected: float


@dataclass
class _Request:
    problem: str
    prompt: list[int]
    sources: Collection[str]
    response: list[int] = field(default_factory=list)
    proposals: list[_Proposal] = field(default_factory=list)
    chosen: str = "none"
    since_draft: list[int] = field(default_factory=list)


def matches(context: Sequence[int], documents: Sequence[Sequence[int]], limit: int, least: int) -> tuple[int, list]:
    """The longest match and its (document, position) occurrences, documents in order, later positions first."""
    for length in range(min(limit, len(context)), least - 1, -1):
        wanted = list(context[len(context) - length :])
        found = [
            (document, position)
            for document in documents
            for position in range(len(document) - 1, length - 1, -1)
            if list(document[position - length : position]) == wanted
        ]
        if found:
            return length, found
    return 0, []


def cell_of(source: str, length: int, top: int, votes: int) -> Cell:
    """The bucket of a draft position."""

    def floor(edges: list, value: float) -> float:
        return edges[bisect.bisect_right(edges, value) - 1]

    return source, floor(LENGTHS, length), floor(SHARES, top / votes), floor(VOTES, votes)


class Oracle:
    """The index's interface; handles are given by the caller."""

    def __init__(self, max_match: int, min_match: int) -> None:
        self.max_match = max_match
        self.min_match = min_match
        self.problems: dict[str, dict[str, tuple[int, int, list[int]]]] = {}
        self.requests: dict[int, _Request] = {}
        self.observed: dict[Cell, tuple[float, float]] = {}
        self.counters = {source: [0, 0, 0, 0] for source in ("history", "self")}
        self._sequence = 0

    def add(self, problem: str, rollouts: Sequence[tuple[str, int, Sequence[int]]]) -> int:
        known = self.problems.setdefault(problem, {})
        before = len(known)
        for rollout_id, generation, tokens in rollouts:
            if rollout_id not in known:
                known[rollout_id] = (generation, self._sequence, list(tokens))
                self._sequence += 1
        return len(known) - before

    def drop_rollout(self, problem: str, rollout_id: str) -> bool:
        return self.problems.get(problem, {}).pop(rollout_id, None) is not None

    def drop_before(self, problem: str, generation: int) -> int:
        known = self.problems.get(problem, {})
        old = [rollout_id for rollout_id, rollout in known.items() if rollout[0] < generation]
        for rollout_id in old:
            del known[rollout_id]
        return len(old)

    def drop_problem(self, problem: str) -> bool:
        return bool(self.problems.pop(problem, {}))

    def open(self, handle: int, problem: str, prompt: Sequence[int], sources: Collection[str]) -> None:
        self.requests[handle] = _Request(problem, list(prompt), sources)

    def close(self, handle: int) -> None:
        del self.requests[handle]

    def probability(self, cell: Cell) -> float:
        _, length, share, votes = cell
        i = SHARES.index(share)
        middle = (SHARES[i] + SHARES[i + 1]) / 2.0 if i + 1 < len(SHARES) else 1.0
        mean = middle * (length / (length + 1.0)) * (votes / (votes + 1.0))
        accepted, rejected = self.observed.get(cell, (0.0, 0.0))
        accepted = PRIOR_OBSERVATIONS * mean + accepted
        rejected = PRIOR_OBSERVATIONS * (1.0 - mean) + rejected
        return accepted / (accepted + rejected)

    def extend(self, handle: int, tokens: Sequence[int]) -> None:
        request = self.requests[handle]
        first = len(request.since_draft)
        request.since_draft += tokens
        for proposal in request.proposals:
            for i, (token, cell, _) in enumerate(proposal.positions[: len(request.since_draft)]):
                if [position[0] for position in proposal.positions[:i]] != request.since_draft[:i]:
                    break
                if i < first:
                    continue
                hit = token == request.since_draft[i]
                accepted, rejected = self.observed.get(cell, (0.0, 0.0))
                self.observed[cell] = (accepted * FADE + hit, rejected * FADE + (not hit))
                if proposal.source == request.chosen and i < proposal.drafted:
                    self.counters[proposal.source][2] += 1
                    self.counters[proposal.source][3] += hit
        request.response += tokens

    def draft(self, handle: int, budget: int, min_survival: float) -> Drafted:
        request = self.requests[handle]
        request.proposals = []
        request.chosen = "none"
        request.since_draft = []
        if budget == 0:
            return Drafted()
        if "history" in request.sources:
            newest_first = sorted(
                self.problems.get(request.problem, {}).values(), key=lambda r: (r[0], r[1]), reverse=True
            )
            documents = [[START, *tokens] for _, _, tokens in newest_first]
            self._propose(request, "history", [START, *request.response], documents, budget, min_survival)
        if "self" in request.sources:
            text = request.prompt + request.response
            self._propose(request, "self", text, [text], budget, min_survival)
        best = max(
            (proposal for proposal in request.proposals if proposal.drafted),
            key=lambda proposal: (proposal.expected, proposal.source == "history"),
            default=None,
        )
        if best is None:
            return Drafted()
        request.chosen = best.source
        self.counters[best.source][0] += 1
        self.counters[best.source][1] += best.drafted
        return Drafted(
            tokens=[token for token, _, _ in best.positions[: best.drafted]],
            probabilities=[probability for _, _, probability in best.positions[: best.drafted]],
            source=best.source,
            match_length=best.match_length,
        )

    def _propose(
        self,
        request: _Request,
        source: str,
        context: Sequence[int],
        documents: Sequence[Sequence[int]],
        budget: int,
        min_survival: float,
    ) -> None:
        length, occurrences = matches(context, documents, self.max_match, self.min_match)
        occurrences = occurrences[:MAX_OCCURRENCES]
        positions: list[tuple[int, Cell, float]] = []
        survival, expected, drafted = 1.0, 0.0, 0
        for step in range(budget):
            occurrences = [(document, at) for document, at in occurrences if at + step < len(document)]
            if not occurrences:
                break
            votes = [document[at + step] for document, at in occurrences]
            top = max(votes, key=lambda token: (votes.count(token), -votes.index(token)))
            cell = cell_of(source, length + step, votes.count(top), len(votes))
            probability = self.probability(cell)
            survival *= probability
            positions.append((top, cell, probability))
            if survival < min_survival:
                break
            drafted += 1
            expected += survival
            occurrences = [(document, at) for document, at in occurrences if document[at + step] == top]
        request.proposals.append(_Proposal(source, length, positions, drafted, expected))
