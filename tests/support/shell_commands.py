"""Divides command lines of the documentation into the programs that they call."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPERATORS = {"&&", "||", "|", "&", ";"}


@dataclass
class Call:
    """A call of one program."""

    program: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def calls(command: str) -> list[Call]:
    """Return the calls of a command line, also those of command substitutions; assignments alone call nothing.

    Raises:
        ValueError: if quotes are not closed.
    """
    command, substituted = _without_substitutions(command)
    found = [call for inner in substituted for call in calls(inner)]
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in _OPERATORS:
            if call := _call(words):
                found.append(call)
            words = []
        else:
            words.append(word)
    return found


def _without_substitutions(command: str) -> tuple[str, list[str]]:
    """Return a command in which a word stands for each ``$(…)``, and the commands within these."""
    inner = []
    while (start := command.find("$(")) >= 0:
        end, depth = start + 2, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(command[end], 0)
            end += 1
        inner.append(command[start + 2 : end - 1])
        command = f"{command[:start]}SUBSTITUTION{command[end:]}"
    return command, inner


def _call(words: list[str]) -> Call | None:
    environment, arguments = {}, []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"<|>>?|>&|&>", word):
            if arguments and arguments[-1] in ("1", "2"):
                arguments.pop()  # the number of a stream, as in 2>&1
            skip = True
        elif not arguments and _ASSIGNMENT.fullmatch(word):
            name, _, value = word.partition("=")
            environment[name] = value
        else:
            arguments.append(word)
    return Call(arguments[0], arguments[1:], environment) if arguments else None
