"""An oracle for the suffix index: the same results by exhaustive search, with lists and loops only."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_worker.drafting import Draft
from rollout_worker.drafting.index import Occurrence

BOUNDARY = -1
HISTORY, LIVE, CROSS_PROBLEM, ANCHORS = 32, 24, 16, 4
"""The numbers of occurrences that are used of each source."""
MAX_VISITED = 48
"""Entries of a chain of live texts that are searched at least."""
SUFFICIENT_MATCH = 16
FEW_TOKENS = 2
"""The cross-problem pool is searched only if no other match is this long."""
LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64]
VOTES = [1, 2, 3, 5, 9, 17]
PRIOR_MEANS = [0.3, 0.65, 0.9, 1.0]
SOURCES = ("history", "self", "siblings", "cross_problem")
EXPERTS = (*SOURCES, "anchored")
"""The experts of the mixture: the sources, and rollouts of the history that a request has recently followed."""
CANDIDATES, LEVELS = 6, 32
AGES = [1, 3, 7]
MAX_OBSERVATIONS = 2000.0
UNSEEN = MARGIN = 1e-3
UNLIKELY = 0.02
SCORE_TOLERANCE = 0.02
TOLERANCE = 2e-3
"""Differences caused by single precision and by another order of summation."""

Bucket = tuple[str, int, int, int, int]
Key = tuple[int, int, tuple[int, ...]]
"""Match length, generation and tokens of an occurrence."""


@dataclass
class Text:
    """Tokens; the first ``context`` of them are matched and never drafted."""

    tokens: list[int]
    context: int
    generation: int = 0
    reward: float | None = None


@dataclass
class Request:
    """An open request."""

    problem: str
    prompt: list[int]
    sources: Collection[str]
    response: Text
    stop_tokens: Collection[int]
    positions: list[Position] = field(default_factory=list)
    drafted: int = 0
    observed: int = 0


@dataclass
class Position:
    """One position of a draft."""

    token: int
    previous: int
    expert: str
    match: int
    index: int
    margin: float
    """Difference between its score and that of the next best token."""
    candidates: list[int]
    mixed: list[float]
    """Uncalibrated probability of each candidate."""
    levels: list[tuple[Bucket, list[float]]]
    masses: dict[str, float]
    """Probability mass of the token, by expert."""
    votes: Counter[tuple[int, int]]
    """Votes of the history, by vote class and candidate."""
    generations: dict[str, int]
    """Generation of the newest vote for the token, by expert."""

    @property
    def source(self) -> str:
        return "history" if self.expert == "anchored" else self.expert


def occurrences(context: Sequence[int], texts: Sequence[Text], depth: int, length: int, min_match: int) -> list[Key]:
    """Return all occurrences, longest matches first."""
    found = []
    for text in texts:
        for position in range(max(1, text.context), len(text.tokens)):
            match = 0
            while (
                match < min(depth, position, len(context)) and text.tokens[position - 1 - match] == context[-1 - match]
            ):
                match += 1
            if match >= min_match:
                found.append((match, text.generation, tuple(text.tokens[position : position + length])))
    return sorted(found, reverse=True)


class LearnedWeight:
    """A coefficient that is learned with AdaGrad step sizes."""

    def __init__(self, value: float = 0.0) -> None:
        self.value, self._squares = value, 1e-2

    def ascend(self, gradient: float, rate: float) -> None:
        self._squares += gradient * gradient
        self.value += rate * gradient / math.sqrt(self._squares)


def log_odds(probability: float) -> float:
    p = min(max(probability, MARGIN), 1 - MARGIN)
    return math.log(p / (1 - p))


def length_bucket(match: int) -> int:
    return bisect_right(LENGTHS, match) - 1


class Mixture:
    """The probability model of the next token, given occurrences."""

    def __init__(self) -> None:
        self.evidence: dict[Bucket, tuple[float, float]] = {}
        self.slope, self.bias = LearnedWeight(1.0), LearnedWeight()
        self.tokens: dict[int, LearnedWeight] = {}
        self.pairs: dict[tuple[int, int], LearnedWeight] = {}
        self.matches: dict[tuple[str, int], LearnedWeight] = {}
        self.indices: dict[int, LearnedWeight] = {}
        self.votes: dict[int, LearnedWeight] = {}

    def vote(self, vote_class: int) -> float:
        return math.exp(max(-4.0, min(4.0, self._of(self.votes, vote_class).value)))

    def weight(self, bucket: Bucket) -> float:
        _, length, votes, share, _ = bucket
        evidence = LENGTHS[length] * VOTES[votes]
        prior = PRIOR_MEANS[share] * LENGTHS[length] / (LENGTHS[length] + 1) * evidence / (evidence + 1)
        positive, negative = self.evidence.get(bucket, (0.0, 0.0))
        return (positive + 2 * prior) / (positive + negative + 2)

    def mix(
        self, found: Sequence[tuple[Occurrence, int]], index: int, previous: int, wanted: int | None
    ) -> Position | None:
        """Return the position with the most probable token, or with *wanted* if that is equally probable.

        Returns None if no token can be drafted.
        """
        candidates: list[int] = []
        weighted = {expert: [0.0] * CANDIDATES for expert in EXPERTS}
        total = dict.fromkeys(EXPERTS, 0.0)
        votes = dict.fromkeys(EXPERTS, 0)
        class_votes: Counter[tuple[int, int]] = Counter()
        generations: dict[tuple[str, int], int] = {}
        mass = {expert: [0.0] * CANDIDATES for expert in EXPERTS}
        levels: list[tuple[Bucket, list[float]]] = []
        remaining = 1.0
        for length in sorted({length_bucket(occurrence.match_length + index) for occurrence, _ in found}, reverse=True):
            changed = set()
            for occurrence, vote_class in found:
                if length_bucket(occurrence.match_length + index) != length:
                    continue
                expert = "anchored" if occurrence.anchored else occurrence.source
                token = occurrence.tokens[index] if index < len(occurrence.tokens) else BOUNDARY
                if token not in candidates and len(candidates) < CANDIDATES:
                    candidates.append(token)
                if token in candidates:
                    weighted[expert][candidates.index(token)] += self.vote(vote_class)
                    class_votes[vote_class, candidates.index(token)] += occurrence.source == "history"
                    newest = generations.get((expert, token), occurrence.generation)
                    generations[expert, token] = max(newest, occurrence.generation)
                total[expert] += self.vote(vote_class)
                votes[expert] += 1
                changed.add(expert)
            for expert in EXPERTS:
                if expert not in changed or len(levels) == LEVELS:
                    continue
                shares = [each / total[expert] for each in weighted[expert]]
                top, number = max(shares), votes[expert]
                share = 3 if top > 1 - 1e-4 else 2 if top > 0.8 - 1e-4 else 1 if top > 0.5 - 1e-4 else 0
                place = 0 if index == 0 else 1 if index < 3 else 2
                bucket = (expert, length, bisect_right(VOTES, number) - 1, share, place)
                levels.append(
                    (bucket, [int(255 * share + 0.5) / 255 for share in shares])
                )  # as they are stored in a byte
                weight = self.weight(bucket)
                for k in range(len(candidates)):
                    mass[expert][k] += remaining * weight * shares[k]
                remaining *= 1 - weight
        mixed = [
            0.0 if token == BOUNDARY else sum(mass[expert][k] for expert in EXPERTS)
            for k, token in enumerate(candidates)
        ]
        scores = {
            token: self.preference(previous, token, mixed[k]) for k, token in enumerate(candidates) if mixed[k] > 0.0
        }
        if not scores:
            return None
        token = max(scores, key=lambda candidate: scores[candidate])
        if wanted is not None and wanted != token:
            assert scores.get(wanted, -math.inf) >= scores[token] - SCORE_TOLERANCE, f"{wanted} is drafted of {scores}"
            token = wanted
        k = candidates.index(token)
        masses = {expert: mass[expert][k] for expert in EXPERTS}
        top_expert = max(EXPERTS, key=lambda expert: masses[expert])
        match = min(255, max(occurrence.match_length for occurrence, _ in found) + index)
        margin = scores[token] - max(
            (score for candidate, score in scores.items() if candidate != token), default=-math.inf
        )
        index = min(index, 15)
        newest_votes = {expert: generations[expert, token] for expert in EXPERTS if (expert, token) in generations}
        return Position(
            token,
            previous,
            top_expert,
            match,
            index,
            margin,
            candidates,
            mixed,
            levels,
            masses,
            class_votes,
            newest_votes,
        )

    def preference(self, previous: int, token: int, mixed: float) -> float:
        score = self.slope.value * log_odds(mixed) + self._of(self.tokens, token).value
        return score + self._of(self.pairs, (previous, token)).value

    def calibrated(self, position: Position, token: int) -> float:
        x = self.preference(position.previous, token, position.mixed[position.candidates.index(token)])
        x += self.bias.value + self._of(self.matches, (position.expert, length_bucket(position.match))).value
        x += self._of(self.indices, position.index).value
        return 1 / (1 + math.exp(-x))

    @staticmethod
    def _of(table: dict, key: object) -> LearnedWeight:
        return table.setdefault(key, LearnedWeight())

    def learn(self, position: Position, actual: int) -> None:
        k = position.candidates.index(actual) if actual in position.candidates else None
        responsibilities, below = [], UNSEEN
        for bucket, shares in reversed(position.levels):
            weight = self.weight(bucket)
            here = 0.0 if k is None else weight * shares[k]
            below = here + (1 - weight) * below
            responsibilities.append(here / below)
        reached = 1.0
        for (bucket, _), share in zip(position.levels, reversed(responsibilities), strict=True):
            if reached <= 1e-3:
                break
            positive, negative = self.evidence.get(bucket, (0.0, 0.0))
            scale = MAX_OBSERVATIONS / (positive + negative) if positive + negative > MAX_OBSERVATIONS else 1.0
            self.evidence[bucket] = (scale * positive + reached * share, scale * negative + reached * (1 - share))
            reached *= 1 - share
        if k is not None:
            self._learn_votes(position.votes, k)
        for token, mixed in zip(position.candidates, position.mixed, strict=True):
            if mixed < UNLIKELY and token != position.token:
                continue
            error = (actual == token) - self.calibrated(position, token)
            self._of(self.tokens, token).ascend(error, 0.1)
            self._of(self.pairs, (position.previous, token)).ascend(error, 0.1)
            if token == position.token:
                self.slope.ascend(error * log_odds(mixed), 0.05)
                self.bias.ascend(error, 0.05)
                self._of(self.matches, (position.expert, length_bucket(position.match))).ascend(error, 0.05)
                self._of(self.indices, position.index).ascend(error, 0.05)

    def _learn_votes(self, votes: Counter[tuple[int, int]], actual: int) -> None:
        for_all = {vote_class: 0.0 for vote_class, _ in votes}
        for (vote_class, _), number in votes.items():
            for_all[vote_class] += number * self.vote(vote_class)
        for_actual = {vote_class: votes[vote_class, actual] * self.vote(vote_class) for vote_class in for_all}
        if not sum(for_actual.values()):
            return
        steps = {
            vote_class: for_actual[vote_class] / sum(for_actual.values()) - for_all[vote_class] / sum(for_all.values())
            for vote_class in for_all
            if for_all[vote_class]
        }
        for vote_class, step in steps.items():
            self._of(self.votes, vote_class).ascend(step, 0.05)


class Oracle:
    """The interface of the index, except that the caller provides the handles."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.problems: dict[str, dict[str, Text]] = {}
        self.requests: dict[int, Request] = {}
        self.mixture = Mixture()
        self.newest = -(2**63)
        self.counters = {source: [0, 0, 0] for source in SOURCES}

    def add(self, problem: str, rollouts: Sequence[tuple]) -> int:
        known = self.problems.setdefault(problem, {})
        before = len(known)
        for rollout_id, generation, tokens, *more in rollouts:
            if rollout_id not in known:
                context, reward, *_ = [*more, None, None][:2]
                kept = list(context or [])[-self.depth :]
                known[rollout_id] = Text([BOUNDARY, *kept, *tokens], 1 + len(kept), generation, reward)
                self.newest = max(self.newest, generation)
        return len(known) - before

    def reward(self, problem: str, rewards: Mapping[str, float]) -> int:
        known = self.problems.get(problem, {})
        for rollout_id in known.keys() & rewards.keys():
            known[rollout_id].reward = rewards[rollout_id]
        return len(known.keys() & rewards.keys())

    def drop_rollout(self, problem: str, rollout_id: str) -> bool:
        return self.problems.get(problem, {}).pop(rollout_id, None) is not None

    def drop_before(self, problem: str, generation: int) -> int:
        known = self.problems.get(problem, {})
        old = [rollout_id for rollout_id, text in known.items() if text.generation < generation]
        for rollout_id in old:
            del known[rollout_id]
        return len(old)

    def drop_problem(self, problem: str) -> bool:
        return bool(self.problems.pop(problem, {}))

    def open(
        self,
        handle: int,
        problem: str,
        prompt: Sequence[int],
        sources: Collection[str],
        context: int,
        stop_tokens: Collection[int],
    ) -> None:
        before = list(prompt)[len(prompt) - min(context, self.depth, len(prompt)) :] or [BOUNDARY]
        self.requests[handle] = Request(problem, list(prompt), sources, Text(before, len(before)), stop_tokens)

    def _vote_class(self, request: Request, occurrence: Occurrence) -> int:
        if occurrence.source not in ("history", "cross_problem"):
            return 0
        old = bisect_left(AGES, self._age(request, occurrence.generation))
        if occurrence.reward is None or occurrence.source == "cross_problem":
            return 3 * old
        known = [text.reward for text in self.problems[request.problem].values() if text.reward is not None]
        return 3 * old + (1 if occurrence.reward < sum(known) / len(known) else 2)

    def _age(self, request: Request, generation: int) -> int:
        if generation >= self.newest:
            return 0
        own = {text.generation for text in self.problems.get(request.problem, {}).values()}
        return 1 + sum(generation < later < self.newest for later in own)

    def close(self, handle: int) -> None:
        del self.requests[handle]

    def extend(self, handle: int, tokens: Sequence[int]) -> None:
        request = self.requests[handle]
        for token in tokens:
            if request.observed == len(request.positions):
                break
            position = request.positions[request.observed]
            self.mixture.learn(position, token)
            if request.observed < request.drafted:
                self.counters[position.source][1] += 1
                self.counters[position.source][2] += position.token == token
            request.observed = request.observed + 1 if position.token == token else len(request.positions)
        request.response.tokens += tokens

    def check_occurrences(self, handle: int, found: Sequence[Occurrence], length: int) -> None:
        """Check occurrences: exactly the longest ones of finished rollouts, and valid ones of live texts.

        The search of live texts is bounded, so it must be complete only if there are few occurrences.
        """
        request = self.requests[handle]
        response = request.response.tokens
        got = {
            source: sorted(
                (
                    (occurrence.match_length, occurrence.generation, tuple(occurrence.tokens))
                    for occurrence in found
                    if occurrence.source == source
                ),
                reverse=True,
            )
            for source in SOURCES
        }

        def all_of(context: Sequence[int], texts: Sequence[Text], min_match: int) -> list[Key]:
            return occurrences(context[-self.depth :], texts, self.depth, length, min_match)

        history = all_of(response, list(self.problems.get(request.problem, {}).values()), 1)
        assert [match for match, _, _ in history[:HISTORY] if "history" in request.sources] == [
            match for match, _, _ in got["history"][:HISTORY]
        ]
        assert len(got["history"]) <= HISTORY + ANCHORS
        assert sum(occurrence.anchored for occurrence in found) <= ANCHORS
        assert not Counter(got["history"]) - Counter(history)

        cross_problem = all_of(
            response,
            [text for name, known in self.problems.items() if name != request.problem for text in known.values()],
            1,
        )
        other_matches = [occurrence.match_length for occurrence in found if occurrence.source != "cross_problem"]
        is_sufficient = (
            max(other_matches, default=0) >= SUFFICIENT_MATCH
            or sum(match >= FEW_TOKENS for match in other_matches) >= CROSS_PROBLEM
        )
        assert [
            match
            for match, _, _ in cross_problem[:CROSS_PROBLEM]
            if "cross_problem" in request.sources and not is_sufficient
        ] == [match for match, _, _ in got["cross_problem"]]
        assert not Counter(got["cross_problem"]) - Counter(cross_problem)

        own = [*request.prompt, *request.response.tokens[request.response.context :]]
        in_prompt = all_of(own, [Text(request.prompt, 0)], 1)
        in_response = all_of(response, [request.response], 2)
        siblings = [
            other.response
            for number, other in self.requests.items()
            if number != handle and other.problem == request.problem and "siblings" in other.sources
        ]
        in_siblings = all_of(response, siblings, 2)
        live_tokens = len(request.response.tokens) + sum(len(text.tokens) for text in siblings)
        for source, known, exact, searched in (
            ("self", in_prompt + in_response, in_prompt, max(live_tokens, len(in_prompt))),
            ("siblings", in_siblings, [], live_tokens),
        ):
            if source not in request.sources:
                assert not got[source]
                continue
            assert len(got[source]) <= (2 * LIVE if exact else LIVE)
            assert not Counter(got[source]) - Counter(known)
            if len(known) <= LIVE and searched <= MAX_VISITED:
                assert Counter(known) == Counter(got[source])
            elif searched <= MAX_VISITED and not exact:
                assert [match for match, _, _ in known[:LIVE]] == [match for match, _, _ in got[source]]
            elif exact:
                assert got[source][0][0] >= exact[0][0]

    def check_draft(
        self,
        handle: int,
        draft: Draft,
        found: Sequence[Occurrence],
        budget: int,
        min_survival: float,
    ) -> bool:
        """Check a draft. Return False if rounding may have decided from which token the index learns."""
        request = self.requests[handle]
        request.positions, request.drafted, request.observed = [], len(draft.tokens), 0
        remaining = [(occurrence, self._vote_class(request, occurrence)) for occurrence in found]
        remaining.sort(key=lambda pair: -pair[0].match_length)
        survival = 1.0
        for index in range(budget):
            wanted = draft.tokens[index] if index < len(draft.tokens) else None
            previous = draft.tokens[index - 1] if index else request.response.tokens[-1]
            position = self.mixture.mix(remaining, index, previous, wanted) if remaining else None
            if position is None:
                break
            request.positions.append(position)
            probability = self.mixture.calibrated(position, position.token)
            survival *= probability
            if index == len(draft.tokens):
                assert survival < min_survival + TOLERANCE
                return position.margin > SCORE_TOLERANCE  # else the index may have rejected another token
            assert abs(draft.probabilities[index] - probability) < TOLERANCE
            assert survival >= min_survival - TOLERANCE
            self.counters[draft.sources[index]][0] += 1
            if position.source != draft.sources[index]:  # equally probable
                other = max(
                    (
                        expert
                        for expert in EXPERTS
                        if expert == draft.sources[index]
                        or (draft.sources[index] == "history" and expert == "anchored")
                    ),
                    key=lambda expert: position.masses[expert],
                )
                assert position.masses[other] > position.masses[position.expert] - TOLERANCE
                position.expert = other
            finished = position.source in ("history", "cross_problem")
            age = self._age(request, position.generations[position.expert]) if finished else None
            assert age == draft.ages[index]
            remaining = [
                (occurrence, vote_class)
                for occurrence, vote_class in remaining
                if index < len(occurrence.tokens)
                and occurrence.tokens[index] == position.token
                # The end of a running rollout, or of a prompt, is not the end of its text.
                and (index + 1 < len(occurrence.tokens) or occurrence.source not in ("self", "siblings"))
            ]
            if position.token in request.stop_tokens:
                break
        assert len(draft.tokens) == len(request.positions)
        return True
