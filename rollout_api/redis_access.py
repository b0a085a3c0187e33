"""What a job, its workers and its trainers may do on a Redis that others use too: rules for ``ACL SETUSER``.

python -m rollout_api.redis_access NAMESPACE UID HISTORY
"""

from __future__ import annotations

import sys

from rollout_api.keys import HistoryKeys, MessageKeys, named

_COMMANDS = ("-@all", "+@all", "-@admin", "-@dangerous", "+info")
"""All but what changes or lists what is others'. ``INFO`` tells whether the server was started anew."""


def access_rules(namespace: str, uid: str, history: str) -> list[str]:
    """Rules for the user of one job: its own messages, its history, and who runs by which name in its namespace.

    They say nothing of passwords; give ``on`` and one besides (``>password``, or ``#sha256``).

    Args:
        namespace: of the job.
        uid: of the job.
        history: name of its history, which other jobs of the namespace may share.
    """
    jobs, _ = named(f"{namespace}/")
    keys = HistoryKeys(namespace, history)
    patterns = [MessageKeys(uid).every(), jobs, keys.meta, keys.log("*"), keys.lengths("*"), keys.rewards("*")]
    return ["resetkeys", *(f"~{_literal(one)}" for one in patterns), "resetchannels", *_COMMANDS]


def _literal(pattern: str) -> str:
    """A pattern of which nothing but ``*`` is special."""
    for special in "\\[]?":
        pattern = pattern.replace(special, f"\\{special}")
    return pattern


def main() -> None:
    """Print the rules of a job's user."""
    if len(sys.argv) != 4:
        sys.exit("usage: python -m rollout_api.redis_access NAMESPACE UID HISTORY")
    print(" ".join(access_rules(*sys.argv[1:])))  # noqa: T201


if __name__ == "__main__":
    main()
