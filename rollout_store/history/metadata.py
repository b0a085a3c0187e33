"""The metadata of a history: tokenizer, model, window, byte cap, and the generations of published versions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.typing import EncodableT, FieldT

from rollout_api.protocol.keys import HISTORY_NAMES, HistoryKeys
from rollout_api.redis_client.server_functions import Call, Function, Redis, run
from rollout_store.history.catalog import batches, decode_names
from rollout_store.history.window import oldest_kept

FIELDS_PER_ROUND_TRIP = 1000
"""Maximum number of hash fields in one command or server function, which takes a few thousand arguments."""
MAX_KNOWN_VERSIONS = 10_000
"""Number of latest generations whose run and weight version are kept; older ones are no longer referred to."""

logger = logging.getLogger(__name__)

VERSION_FIELD_PREFIX = "generation:"
"""Prefix of the metadata fields that hold the generation of a run's weight version, ``<run>:<version>``."""
_EMPTY_SINCE = "empty_since"
"""Metadata field with the server's time at which the history was first seen without problems."""

_PUBLISH, _MERGE = Function("publish"), Function("merge_metadata")


class HistoryMismatchError(ValueError):
    """The history was written with another tokenizer, whose token ids mean something else, or for another model."""


@dataclass(frozen=True)
class HistoryInfo:
    """The metadata of a history."""

    tokenizer: str
    """Fingerprint of the tokenizer's vocabulary."""
    model: str
    """Model whose rollouts the history was created for."""
    generation: int
    """The newest generation."""
    window: int
    """Number of generations kept per problem, as requested by the job that opened the history last."""
    max_bytes: int | None
    """Byte cap in Redis; None if there is none."""

    def oldest_kept(self, generations: Iterable[int]) -> int:
        """Return the oldest generation that is kept of a problem that was sampled in *generations*."""
        return oldest_kept(generations, self.window)


def list_histories(client: Redis) -> list[HistoryKeys]:
    """Return the keys of all histories on a server, ordered by name."""
    names: Any = client.smembers(HISTORY_NAMES)
    return [HistoryKeys.from_full_name(name) for name in sorted(decode_names(names))]


