"""Recognizes the turns of multi-turn trajectories by their prompts, for trainers that do not name them. Pure."""

from __future__ import annotations

import uuid
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from rollout_api.protocol.messages import pack_tokens, problem_id_of

_BYTES_PER_TOKEN = 4


class RecognizedTurn(NamedTuple):
    """The place of a prompt in its trajectory."""

    trajectory_id: str
    problem_id: str
    """Problem of all turns of the trajectory."""
    turn: int


class _Ending(NamedTuple):
    """A prompt and its response; the prompt of the next turn begins with both."""

    num_tokens: int
    digest: bytes


class RecognizedTurns:
    """Remembers the turns that were sampled last, and recognizes prompts that continue them.

    The prompt of a turn begins with that of the previous turn and the response to it.

    Args:
        max_turns: number of turns to remember.
    """

    def __init__(self, max_turns: int = 65_536) -> None:
        self._max_turns = max_turns
        self._turns: OrderedDict[_Ending, RecognizedTurn] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        """Length of a remembered prompt with its response, in tokens → number of turns."""
        self._sorted_lengths: list[int] = []
        """The lengths in ascending order."""

    def recognize(self, prompt: Sequence[int]) -> RecognizedTurn:
        """Return which turn has this prompt: the one after the longest remembered turn, or turn 0 of a trajectory."""
        packed = pack_tokens(prompt)
        digest, hashed = blake2b(digest_size=16), 0
        found: _Ending | None = None
        for length in self._sorted_lengths:
            if length > len(prompt):
                break
            digest.update(packed[hashed * _BYTES_PER_TOKEN : length * _BYTES_PER_TOKEN])
            hashed = length
            ending = _Ending(length, digest.copy().digest())
            found = ending if ending in self._turns else found
        if found is None:
            return RecognizedTurn(uuid.uuid4().hex, problem_id_of(prompt), 0)
        last = self._turns[found]
        return last._replace(turn=last.turn + 1)

    def remember(self, turn: RecognizedTurn, prompt: Sequence[int], response: Sequence[int]) -> None:
        """Remember a turn that was sampled."""
        tokens = [*prompt, *response]
        ending = _Ending(len(tokens), blake2b(pack_tokens(tokens), digest_size=16).digest())
        if ending not in self._turns:
            if not self._lengths[ending.num_tokens]:
                insort(self._sorted_lengths, ending.num_tokens)
            self._lengths[ending.num_tokens] += 1
        self._turns[ending] = turn
        self._turns.move_to_end(ending)
        if len(self._turns) > self._max_turns:
            oldest, _ = self._turns.popitem(last=False)
            self._lengths[oldest.num_tokens] -= 1
            if not self._lengths[oldest.num_tokens]:
                del self._lengths[oldest.num_tokens]
                del self._sorted_lengths[bisect_left(self._sorted_lengths, oldest.num_tokens)]
