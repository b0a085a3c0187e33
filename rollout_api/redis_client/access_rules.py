"""What a job with its trainers, and the history service, may do on a Redis that others use too: for ``ACL SETUSER``.

python -m rollout_api.redis_client.access_rules NAMESPACE NAME UID HISTORY
python -m rollout_api.redis_client.access_rules service
"""

from __future__ import annotations

import sys

from rollout_api.protocol.keys import HISTORIES, HistoryKeys, MessageKeys, named

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
    patterns = [
        MessageKeys(uid).every(),
        named(f"{namespace}/{name}"),
        *HistoryKeys(namespace, history).patterns(),
    ]
    keys = [f"~{_literal(one)}" for one in patterns]
    # a selector of its own: the names of others' histories can be neither read nor removed
    return ["resetkeys", *keys, "resetchannels", *_COMMANDS, "clearselectors", f"(+sadd %W~{HISTORIES})"]


def service_rules() -> list[str]:
    """Rules for the user of the history service: all histories, no messages, and no names of other keys.

    They say nothing of passwords, as those of :func:`access_rules`.
    """
    return ["resetkeys", "~history:*", "resetchannels", *_COMMANDS, "-scan", "-randomkey", "clearselectors"]


def _literal(pattern: str) -> str:
    """A pattern of which nothing but ``*`` is special."""
    for special in "\\[]?":
        pattern = pattern.replace(special, f"\\{special}")
    return pattern


def main() -> None:
    """Print the rules of a job's user, or of the history service's."""
    match sys.argv[1:]:
        case ["service"]:
            rules = service_rules()
        case [namespace, name, uid, history]:
            rules = access_rules(namespace, name, uid, history)
        case _:
            sys.exit("usage: python -m rollout_api.redis_client.access_rules NAMESPACE NAME UID HISTORY | service")
    print(" ".join(rules))  # noqa: T201


if __name__ == "__main__":
    main()
