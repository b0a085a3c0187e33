"""The rollouts of one history in Redis: append, publish a generation, read, compact, forget."""

from __future__ import annotations

import logging
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import redis

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import HISTORIES, SHARDS, HistoryKeys, history_of
from rollout_api.protocol.length_entries import (
    LengthEntry,
    pack_entry,
    pack_recent,
    rollout_key,
    unpack_entries,
    unpack_recent,
)
from rollout_worker.history.learned import decode_learned, encode_learned
from rollout_worker.history.records import (
    HistoryRecord,
    RecordError,
    decode_record,
    decode_records,
    encode_record,
    encode_records,
)
from rollout_worker.history.server_functions import Call, Function, Redis, concerns_the_server, run, run_all
from rollout_worker.history.window import ALWAYS_KEPT, oldest_kept

logger = logging.getLogger(__name__)

START = "-"
"""Cursor in front of the first entry of a log."""
PUBLISHED = "generation:"
"""How fields of a history's meta hash begin that hold the generation of a run's version, which follows."""
VERSIONS_KNOWN = 10_000
"""Generations after which it is forgotten which version of which run one was: nobody speaks of that version again."""
_LARGEST_REWARD = 3.4e38
"""An index keeps rewards as float32."""
_RECENT = 512
"""Lengths that a shard keeps of its last rollouts."""
_PROBLEMS_AT_ONCE = 256
"""Problems that are asked for in one round trip."""
_COMPACTED_AT_ONCE = 1000
"""Entries of a log; a server function takes a few thousand arguments."""
_KEPT_APART = 2
"""A block that is larger than what is newer by this factor is left as it is, so that bytes are seldom rewritten."""
_LARGEST_BLOCK = 2**24
"""Bytes: a server and its clients hold a block as a whole."""
_RIVALS = 3
"""Tries to read a problem while it is being compacted."""

_APPEND, _COMPACT, _FORGET = Function("append"), Function("compact"), Function("forget")
_NOTE, _PUBLISH, _REWARD = Function("note"), Function("publish"), Function("reward")
ADOPT = Function("adopt")
_TRIM, _RESIZE = Function("append", even_when_full=True), Function("resize")


class HistoryMismatchError(ValueError):
    """The history was written with another tokenizer, whose ids mean something else, or another model."""


class Appended(IntEnum):
    """What became of an append."""

    NEW = 1
    KNOWN = 0
    """It was there already: an append is repeated without effect."""
    TOO_OLD = -1
    """Its generation has left its problem's window."""


@dataclass(frozen=True)
class Corrupt:
    """An entry of a log, a block or a key that could not be read."""

    problem: str
    entry_id: str
    reason: str


@dataclass(frozen=True)
class LogSlice:
    """What one read of a problem found."""

    cursor: str
    """Where the next read goes on."""
    records: list[HistoryRecord] = field(default_factory=list)
    """Some may have been read before."""
    corrupt: list[Corrupt] = field(default_factory=list)
    rewards: dict[bytes, float] | None = None
    """All rewards of the problem, by ``rollout_key``; None if they were not asked for."""
    lengths: LengthStats | None = None
    """How long all its rollouts are; None as well."""
    more: bool = False
    """Whether there was more to read."""


@dataclass(frozen=True)
class Changes:
    """Problems that have changed since they were asked for last."""

    problems: frozenset[str]
    cursors: dict[int, float | None]
    """Shard → what to ask with next."""
    restarted: frozenset[int]
    """Shards that do not know what was seen of them: whatever they hold is to be read anew."""


@dataclass(frozen=True)
class History:
    """What a history is."""

    tokenizer: str
    """Fingerprint of the vocabulary."""
    model: str
    """Whose rollouts it held first."""
    generation: int
    """The newest."""
    window: int
    """Generations of each problem that are kept, as the job which opened it last asks for."""
    horizon: int | None
    """Generations after which rollouts were seen to be of no use, and leave as well; None: none were."""
    max_bytes: int | None

    def oldest_kept(self, generations: Iterable[int]) -> int:
        """The oldest generation that is kept of a problem that was sampled in *generations*."""
        return oldest_kept(generations, self.window, _since(self.generation, self.horizon))