class HistoryMetadata:
    """The metadata of one history."""

    def __init__(self, client: Redis, keys: HistoryKeys, *, window: int) -> None:
        """Prepare access to the metadata; nothing is sent yet."""
        self._client = client
        self._keys = keys
        self.window = window
        """Number of generations per problem that this process reads."""
        self._newest = 0
        """The newest generation seen. A server that lost its data continues to count from it."""
        self._initial: dict[str, str] = {}
        """Fields for creating the history again if its server loses it."""

    def set_initial(self, tokenizer: str, model: str = "", *, max_bytes: int | None = None) -> None:
        """Set the fields for creating the history again if its server loses it; nothing is sent.

        An empty *model* accepts any; without *max_bytes* there is no byte cap.
        """
        self._initial = {"tokenizer": tokenizer, "model": model, "window": str(self.window)}
        if max_bytes is not None:
            self._initial["max_bytes"] = str(max_bytes)

    def open(
        self, tokenizer: str, model: str = "", *, allow_model_mismatch: bool = False, max_bytes: int | None = None
    ) -> None:
        """Create the history for a tokenizer and a model, or check that an existing one fits them.

        With *allow_model_mismatch*, rollouts are added to a history of another model, too. An empty *model* fits any;
        without *max_bytes*, the byte cap stays unchanged.

        Raises:
            HistoryMismatchError: the history holds rollouts of another tokenizer, or of another model and that is
                not allowed.
        """
        identity = {"tokenizer": tokenizer, "model": model} if model else {"tokenizer": tokenizer}
        pipeline = self._client.pipeline(transaction=False)
        for name, value in identity.items():
            pipeline.hsetnx(self._keys.meta, name, value)
        pipeline.hmget(self._keys.meta, list(identity))
        *_, stored = pipeline.execute()
        known = {name: value.decode() for name, value in zip(identity, stored, strict=True)}
        if known["tokenizer"] != tokenizer:
            raise self._tokenizer_mismatch(known["tokenizer"], tokenizer)
        if known.get("model", "") != model and not allow_model_mismatch:
            raise HistoryMismatchError(
                f"history {self._keys.full_name} holds rollouts of model {known['model']!r}, not of {model!r}; choose "
                "another name in spec.history.name, or set spec.history.allowModelMismatch to use these rollouts, too"
            )
        settings: dict[FieldT, EncodableT] = {"window": self.window}
        if max_bytes is not None:
            settings["max_bytes"] = max_bytes
        self._client.hset(self._keys.meta, mapping=settings)
        self._client.sadd(HISTORY_NAMES, self._keys.full_name)
        self.set_initial(tokenizer, model, max_bytes=max_bytes)

    def info(self) -> HistoryInfo | None:
        """Return the metadata, or None if there is no history of this name."""
        names = ["tokenizer", "model", "generation", "window", "max_bytes"]
        stored: Any = self._client.hmget(self._keys.meta, names)
        if not any(stored):
            return None
        known = {name: value.decode() for name, value in zip(names, stored, strict=True) if value is not None}
        return HistoryInfo(
            tokenizer=known.get("tokenizer", ""),
            model=known.get("model", ""),
            generation=int(known.get("generation", 0)),
            window=int(known.get("window", self.window)),
            max_bytes=int(known["max_bytes"]) if "max_bytes" in known else None,
        )

    # Generations

    def publish(self, run_uid: str, weight_version: int) -> int:
        """Return the generation of a run's weight version, which is a new one if it was not published before."""
        call = Call(_PUBLISH, [self._keys.meta], [f"{run_uid}:{weight_version}", self._newest])
        generation = int(run(self._client, call))
        self._newest = max(self._newest, generation)
        return generation

    def generation(self) -> int:
        """Return the newest generation; 0 if none was ever published."""
        stored: Any = self._client.hget(self._keys.meta, "generation")
        self._newest = max(self._newest, int(stored or 0))
        return self._newest

    def published_versions(self) -> dict[str, int]:
        """Return the generation of each known weight version, by ``<run>:<version>``."""
        stored: Any = self._client.hgetall(self._keys.meta)
        prefix = VERSION_FIELD_PREFIX.encode()
        return {name[len(prefix) :].decode(): int(value) for name, value in stored.items() if name.startswith(prefix)}

    def merge_versions(self, newest: int, published: Mapping[str, int]) -> int:
        """Add the generations of published versions, for example from an archive; known versions are not changed.

        *published* maps ``<run>:<version>`` to generations. The history continues to count from *newest*, unless its
        own generation is newer.

        Returns:
            The history's newest generation.
        """
        fields = [(VERSION_FIELD_PREFIX + version, generation) for version, generation in published.items()]
        generation = 0
        for batch in list(batches(fields, FIELDS_PER_ROUND_TRIP)) or [[]]:  # *newest* is merged in any case
            words = [word for pair in batch for word in pair]
            generation = int(run(self._client, Call(_MERGE, [self._keys.meta], [newest, *words])))
        return generation

    def prune_versions(self) -> int:
        """Delete the generations of versions so old that none of their rollouts is still on its way.

        A version that is published again nevertheless gets a new generation.

        Returns:
            The number of deleted versions.
        """
        if self._client.hlen(self._keys.meta) < 2 * MAX_KNOWN_VERSIONS:
            return 0
        oldest = self.generation() - MAX_KNOWN_VERSIONS
        fields = self._client.hscan_iter(self._keys.meta, match=f"{VERSION_FIELD_PREFIX}*", count=FIELDS_PER_ROUND_TRIP)
        old = [field for field, generation in fields if generation.isdigit() and int(generation) <= oldest]
        for batch in batches(old, FIELDS_PER_ROUND_TRIP):
            self._client.hdel(self._keys.meta, *batch)
        return len(old)

    # Retention

    def stored_window(self, newest: int | None = None) -> int:
        """Read how many generations are kept per problem; create the history again if its server has lost it.

        *newest* is the newest generation of the history, if the caller knows it.

        Raises:
            HistoryMismatchError: a history of another tokenizer has taken the name of this one.
        """
        stored: Any = self._client.hmget(self._keys.meta, ["generation", "window", "tokenizer"])
        generation, window, tokenizer = stored
        self._newest = max(self._newest, int(generation or 0), newest or 0)
        if self._initial and tokenizer is None:
            logger.warning("Redis has lost history %s; it is created again.", self._keys.full_name)
            fields = [word for pair in self._initial.items() for word in pair]
            self._newest = int(run(self._client, Call(_MERGE, [self._keys.meta], [self._newest, *fields])))
            self._client.sadd(HISTORY_NAMES, self._keys.full_name)
            tokenizer = self._client.hget(self._keys.meta, "tokenizer")
        if self._initial and (stored_tokenizer := (tokenizer or b"").decode()) != self._initial["tokenizer"]:
            raise self._tokenizer_mismatch(stored_tokenizer, self._initial["tokenizer"])
        return int(window or self.window)

    # Histories without problems

    def empty_since(self) -> float | None:
        """Return the server's time at which the history was first seen without problems, in Unix seconds."""
        stored: Any = self._client.hget(self._keys.meta, _EMPTY_SINCE)
        return None if stored is None else float(stored)

    def set_empty_since(self, now: float | None) -> None:
        """Record since when the history has been without problems, unless that is recorded; None if it has some."""
        if now is None:
            self._client.hdel(self._keys.meta, _EMPTY_SINCE)
        else:
            self._client.hsetnx(self._keys.meta, _EMPTY_SINCE, repr(now))

    def _tokenizer_mismatch(self, stored: str, expected: str) -> HistoryMismatchError:
        return HistoryMismatchError(
            f"history {self._keys.full_name} holds rollouts of another tokenizer ({stored[:12]}…, this model's is "
            f"{expected[:12]}…); choose another name in spec.history.name"
        )
