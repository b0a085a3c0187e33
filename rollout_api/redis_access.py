"""What a job, its workers and its trainers may do on a Redis that others use too: rules for ``ACL SETUSER``.

python -m rollout_api.redis_access NAMESPACE NAME UID HISTORY
"""

from __future__ import annotations

import sys

from rollout_api.keys import HistoryKeys, MessageKeys, named

_COMMANDS = ("+@all", "-@admin", "-@dangerous", "-function", "-script|flush", "-script|kill", "+info")
"""All but what changes or lists what is others'. ``INFO`` tells whether the server was started anew."""


def access_rules(namespace: str, name: str, uid: str, history: str) -> list[str]:
    """Rules for the user of one job: its own messages, its history, and the key by which trainers find it.

    They say nothing of passwords; give ``on`` and one besides (``>password``, or ``#sha256``).

    Args:
        namespace: of the job.
        name: of the job.
        uid: of the job.
        history: name of its history, which other jobs of the namespace may share.
    """
    keys = HistoryKeys(namespace, history)
    patterns = [
        MessageKeys(uid).every(),
        named(f"{namespace}/{name}"),
        keys.meta,
        keys.log("*"),
        keys.lengths("*"),
        keys.rewards("*"),
    ]
    return ["resetkeys", *(f"~{_literal(one)}" for one in patterns), "resetchannels", *_COMMANDS]


def _literal(pattern: str) -> str:
    """A pattern of which nothing but ``*`` is special."""
    for special in "\\[]?":
        pattern = pattern.replace(special, f"\\{special}")
    return pattern


def main() -> None:
    """Print the rules of a job's user."""
    if len(sys.argv) != 5:
        sys.exit("usage: python -m rollout_api.redis_access NAMESPACE NAME UID HISTORY")
    print(" ".join(access_rules(*sys.argv[1:])))  # noqa: T201


if __name__ == "__main__":
    main()
