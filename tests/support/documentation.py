"""Reads the commands and files that pages of the documentation contain."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')


@dataclass
class Command:
    """A command of a ``console`` block, and the output that the page shows for it."""

    text: str
    output: list[str] = field(default_factory=list)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a language: what follows the language in the first line, and the content."""
    return [(info, content) for _, found, info, content in _BLOCK.findall(page) if found == language]


def console_blocks(page: str) -> list[list[Command]]:
    """Return the commands of each ``console`` block, without comments at the ends of their lines."""
    found = []
    for _, content in blocks(page, "console"):
        commands: list[Command] = []
        for line in content.splitlines():
            if line.lstrip().startswith("$ "):
                commands.append(Command(line.lstrip()[2:]))
            elif commands and commands[-1].text.endswith("\\"):
                commands[-1].text = f"{commands[-1].text[:-1].rstrip()} {line.strip()}"
            elif commands and line.strip():
                commands[-1].output.append(line)
        for command in commands:
            command.text = re.sub(r"\s{2,}# .*$", "", command.text).rstrip()
        found.append(commands)
    return found


def titled_files(page: str) -> dict[str, str]:
    """Return the files that a page asks its reader to save: name → content."""
    found = {}
    for language in ("yaml", "python"):
        for info, content in blocks(page, language):
            title = _TITLE.search(info)
            if title is not None:
                found[title[1]] = content
    return found