@dataclass(frozen=True)
class Problem:
    """A problem of a history, as its shard knows it."""

    problem: str
    used: float
    """When it was appended to or drafted from last, in seconds since the epoch, by its server's clock."""
    changed: float
    """In microseconds since the epoch, by its server's clock."""
    bytes: int
    """That its keys take in Redis."""


def histories(client: Redis) -> list[HistoryKeys]:
    """Every history on a server, in the order of their names."""
    names: Any = client.smembers(HISTORIES)
    return [history_of(name) for name in sorted(_texts(names))]


class HistoryStore:
    """One history; every method may raise :class:`redis.RedisError` and none leaves a half-done write behind."""

    def __init__(self, client: Redis, keys: HistoryKeys, *, window: int) -> None:
        """Nothing is sent yet.

        Args:
            client: of the server or cluster.
            keys: of the history.
            window: generations of each problem that are read.
        """
        self.keys = keys
        self._client = client
        self._window = window
        self._horizon: int | None = None
        """As was heard last."""
        self._newest = 0
        """The newest generation seen: a server that has come back empty counts on from there."""
        self._claim: dict[str, str] = {}
        """What the history is begun with."""

    # the history as a whole

    def claim(self, tokenizer: str, model: str = "", *, max_bytes: int | None = None) -> None:
        """Say what the history is begun with, should its server come back empty; nothing is sent.

        Args:
            tokenizer: fingerprint of the vocabulary.
            model: name of the model; empty: whichever.
            max_bytes: that the history may take in Redis; None: without a cap.
        """
        self._claim = {"tokenizer": tokenizer, "model": model, "window": str(self._window)}
        if max_bytes is not None:
            self._claim["max_bytes"] = str(max_bytes)

    def open(
        self, tokenizer: str, model: str = "", *, allow_foreign_model: bool = False, max_bytes: int | None = None
    ) -> None:
        """Claim the history for a tokenizer, by the fingerprint of its vocabulary, and for a model.

        Args:
            tokenizer: fingerprint.
            model: name of the model; empty: whichever.
            allow_foreign_model: draft from rollouts of another model as well, and add to them.
            max_bytes: that the history may take in Redis; None: as it is.

        Raises:
            HistoryMismatchError: if it holds rollouts of another tokenizer, or of another model without leave.
        """
        claim = {"tokenizer": tokenizer, "model": model} if model else {"tokenizer": tokenizer}
        pipeline = self._client.pipeline(transaction=False)
        for name, value in claim.items():
            pipeline.hsetnx(self.keys.meta, name, value)
        pipeline.hmget(self.keys.meta, list(claim))
        *_, stored = pipeline.execute()
        known = {name: value.decode() for name, value in zip(claim, stored, strict=True)}
        if known["tokenizer"] != tokenizer:
            raise self._of_another_tokenizer(known["tokenizer"], tokenizer)
        if known.get("model", "") != model and not allow_foreign_model:
            raise HistoryMismatchError(
                f"history {self.keys.full_name} holds rollouts of model {known['model']!r}, not of {model!r}; name "
                "another in spec.history.name, or set spec.history.allowForeignModel to draft from those as well"
            )
        settings = {"window": str(self._window)} | ({} if max_bytes is None else {"max_bytes": str(max_bytes)})
        self._client.hset(self.keys.meta, mapping=settings)  # type: ignore[arg-type]
        self._client.sadd(HISTORIES, self.keys.full_name)
        self.claim(tokenizer, model, max_bytes=max_bytes)

    def _of_another_tokenizer(self, theirs: str, ours: str) -> HistoryMismatchError:
        return HistoryMismatchError(
            f"history {self.keys.full_name} holds rollouts of another tokenizer ({theirs[:12]}…, this model's is "
            f"{ours[:12]}…); name another in spec.history.name"
        )

    def about(self) -> History | None:
        """What the history is; None if there is none of this name."""
        names = ["tokenizer", "model", "generation", "window", "horizon", "max_bytes"]
        stored: Any = self._client.hmget(self.keys.meta, names)
        if not any(stored):
            return None
        known = {name: value.decode() for name, value in zip(names, stored, strict=True) if value is not None}
        self._horizon = _horizon(known.get("horizon"))
        return History(
            known.get("tokenizer", ""),
            known.get("model", ""),
            int(known.get("generation", 0)),
            int(known.get("window", self._window)),
            self._horizon,
            int(known["max_bytes"]) if "max_bytes" in known else None,
        )

    def publish(self, run_uid: str, weight_version: int) -> int:
        """The generation of *weight_version* of a run; the next one if it was not published before."""
        call = Call(_PUBLISH, [self.keys.meta], [f"{run_uid}:{weight_version}", self._newest])
        generation = int(run(self._client, call))
        self._newest = max(self._newest, generation)
        return generation

    def forget_versions(self) -> int:
        """Forget which versions generations were that are so old that none of their rollouts is still on its way.

        Returns:
            How many. Whoever speaks of such a version nevertheless gets a new generation for it.
        """
        if self._client.hlen(self.keys.meta) < 2 * VERSIONS_KNOWN:
            return 0
        oldest = self.generation() - VERSIONS_KNOWN
        fields = self._client.hscan_iter(self.keys.meta, match=f"{PUBLISHED}*", count=1000)
        old = [field for field, generation in fields if generation.isdigit() and int(generation) <= oldest]
        for at in range(0, len(old), 1000):
            self._client.hdel(self.keys.meta, *old[at : at + 1000])
        return len(old)

    def generation(self) -> int:
        """The newest generation; 0 if none was ever published."""
        stored: Any = self._client.hget(self.keys.meta, "generation")
        self._newest = max(self._newest, int(stored or 0))
        return self._newest

    def since(self, newest: int) -> int:
        """The oldest generation within the horizon that :meth:`about` heard of last, if *newest* is the newest."""
        return _since(newest, self._horizon)

    def oldest_read(self, generations: Iterable[int], since: int) -> int:
        """The oldest generation that is read of a problem that was sampled in *generations*; see :meth:`since`."""
        return oldest_kept(generations, self._window, since)

    def set_horizon(self, horizon: int | None) -> None:
        """Let rollouts that are as many generations old leave as well; None: those of any age stay."""
        if horizon is None:
            self._client.hdel(self.keys.meta, "horizon")
        else:
            self._client.hset(self.keys.meta, "horizon", horizon)

    def delete(self) -> None:
        """Remove the whole history; to be repeated if it fails."""
        while problems := self.problems():
            for at in range(0, len(problems), _PROBLEMS_AT_ONCE):
                self.drop(problems[at : at + _PROBLEMS_AT_ONCE])
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(SHARDS):
            for key in self.keys.of_shard(shard):
                pipeline.delete(key)
        for key in (self.keys.ages, self.keys.learned, self.keys.meta):
            pipeline.delete(key)
        pipeline.execute()
        self._client.srem(HISTORIES, self.keys.full_name)

    # appending

    def append(self, problem: str, record: HistoryRecord, *, newest: int | None = None) -> Appended:
        """Append a rollout to its problem, atomically and once, and drop what has left the window.

        Args:
            problem: the problem's id.
            record: the rollout.
            newest: the newest generation of the history, from which its horizon counts; None: ask for it.
        """
        (became,) = self.append_all([(problem, record)], newest=newest)
        if isinstance(became, redis.ResponseError):
            raise became
        return became

    def append_all(
        self, rollouts: Sequence[tuple[str, HistoryRecord]], *, newest: int | None = None
    ) -> list[Appended | redis.ResponseError]:
        """As :meth:`append`, for many in three round trips.

        Returns:
            For each, what became of it; or the error of a problem whose keys hold something else.

        Raises:
            HistoryMismatchError: if a history of another tokenizer has taken the place of the one that was claimed.
            redis.RedisError: if the server fails; to be repeated then.
        """
        limits = self._limits(newest)
        calls, entries = [], []
        for problem, record in rollouts:
            entry = pack_entry(record.rollout_id, len(record.tokens), record.cut_off)
            entries.append(pack_recent(record.generation, len(record.tokens), record.cut_off))
            arguments: list[str | bytes | int | float] = [entry, record.generation, encode_record(record), *limits]
            calls.append(Call(_APPEND, self._of(problem), arguments))
        became: list[Appended | redis.ResponseError] = []
        changed: dict[str, tuple[int, bytes]] = {}
        for (problem, _), entry, reply in zip(rollouts, entries, run_all(self._client, calls), strict=True):
            if isinstance(reply, redis.ResponseError):
                became.append(reply)
                continue
            became.append(Appended(reply[0]))
            # also what was there already: whoever put it there may not have come to note it
            known = changed.get(problem, (0, b""))[1]
            changed[problem] = int(reply[1]), known + (entry if reply[0] == Appended.NEW else b"")
        self._note(changed)
        return became

    def reward(self, problem: str, rewards: Mapping[str, float]) -> None:
        """Keep rewards of a problem's rollouts, by rollout id; of rollouts that have left the window, none."""
        arguments: list[bytes] = []
        for rollout, reward in rewards.items():
            if not abs(reward) < _LARGEST_REWARD:
                logger.warning("The reward of rollout %s, %r, is no number that an index can keep.", rollout, reward)
                continue
            arguments += [rollout_key(rollout), struct.pack("<f", reward)]
        if arguments:
            run(self._client, Call(_REWARD, [self.keys.lengths(problem)], arguments))

    def _limits(self, newest: int | None = None) -> tuple[int, int, int]:
        """What ``append.lua`` asks for: by what a problem's oldest generation is found.

        A history whose server has come back empty is claimed again.
        """
        names = ["generation", "window", "horizon", "tokenizer"]
        stored: Any = self._client.hmget(self.keys.meta, names)
        generation, window, horizon, tokenizer = stored
        self._newest = max(self._newest, int(generation or 0), newest or 0)
        if self._claim and tokenizer is None:
            logger.warning("History %s is gone from Redis; it begins anew.", self.keys.full_name)
            claimed = [word for pair in self._claim.items() for word in pair]
            self._newest = int(run(self._client, Call(ADOPT, [self.keys.meta], [self._newest, *claimed])))
            self._client.sadd(HISTORIES, self.keys.full_name)
            stored = self._client.hget(self.keys.meta, "tokenizer")
            tokenizer = stored
        if self._claim and (theirs := (tokenizer or b"").decode()) != self._claim["tokenizer"]:
            raise self._of_another_tokenizer(theirs, self._claim["tokenizer"])
        return int(window or self._window), ALWAYS_KEPT, _since(self._newest, _horizon(horizon))

    def _note(self, changed: Mapping[str, tuple[int | str, bytes]]) -> None:
        """Tell the shards of problems how many bytes they take now (empty: unchanged), and of their new rollouts."""
        by_shard: defaultdict[int, list[Any]] = defaultdict(list)
        for problem, (size, entries) in changed.items():
            by_shard[self.keys.shard(problem)] += [problem, size, entries]
        calls = [
            Call(_NOTE, list(self.keys.of_shard(shard)), [_RECENT, *arguments]) for shard, arguments in by_shard.items()
        ]
        for reply in run_all(self._client, calls):
            if isinstance(reply, redis.ResponseError):
                raise reply

    def _of(self, problem: str) -> list[str]:
        return list(self.keys.of_problem(problem))

    # reading

    def use(self, problems: Iterable[str]) -> None:
        """Note that *problems* are drafted from: those used least recently leave first when the history is full."""
        known = list(problems)
        for at in range(0, len(known), _PROBLEMS_AT_ONCE):
            self._note(dict.fromkeys(known[at : at + _PROBLEMS_AT_ONCE], ("", b"")))

    def changes(self, cursors: Mapping[int, float | None]) -> Changes:
        """What has changed in shards, in one round trip.

        Args:
            cursors: shard → what :attr:`Changes.cursors` said last, or None: then nothing but the cursor is learned.
        """
        pipeline = self._client.pipeline(transaction=False)
        for shard, since in cursors.items():
            if since is None:
                pipeline.zrange(self.keys.changed(shard), 0, 0, desc=True, withscores=True)
            else:
                pipeline.zrangebyscore(self.keys.changed(shard), since, "+inf", withscores=True)
        problems: set[str] = set()
        new: dict[int, float | None] = {}
        restarted = set()
        for (shard, since), found in zip(cursors.items(), pipeline.execute(), strict=True):
            new[shard] = max((score for _, score in found), default=0.0)
            # the last one seen would be among them, unless it was dropped or the server lost it
            if since and not found:
                restarted.add(shard)
            elif since is not None:
                problems |= _texts(name for name, score in found if score > since)
        return Changes(frozenset(problems), new, frozenset(restarted))

    def read(
        self, cursors: Mapping[str, str], *, rewarded: Collection[str] = (), count: int = 512
    ) -> dict[str, LogSlice]:
        """At most *count* further entries of each problem's log, and its blocks that were not read, in one round trip.

        Args:
            cursors: problem id → :data:`START` or the cursor of the last read.
            rewarded: those of the problems whose rewards are read as well.
            count: entries of one problem's log.
        """
        pipeline = self._client.pipeline(transaction=False)
        for problem, cursor in cursors.items():
            # The log before the blocks: what is taken from the log in between is found in the blocks, if twice.
            pipeline.xrange(self.keys.log(problem), min=cursor if cursor == START else f"({cursor}", count=count)
            if cursor == START:
                pipeline.hgetall(self.keys.blocks(problem))
            else:
                pipeline.hkeys(self.keys.blocks(problem))
            if problem in rewarded:
                pipeline.hgetall(self.keys.lengths(problem))
        replies = iter(pipeline.execute(raise_on_error=False))
        slices = {}
        for problem, cursor in cursors.items():
            entries, blocks = next(replies), next(replies)
            lengths = next(replies) if problem in rewarded else None
            slices[problem] = self._slice(problem, cursor, entries, blocks, lengths, count)
        return slices

    def _slice(self, problem: str, cursor: str, entries: Any, blocks: Any, lengths: Any, count: int) -> LogSlice:
        corrupt: list[Corrupt] = []
        for key, reply in zip(
            (self.keys.log(problem), self.keys.blocks(problem), self.keys.lengths(problem)),
            (entries, blocks, lengths),
            strict=True,
        ):
            if isinstance(reply, Exception):
                corrupt.append(Corrupt(problem, key, str(_of_its_key(reply))))
        entries, blocks, lengths = (
            None if isinstance(reply, Exception) else reply for reply in (entries, blocks, lengths)
        )
        records: list[HistoryRecord] = []
        if cursor != START:
            blocks = self._unread_blocks(problem, cursor, blocks or ())
        newest_block = START
        for name, block in sorted((blocks or {}).items(), key=lambda item: _last_entry(item[0])):
            try:
                records += decode_records(block)
            except RecordError as error:
                corrupt.append(Corrupt(problem, name.decode(errors="replace"), str(error)))
            newest_block = name.decode(errors="replace").rpartition(":")[2]
        for entry_id, fields in entries or ():
            try:
                records.append(decode_record(fields.get(b"d", b"")))
            except RecordError as error:
                corrupt.append(Corrupt(problem, entry_id.decode(), str(error)))
        if entries:
            cursor = entries[-1][0].decode()
        elif cursor == START:
            cursor = newest_block
        found = LogSlice(cursor, records, corrupt, more=len(entries or ()) >= count)
        if lengths is None:
            return found
        known = unpack_entries(lengths)
        return replace(found, rewards=_rewards(known), lengths=_stats(known))

    def _unread_blocks(self, problem: str, cursor: str, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Blocks with entries behind *cursor*: the log was compacted before they were read from it."""
        for _ in range(_RIVALS):
            unread = [name for name in names if _last_entry(name) > _place(cursor)]
            if not unread:
                return {}
            stored: Any = self._client.hmget(self.keys.blocks(problem), unread)
            if all(block is not None for block in stored):
                return dict(zip(unread, stored, strict=True))
            again: Any = self._client.hkeys(self.keys.blocks(problem))
            names = again
        raise redis.TimeoutError(f"problem {problem} of {self.keys.full_name} is compacted faster than it can be read")

    def generations_of(self, problems: Sequence[str]) -> dict[str, list[int] | None]:
        """The generations in which each of *problems* was sampled; None for one whose keys hold something else."""
        names = self._of_each(problems, lambda pipeline, problem: pipeline.hkeys(self.keys.lengths(problem)))
        return {problem: None if of is None else _numbers(of) for problem, of in names.items()}

    def _of_each(self, problems: Iterable[str], ask: Callable[[Any, str], object]) -> dict[str, Any]:
        """What each of *problems* has, many in a round trip; None for one whose keys hold something else."""
        known = list(dict.fromkeys(problems))
        found: dict[str, Any] = {}
        for at in range(0, len(known), _PROBLEMS_AT_ONCE):
            some = known[at : at + _PROBLEMS_AT_ONCE]
            pipeline = self._client.pipeline(transaction=False)
            for problem in some:
                ask(pipeline, problem)
            for problem, reply in zip(some, pipeline.execute(raise_on_error=False), strict=True):
                unreadable = isinstance(reply, Exception) and _of_its_key(reply)
                found[problem] = None if unreadable else reply
        return found

    def unpacked(self, problems: Iterable[str]) -> dict[str, int | None]:
        """Entries in the log of each of *problems*; None for one whose keys hold something else."""
        return self._of_each(problems, lambda pipeline, problem: pipeline.xlen(self.keys.log(problem)))

    def lengths(self, problem: str) -> list[LengthEntry]:
        """Lengths and rewards of a problem's rollouts."""
        stored: Any = self._client.hgetall(self.keys.lengths(problem))
        return unpack_entries(stored)

    def rewards(self, problem: str) -> dict[bytes, float]:
        """Rewards of a problem's rollouts, by ``rollout_key``."""
        return _rewards(self.lengths(problem))

    def length_stats(self, problem: str | None = None) -> LengthStats:
        """How long the rollouts of a problem are; of None, the last rollouts of all problems."""
        if problem is not None:
            return self.length_stats_of([problem])[problem]
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(SHARDS):
            pipeline.lrange(self.keys.recent(shard), 0, -1)
        return LengthStats.of(unpack_recent(entry for some in pipeline.execute() for entry in some))

    def length_stats_of(self, problems: Iterable[str]) -> dict[str, LengthStats]:
        """How long the rollouts of each of *problems* are; of one whose keys hold something else, nothing is known."""
        stored = self._of_each(problems, lambda pipeline, problem: pipeline.hgetall(self.keys.lengths(problem)))
        return {problem: _stats([] if of is None else unpack_entries(of)) for problem, of in stored.items()}

    # acceptance by age

    def report_ages(self, by_age: Mapping[int, tuple[float, float]]) -> None:
        """Add draft tokens (drafted, accepted) from history of each age, in generations, since the last report."""
        pipeline = self._client.pipeline(transaction=False)
        for age, (drafted, accepted) in by_age.items():
            pipeline.hincrbyfloat(self.keys.ages, f"{age}:drafted", drafted)
            pipeline.hincrbyfloat(self.keys.ages, f"{age}:accepted", accepted)
        pipeline.execute()

    def ages(self) -> dict[int, tuple[float, float]]:
        """Draft tokens (drafted, accepted) from history of each age, since :meth:`forget_ages`."""
        stored: Any = self._client.hgetall(self.keys.ages)
        by_age: defaultdict[int, dict[bytes, float]] = defaultdict(dict)
        for name, value in stored.items():
            age, _, what = name.partition(b":")
            by_age[int(age)][what] = float(value)
        return {age: (of.get(b"drafted", 0.0), of.get(b"accepted", 0.0)) for age, of in sorted(by_age.items())}

    def forget_ages(self) -> None:
        """Count anew: once the window was judged, what is reported next is of the new one."""
        self._client.delete(self.keys.ages)

    # what engines have learned

    def learned(self) -> bytes | None:
        """What an engine has learned of drafts (``SuffixIndex.learned``); None if none has said so.

        Raises:
            RecordError: if what is there cannot be read.
        """
        stored: Any = self._client.get(self.keys.learned)
        return None if stored is None else decode_learned(stored)

    def keep_learned(self, learned: bytes) -> None:
        """Keep it for engines that begin, in place of what an engine said before."""
        self._client.set(self.keys.learned, encode_learned(learned))

    # looking after it

    def problems(self) -> list[Problem]:
        """Every problem, those used least recently first."""
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(SHARDS):
            for key in (self.keys.used(shard), self.keys.changed(shard), self.keys.sizes(shard)):
                pipeline.zrange(key, 0, -1, withscores=True)
        replies = pipeline.execute()
        used, changed, sizes = ({name: score for some in replies[at::3] for name, score in some} for at in range(3))
        known = [
            Problem(name, used[key], changed.get(key, 0.0), int(sizes.get(key, 0)))
            for name, key in ((name, name.encode()) for name in _texts(used))
        ]
        return sorted(known, key=lambda problem: problem.used)

    def compact(self, problem: str) -> bool:
        """Pack what a problem's log holds into a block, together with blocks that are no larger.

        What has left the window is dropped on the way; an entry or block that cannot be read stays where it is.

        Returns:
            Whether there was anything to do, and it was done: not if the log changed meanwhile.
        """
        window, _, since = self._limits()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xrange(self.keys.log(problem), count=_COMPACTED_AT_ONCE)
        pipeline.hgetall(self.keys.blocks(problem))
        entries, blocks = pipeline.execute()
        records: list[HistoryRecord] = []
        replaced: list[bytes] = []
        size, last = 0, ""
        for entry_id, fields in entries:
            data = fields.get(b"d", b"")
            try:
                records.append(decode_record(data))
            except RecordError:
                continue  # whoever reads it says so
            replaced.append(entry_id)
            size += len(data)
            last = entry_id.decode()
        if not replaced:
            return False
        merged: list[bytes] = []
        for name, block in sorted(blocks.items(), key=lambda item: _last_entry(item[0]), reverse=True):
            if len(block) > _KEPT_APART * size or len(block) + size > _LARGEST_BLOCK:
                break
            try:
                older = decode_records(block)
            except RecordError:
                break
            merged.append(name)
            records, size = older + records, size + len(block)
        # those of its lengths too: more of the newest may be in the log than is packed at once
        sampled = self.generations_of([problem])[problem] or []
        oldest = oldest_kept([*sampled, *(record.generation for record in records)], window, since)
        kept = [record for record in records if record.generation >= oldest]
        return self._put_block(problem, kept, last, merged, replaced) is not None

    def _put_block(
        self, problem: str, records: list[HistoryRecord], last: str, blocks: list[bytes], entries: list[bytes]
    ) -> int | None:
        """Put *records* in the place of *blocks* and *entries*, the last of which is *last*.

        Returns:
            Bytes that the problem takes now; None if it was not done, as they have changed meanwhile.
        """
        ordered = sorted(records, key=lambda record: record.generation)
        name, block = (f"{ordered[-1].generation}:{last}", encode_records(ordered)) if ordered else ("", b"")
        call = Call(_COMPACT, self._of(problem), [name, block, len(blocks), *blocks, *entries])
        done, bytes_now = run(self._client, call)
        if not done:
            return None
        self._resize(problem, int(bytes_now))
        return int(bytes_now)

    def trim(self, problem: str, *, most: int | None = None) -> int:
        """Drop what has left the window: nobody appends to a problem that is not sampled any more.

        Args:
            problem: its id.
            most: generations to keep, if that is fewer.

        Returns:
            Bytes that the problem takes now.
        """
        window, always, since = self._limits()
        window = window if most is None else min(window, most)
        _, bytes_now = run(self._client, Call(_TRIM, self._of(problem), [b"", 0, b"", window, always, since]))
        self._resize(problem, int(bytes_now))
        oldest = oldest_kept(self.generations_of([problem])[problem] or (), window, since)
        blocks: Any = self._client.hgetall(self.keys.blocks(problem))
        for name, block in blocks.items():
            try:
                records = decode_records(block)
            except RecordError:
                continue  # whoever reads it says so
            kept = [record for record in records if record.generation >= oldest]
            if len(kept) < len(records):
                last = name.decode(errors="replace").rpartition(":")[2]
                bytes_now = self._put_block(problem, kept, last, [name], []) or bytes_now
        return int(bytes_now)

    def drop(self, problems: Sequence[Problem]) -> list[Problem]:
        """Remove all that is kept of *problems*, but not of those that were used meanwhile.

        What is appended to one of them in this very moment may go with it.

        Returns:
            Those that are gone.
        """
        pipeline = self._client.pipeline(transaction=False)
        for one in problems:
            pipeline.zscore(self.keys.used(self.keys.shard(one.problem)), one.problem)
        idle = [one for one, used in zip(problems, pipeline.execute(), strict=True) if used == one.used]
        # The keys first: what is stopped in between is dropped again, as its shard still knows it.
        pipeline = self._client.pipeline(transaction=False)
        for one in idle:
            for key in self._of(one.problem):
                pipeline.unlink(key)
        pipeline.execute()
        calls = [
            Call(
                _FORGET,
                list(self.keys.of_shard(self.keys.shard(one.problem))[:3]),
                [one.problem, repr(one.used)],
            )
            for one in idle
        ]
        for reply in run_all(self._client, calls):
            if isinstance(reply, redis.ResponseError):
                raise reply
        return idle

    def _resize(self, problem: str, size: int) -> None:
        """Correct what a shard says of a problem's bytes, unless it was dropped meanwhile."""
        run(self._client, Call(_RESIZE, [self.keys.sizes(self.keys.shard(problem))], [problem, size]))


def _of_its_key(error: Exception) -> Exception:
    """*error*, if it concerns one key alone; else it is raised."""
    if not isinstance(error, redis.ResponseError) or concerns_the_server(error):
        raise error
    return error


def _texts(names: Iterable[bytes]) -> set[str]:
    """*names* without those that are no text: this project wrote none of them, and nobody could ask for them."""
    texts = set()
    for name in names:
        try:
            texts.add(name.decode())
        except UnicodeDecodeError:
            logger.warning("%r is no name of a history or problem; does another program write here?", name[:40])
    return texts


def _numbers(names: Iterable[bytes]) -> list[int]:
    """Generations, as the fields of a problem's lengths are named; other fields are none of ours."""
    return [int(name) for name in names if name.isdigit()]


def _horizon(stored: str | bytes | None) -> int | None:
    return None if stored is None else int(stored)


def _since(newest: int, horizon: int | None) -> int:
    """The oldest generation within a horizon."""
    return 0 if horizon is None else max(0, newest - horizon + 1)


def _place(entry_id: str) -> tuple[int, int]:
    """An entry's id as numbers; those of what is none come first."""
    milliseconds, _, number = entry_id.partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdigit() and number.isdigit() else (-1, -1)


def _last_entry(block: bytes) -> tuple[int, int]:
    return _place(block.decode(errors="replace").rpartition(":")[2])


def _rewards(entries: Iterable[LengthEntry]) -> dict[bytes, float]:
    return {entry.key: entry.reward for entry in entries if entry.reward is not None and math.isfinite(entry.reward)}


def _stats(entries: Iterable[LengthEntry]) -> LengthStats:
    return LengthStats.of((entry.generation, entry.length, entry.cut_off) for entry in entries)
