"""What the suffix index must answer, by trying everything: lists, loops, no structure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rollout_worker.drafting import Draft
from rollout_worker.drafting.index import Occurrence

START = -1
HISTORY, LIVE, FOREIGN, ANCHORS, WALK, ENOUGH = 32, 24, 16, 4, 48, 16
LENGTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64]
VOTES = [1, 2, 3, 5, 9, 17]
MEANS = [0.3, 0.65, 0.9, 1.0]
SOURCES = ("history", "self", "siblings", "foreign")
VOICES = (*SOURCES, "anchored")
"""Who speaks in a mixture: rollouts of the history that a request goes along with do so for themselves."""
CANDIDATES, LEVELS = 6, 32
AGES = [1, 3, 7]
MOST = 2000.0
UNSEEN = SUREST = 1e-3
UNLIKELY = 0.02
SLACK_OF_SCORES = 0.02
SLACK = 2e-3
"""How far single precision and another order of sums may lead away."""

Bucket = tuple[str, int, int, int, int]
Key = tuple[int, int, tuple[int, ...]]
"""Of an occurrence: match length, generation, tokens."""


@dataclass
class Text:
    """Tokens of which the first ``context`` are matched and never drafted."""

    tokens: list[int]
    context: int
    generation: int = 0
    reward: float | None = None


@dataclass
class Request:
    """One that is open."""

    problem: str
    prompt: list[int]
    sources: Collection[str]
    response: Text
    ends: Collection[int]
    positions: list[Position] = field(default_factory=list)
    drafted: int = 0
    observed: int = 0


@dataclass
class Position:
    """One of a draft."""

    token: int
    previous: int
    voice: str
    match: int
    place: int
    margin: float
    """By which it is preferred to other tokens."""
    candidates: list[int]
    mixed: list[float]
    """Of each candidate."""
    levels: list[tuple[Bucket, list[float]]]
    masses: dict[str, float]
    """Of the token, by voice."""
    votes: Counter[tuple[int, int]]
    """Of the history: by kind and candidate."""
    generations: dict[str, int]
    """Of the newest vote for the token, by voice."""
    ages: frozenset[int] = frozenset()
    """At which a rollout of the history says the token."""

    @property
    def source(self) -> str:
        return "history" if self.voice == "anchored" else self.voice


def occurrences(context: Sequence[int], texts: Sequence[Text], depth: int, length: int, least: int) -> list[Key]:
    """All of them, longest first."""
    found = []
    for text in texts:
        for at in range(max(1, text.context), len(text.tokens)):
            match = 0
            while match < min(depth, at, len(context)) and text.tokens[at - 1 - match] == context[-1 - match]:
                match += 1
            if match >= least:
                found.append((match, text.generation, tuple(text.tokens[at : at + length])))
    return sorted(found, reverse=True)


class Learned:
    """A coefficient under AdaGrad."""

    def __init__(self, value: float = 0.0) -> None:
        self.value, self._squares = value, 1e-2

    def ascend(self, gradient: float, rate: float) -> None:
        self._squares += gradient * gradient
        self.value += rate * gradient / math.sqrt(self._squares)


def log_odds(probability: float) -> float:
    p = min(max(probability, SUREST), 1 - SUREST)
    return math.log(p / (1 - p))


def length_bucket(match: int) -> int:
    return bisect_right(LENGTHS, match) - 1


class Mixture:
    """The probabilities, given occurrences."""

    def __init__(self) -> None:
        self.evidence: dict[Bucket, tuple[float, float]] = {}
        self.slope, self.bias = Learned(1.0), Learned()
        self.tokens: dict[int, Learned] = {}
        self.pairs: dict[tuple[int, int], Learned] = {}
        self.matches: dict[tuple[str, int], Learned] = {}
        self.places: dict[int, Learned] = {}
        self.votes: dict[int, Learned] = {}

    def vote(self, kind: int) -> float:
        return math.exp(max(-4.0, min(4.0, self._of(self.votes, kind).value)))

    def weight(self, bucket: Bucket) -> float:
        _, length, votes, share, _ = bucket
        evidence = LENGTHS[length] * VOTES[votes]
        prior = MEANS[share] * LENGTHS[length] / (LENGTHS[length] + 1) * evidence / (evidence + 1)
        yes, no = self.evidence.get(bucket, (0.0, 0.0))
        return (yes + 2 * prior) / (yes + no + 2)

    def mix(
        self, found: Sequence[tuple[Occurrence, int]], place: int, previous: int, wanted: int | None
    ) -> Position | None:
        """The likeliest token, or *wanted* where that is as likely; None if no token may be drafted."""
        candidates: list[int] = []
        of = {voice: [0.0] * CANDIDATES for voice in VOICES}
        all_votes = dict.fromkeys(VOICES, 0.0)
        votes = dict.fromkeys(VOICES, 0)
        kinds: Counter[tuple[int, int]] = Counter()
        generations: dict[tuple[str, int], int] = {}
        said = {voice: [0.0] * CANDIDATES for voice in VOICES}
        levels: list[tuple[Bucket, list[float]]] = []
        left = 1.0
        for length in sorted({length_bucket(one.match_length + place) for one, _ in found}, reverse=True):
            changed = set()
            for one, kind in found:
                if length_bucket(one.match_length + place) != length:
                    continue
                voice = "anchored" if one.anchored else one.source
                token = one.tokens[place] if place < len(one.tokens) else START
                if token not in candidates and len(candidates) < CANDIDATES:
                    candidates.append(token)
                if token in candidates:
                    of[voice][candidates.index(token)] += self.vote(kind)
                    kinds[kind, candidates.index(token)] += one.source == "history"
                    newest = generations.get((voice, token), one.generation)
                    generations[voice, token] = max(newest, one.generation)
                all_votes[voice] += self.vote(kind)
                votes[voice] += 1
                changed.add(voice)
            for voice in VOICES:
                if voice not in changed or len(levels) == LEVELS:
                    continue
                shares = [each / all_votes[voice] for each in of[voice]]
                top, number = max(shares), votes[voice]
                share = 3 if top > 1 - 1e-4 else 2 if top > 0.8 - 1e-4 else 1 if top > 0.5 - 1e-4 else 0
                where = 0 if place == 0 else 1 if place < 3 else 2
                bucket = (voice, length, bisect_right(VOTES, number) - 1, share, where)
                levels.append((bucket, [int(255 * share + 0.5) / 255 for share in shares]))  # as a byte keeps them
                weight = self.weight(bucket)
                for k in range(len(candidates)):
                    said[voice][k] += left * weight * shares[k]
                left *= 1 - weight
        mixed = [
            0.0 if token == START else sum(said[voice][k] for voice in VOICES) for k, token in enumerate(candidates)
        ]
        scores = {
            token: self.preference(previous, token, mixed[k]) for k, token in enumerate(candidates) if mixed[k] > 0.0
        }
        if not scores:
            return None
        token = max(scores, key=lambda one: scores[one])
        if wanted is not None and wanted != token:
            assert scores.get(wanted, -math.inf) >= scores[token] - SLACK_OF_SCORES, f"{wanted} is drafted of {scores}"
            token = wanted
        k = candidates.index(token)
        masses = {voice: said[voice][k] for voice in VOICES}
        loudest = max(VOICES, key=lambda one: masses[one])
        match = min(255, max(one.match_length for one, _ in found) + place)
        margin = scores[token] - max((score for one, score in scores.items() if one != token), default=-math.inf)
        place = min(place, 15)
        first = {voice: generations[voice, token] for voice in VOICES if (voice, token) in generations}
        return Position(token, previous, loudest, match, place, margin, candidates, mixed, levels, masses, kinds, first)

    def preference(self, previous: int, token: int, mixed: float) -> float:
        score = self.slope.value * log_odds(mixed) + self._of(self.tokens, token).value
        return score + self._of(self.pairs, (previous, token)).value

    def calibrated(self, position: Position, token: int) -> float:
        x = self.preference(position.previous, token, position.mixed[position.candidates.index(token)])
        x += self.bias.value + self._of(self.matches, (position.voice, length_bucket(position.match))).value
        x += self._of(self.places, position.place).value
        return 1 / (1 + math.exp(-x))

    @staticmethod
    def _of(table: dict, key: object) -> Learned:
        return table.setdefault(key, Learned())

    def learn(self, position: Position, actual: int) -> None:
        k = position.candidates.index(actual) if actual in position.candidates else None
        spoke, below = [], UNSEEN
        for bucket, shares in reversed(position.levels):
            weight = self.weight(bucket)
            here = 0.0 if k is None else weight * shares[k]
            below = here + (1 - weight) * below
            spoke.append(here / below)
        reached = 1.0
        for (bucket, _), share in zip(position.levels, reversed(spoke), strict=True):
            if reached <= 1e-3:
                break
            yes, no = self.evidence.get(bucket, (0.0, 0.0))
            fade = MOST / (yes + no) if yes + no > MOST else 1.0
            self.evidence[bucket] = (fade * yes + reached * share, fade * no + reached * (1 - share))
            reached *= 1 - share
        if k is not None:
            self._learn_votes(position.votes, k)
        for token, mixed in zip(position.candidates, position.mixed, strict=True):
            if mixed < UNLIKELY and token != position.token:
                continue
            wrong = (actual == token) - self.calibrated(position, token)
            self._of(self.tokens, token).ascend(wrong, 0.1)
            self._of(self.pairs, (position.previous, token)).ascend(wrong, 0.1)
            if token == position.token:
                self.slope.ascend(wrong * log_odds(mixed), 0.05)
                self.bias.ascend(wrong, 0.05)
                self._of(self.matches, (position.voice, length_bucket(position.match))).ascend(wrong, 0.05)
                self._of(self.places, position.place).ascend(wrong, 0.05)

    def _learn_votes(self, votes: Counter[tuple[int, int]], actual: int) -> None:
        each = {kind: 0.0 for kind, _ in votes}
        for (kind, _), number in votes.items():
            each[kind] += number * self.vote(kind)
        right = {kind: votes[kind, actual] * self.vote(kind) for kind in each}
        if not sum(right.values()):
            return
        steps = {
            kind: right[kind] / sum(right.values()) - each[kind] / sum(each.values()) for kind in each if each[kind]
        }
        for kind, step in steps.items():
            self._of(self.votes, kind).ascend(step, 0.05)


class Oracle:
    """The index's interface; handles are given by the caller."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.problems: dict[str, dict[str, Text]] = {}
        self.requests: dict[int, Request] = {}
        self.mixture = Mixture()
        self.newest = -(2**63)
        self.counters = {source: [0, 0, 0] for source in SOURCES}
        self.ages: dict[int, list[float]] = {}

    def add(self, problem: str, rollouts: Sequence[tuple]) -> int:
        known = self.problems.setdefault(problem, {})
        before = len(known)
        for rollout_id, generation, tokens, *more in rollouts:
            if rollout_id not in known:
                context, reward, *_ = [*more, None, None][:2]
                kept = list(context or [])[-self.depth :]
                known[rollout_id] = Text([START, *kept, *tokens], 1 + len(kept), generation, reward)
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
        ends: Collection[int],
    ) -> None:
        before = list(prompt)[len(prompt) - min(context, self.depth, len(prompt)) :] or [START]
        self.requests[handle] = Request(problem, list(prompt), sources, Text(before, len(before)), ends)

    def _kind(self, request: Request, one: Occurrence) -> int:
        if one.source not in ("history", "foreign"):
            return 0
        old = bisect_left(AGES, self.newest - one.generation)
        if one.reward is None or one.source == "foreign":
            return 3 * old
        known = [text.reward for text in self.problems[request.problem].values() if text.reward is not None]
        return 3 * old + (1 if one.reward < sum(known) / len(known) else 2)

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
                for age in position.ages if position.source == "history" else ():
                    counts = self.ages.setdefault(age, [0.0, 0.0])
                    counts[0] += 1 / len(position.ages)
                    counts[1] += (position.token == token) / len(position.ages)
            request.observed = request.observed + 1 if position.token == token else len(request.positions)
        request.response.tokens += tokens

    def check_occurrences(self, handle: int, found: Sequence[Occurrence], length: int) -> None:
        """Of the history exactly the longest; of what is alive real ones, and all of a few."""
        request = self.requests[handle]
        response = request.response.tokens
        got = {
            source: sorted(
                ((one.match_length, one.generation, tuple(one.tokens)) for one in found if one.source == source),
                reverse=True,
            )
            for source in SOURCES
        }

        def all_of(context: Sequence[int], texts: Sequence[Text], least: int) -> list[Key]:
            return occurrences(context[-self.depth :], texts, self.depth, length, least)

        history = all_of(response, list(self.problems.get(request.problem, {}).values()), 1)
        assert [match for match, _, _ in history[:HISTORY] if "history" in request.sources] == [
            match for match, _, _ in got["history"][:HISTORY]
        ]
        assert len(got["history"]) <= HISTORY + ANCHORS
        assert sum(one.anchored for one in found) <= ANCHORS
        assert not Counter(got["history"]) - Counter(history)

        foreign = all_of(
            response,
            [text for name, known in self.problems.items() if name != request.problem for text in known.values()],
            1,
        )
        known_well = any(one.match_length >= ENOUGH for one in found if one.source != "foreign")
        assert [match for match, _, _ in foreign[:FOREIGN] if "foreign" in request.sources and not known_well] == [
            match for match, _, _ in got["foreign"]
        ]
        assert not Counter(got["foreign"]) - Counter(foreign)

        own = [*request.prompt, *request.response.tokens[request.response.context :]]
        in_prompt = all_of(own, [Text(request.prompt, 0)], 1)
        said = all_of(response, [request.response], 2)
        siblings = [
            other.response
            for number, other in self.requests.items()
            if number != handle and other.problem == request.problem and "siblings" in other.sources
        ]
        heard = all_of(response, siblings, 2)
        alive = len(request.response.tokens) + sum(len(text.tokens) for text in siblings)
        for source, known, exact, searched in (
            ("self", in_prompt + said, in_prompt, max(alive, len(in_prompt))),
            ("siblings", heard, [], alive),
        ):
            if source not in request.sources:
                assert not got[source]
                continue
            assert len(got[source]) <= (2 * LIVE if exact else LIVE)
            assert not Counter(got[source]) - Counter(known)
            if len(known) <= LIVE and searched <= WALK:
                assert Counter(known) == Counter(got[source])
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
        """Whether it is sure what the index may learn from; asserts that the draft is right."""
        request = self.requests[handle]
        request.positions, request.drafted, request.observed = [], len(draft.tokens), 0
        alive = [(one, self._kind(request, one)) for one in found]
        alive.sort(key=lambda one: -one[0].match_length)
        survival = 1.0
        for place in range(budget):
            wanted = draft.tokens[place] if place < len(draft.tokens) else None
            previous = draft.tokens[place - 1] if place else request.response.tokens[-1]
            position = self.mixture.mix(alive, place, previous, wanted) if alive else None
            if position is None:
                break
            request.positions.append(position)
            probability = self.mixture.calibrated(position, position.token)
            survival *= probability
            if place == len(draft.tokens):
                assert survival < min_survival + SLACK
                return position.margin > SLACK_OF_SCORES  # else it may be another token that is not drafted
            assert abs(draft.probabilities[place] - probability) < SLACK
            assert survival >= min_survival - SLACK
            self.counters[draft.sources[place]][0] += 1
            if position.source != draft.sources[place]:  # as likely
                other = max(
                    (
                        voice
                        for voice in VOICES
                        if voice == draft.sources[place] or (draft.sources[place] == "history" and voice == "anchored")
                    ),
                    key=lambda voice: position.masses[voice],
                )
                assert position.masses[other] > position.masses[position.voice] - SLACK
                position.voice = other
            finished = position.source in ("history", "foreign")
            age = max(0, self.newest - position.generations[position.voice]) if finished else None
            assert age == draft.ages[place]
            alive = [
                (one, kind) for one, kind in alive if place < len(one.tokens) and one.tokens[place] == position.token
            ]
            position.ages = frozenset(
                min(63, max(0, self.newest - one.generation)) for one, _ in alive if one.source == "history"
            )
            if position.token in request.ends:
                break
        assert len(draft.tokens) == len(request.positions)
        return True
