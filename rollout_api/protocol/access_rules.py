"""ACL rules for the Redis users of a job and of the history service, on a shared server.

The module prints them as arguments of ``ACL SETUSER``::

    python -m rollout_api.protocol.access_rules NAMESPACE NAME UID HISTORY
    python -m rollout_api.protocol.access_rules service
"""

from __future__ import annotations

import sys

from rollout_api.protocol.keys import HISTORY_NAMES, HistoryKeys, MessageKeys, job_uid_key

_COMMANDS = ("+@all", "-@admin", "-@dangerous", "-@scripting", "+fcall", "+info")
"""All commands except those that administer the server, affect other users' keys, or let the user run code of its own.

A script that does not end would block the server for everyone. The functions that may be called are those that an
administrator has loaded. ``INFO`` is allowed because it tells whether the server was restarted.
"""


def access_rules(namespace: str, name: str, uid: str, history: str) -> list[str]:
    """Return the rules for one job's user: its messages, its history, and the key that trainers find the job by.

    The rules set no password. Add ``on`` and a password (``>password`` or ``#sha256``).

    Args:
        namespace: namespace of the job.
        name: name of the job.
        uid: uid of the job.
        history: name of its history, which other jobs of the namespace may share.
    """
    patterns = [
        MessageKeys(uid).pattern(),
        job_uid_key(f"{namespace}/{name}"),
        *HistoryKeys(namespace, history).patterns(),
    ]
    keys = [f"~{_literal(one)}" for one in patterns]
    # A selector lets the user add its history to the list, but neither read nor remove other names.
    return ["resetkeys", *keys, "resetchannels", *_COMMANDS, "clearselectors", f"(+sadd %W~{HISTORY_NAMES})"]


def service_rules() -> list[str]:
    """Return the rules for the history service's user: all histories, but no messages and no names of other keys.

    The rules set no password; see :func:`access_rules`.
    """
    return ["resetkeys", "~history:*", "resetchannels", *_COMMANDS, "-scan", "-randomkey", "clearselectors"]


def _literal(pattern: str) -> str:
    """Escape all special characters of a glob-style pattern except ``*``."""
    for special in "\\[]?":
        pattern = pattern.replace(special, f"\\{special}")
    return pattern


def main() -> None:
    """Print the rules for a job's user or for the history service's."""
    match sys.argv[1:]:
        case ["service"]:
            rules = service_rules()
        case [namespace, name, uid, history]:
            rules = access_rules(namespace, name, uid, history)
        case _:
            sys.exit("usage: python -m rollout_api.protocol.access_rules NAMESPACE NAME UID HISTORY | service")
    sys.stdout.write(" ".join(rules) + "\n")


if __name__ == "__main__":
    main()
