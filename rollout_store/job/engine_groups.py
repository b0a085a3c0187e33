"""How the machines of an engine that spans several ones find each other: offers of a leader, answered by followers.

Synchronous, because leaders and followers wait in threads.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_store.job.limits import GROUP_EXPIRY_S
from rollout_store.job.part import as_text

_ENDED = "ended"


class GroupOffer(NamedTuple):
    """What the followers have to know to start their part of an engine."""

    id: str
    """Identifies this start of the engine."""
    settings: dict[str, Any]
    """vLLM's engine arguments on the leader."""


class GroupMember(NamedTuple):
    """The answer of a follower."""

    offer: str
    """Id of the offer that it answers."""
    process: str
    """Identifies the process that runs its part of the engine."""
    ended: bool
    """Whether this process has ended."""


class EngineGroupStore:
    """The offer of one leader and the answers to it. All of them expire unless they are renewed."""

    def __init__(self, client: redis.Redis, keys: MessageKeys, group: str) -> None:
        """Use the keys of the group that is called *group*."""
        self._client, self._keys, self._group = client, keys, group

    def offer(self) -> GroupOffer | None:
        """Return the leader's offer; None if it has no engine."""
        found: Any = self._client.get(self._keys.engine_group(self._group))
        return None if found is None else GroupOffer(**json.loads(found))

    def renew_offer(self, offer: GroupOffer) -> None:
        """Publish an offer, or renew it."""
        self._client.set(self._keys.engine_group(self._group), json.dumps(offer._asdict()), ex=GROUP_EXPIRY_S)

    def withdraw_offer(self) -> None:
        """Tell the followers that the engine has ended."""
        self._client.delete(self._keys.engine_group(self._group))

    def members(self, size: int) -> list[GroupMember | None]:
        """Return the answers of the followers with the ranks 1 to *size* - 1; None for one that has not answered."""
        found: Any = self._client.mget([self._keys.engine_group_member(self._group, rank) for rank in range(1, size)])
        return [None if value is None else _parse_member(as_text(value)) for value in found]

    def renew_member(self, rank: int, member: GroupMember) -> None:
        """Answer an offer, or renew the answer."""
        value = f"{member.offer}/{member.process}/{_ENDED if member.ended else ''}"
        self._client.set(self._keys.engine_group_member(self._group, rank), value, ex=GROUP_EXPIRY_S)


def _parse_member(value: str) -> GroupMember:
    offer, process, ended = value.split("/")
    return GroupMember(offer, process, ended == _ENDED)
