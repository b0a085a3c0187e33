"""Generate docs/cli.md from the definitions of the commands: ``python scripts/cli_docs.py``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rollout_operator.__main__ import argument_parser
from typer.main import get_command

from rollout_api.protocol import exit_codes
from rollout_worker.cli.main import app as rollout_app
from rollout_worker.history_service.cli import app as history_app

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"

HEAD = """# Command line

This page lists all commands and options. It is generated from the code by `python scripts/cli_docs.py`. `--help` shows
the same after each command.

- [`rollout`](#rollout) runs jobs on one or several machines. `make env` and the extra `worker` install it.
- [`rollout history`](#rollout-history) shows, moves and maintains histories. As `rollout-history`, it is also in the
  operator's image and in the extra `history`.
- [`rollout-operator`](#rollout-operator) runs RolloutJobs on Kubernetes. The Helm chart starts it. It is in the
  operator's image and in the extra `operator`.

An option with an environment variable takes its value from there if it is not given. This keeps passwords in URLs out
of the list of processes."""

EXIT_CODES = {
    0: "success",
    1: "`rollout history`: the history or the problem does not exist, or the maintenance of a history failed",
    exit_codes.EXIT_MANIFEST: "the manifest or the command line is invalid",
    exit_codes.EXIT_REDIS: "Redis cannot be used",
    exit_codes.EXIT_ENGINE: "vLLM, Ray or the job failed",
    exit_codes.EXIT_STATE: "a file or directory cannot be used",
    exit_codes.EXIT_DEADLINE: "the job's deadline was exceeded",
    exit_codes.EXIT_MODEL: "the model was not found",
    exit_codes.EXIT_INTERRUPTED: "the command was interrupted; the same command continues",
}
_EXTRAS = re.compile(r"\s*\[((?:env var|default|required|x[<>]|[0-9.]+<)[^\]]*)\]$")


def escaped(text: str) -> str:
    """Return a text for a cell of a table."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"(?<![`\w])(--[a-z][\w-]*(?:=[\w-]+)?)", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def option_row(names: str, text: str, is_required: bool) -> str:
    """Return a row of a table of options from what ``--help`` shows of one."""
    extras = _EXTRAS.search(text)
    default, environment = "", ""
    for part in (extras[1] if extras else "").split("; "):
        if part.startswith("default: "):
            default = part.removeprefix("default: ").removeprefix("(").removesuffix(")")
        elif part.startswith("env var: "):
            environment = ", ".join(f"`{name}`" for name in part.removeprefix("env var: ").split(", "))
    meaning = _EXTRAS.sub("", text)
    if environment:
        meaning = f"{meaning} Environment: {environment}."
    default = "**required**" if is_required else escaped(default)
    return f"| `{names.replace('|', chr(92) + '|')}` | {default} | {meaning if environment else escaped(meaning)} |"


def command_section(command: Any, name: str) -> Iterator[str]:
    """Yield the lines of the section of one command of Typer."""
    context = typer.Context(command, info_name=name)
    usage = " ".join(context.get_usage().removeprefix("Usage: ").split())
    yield from ("", f"### {name}", "", escaped((command.help or "").replace("\n\n", " ")), "")
    yield from ("```text", re.sub(r"\{(\w+)\}", r"\1", usage), "```")
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            names, text = record
            rows.append(option_row(re.sub(r"<([a-z ]+)>", _metavar, names), text, parameter.required))
    if rows:
        yield from ("", "| Argument or option | Default | Meaning |", "|---|---|---|", *rows)


def _metavar(match: re.Match[str]) -> str:
    return {"int range": "N", "int": "N", "str": "TEXT", "path": "PATH", "float": "NUMBER"}.get(
        match[1], match[1].upper()
    )


def group_sections(app: typer.Typer, name: str) -> Iterator[str]:
    """Yield the lines of the sections of all commands of an application."""
    group: Any = get_command(app)
    for subcommand, command in group.commands.items():
        if command.context_settings.get("help_option_names") != []:  # passed on to another application
            yield from command_section(command, f"{name} {subcommand}")


def parser_section(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of the table of options of a parser of argparse."""
    yield from (escaped(parser.description or ""), "", "| Option | Default | Meaning |", "|---|---|---|")
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or ("|".join(action.choices) if action.choices else action.dest.upper())
        names = action.option_strings[-1] if action.nargs == 0 else f"{action.option_strings[-1]} {value}"
        text, _, default = (action.help or "").partition("; default: ")
        if not default and not action.required and action.default not in (None, False, "", []):
            default = str(action.default)
        meaning = text if text.startswith("rollout-") else text[:1].upper() + text[1:]
        yield option_row(names, f"{meaning}. [default: {default}]" if default else f"{meaning}.", action.required)


def document() -> str:
    """Return the page."""
    lines = [HEAD, "", "## rollout", "", "Exit codes of `rollout` and `rollout history`:", ""]
    lines += ["| Exit code | Meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in sorted(EXIT_CODES.items())]
    lines += group_sections(rollout_app, "rollout")
    lines += ["", "## rollout history", ""]
    lines += [
        "These commands inspect, move and maintain histories ([history.md](history.md)). `rollout-history` is the same",
        "command where neither Ray nor vLLM is installed.",
    ]
    lines += group_sections(history_app, "rollout history")
    lines += ["", "## rollout-operator", ""]
    lines += parser_section(argument_parser())
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
