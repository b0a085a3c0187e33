"""Generate the tables of modules in docs/code-map.md from the first sentences of the files.

Run ``python -m scripts.code_map``. The text of docs/code-map.md outside the marked blocks is written by hand.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

from scripts.marked_blocks import with_blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "code-map.md"

BLOCKS = (
    "rollout_api",
    "rollout_server",
    "rollout_worker",
    "operator",
    "scripts",
    "benchmarks",
    "examples",
    "tests/support",
)
"""Folders whose files the page lists, each in a marked block."""
COMMENTS = {
    **dict.fromkeys((".cpp", ".go", ".hpp", ".js"), "//"),
    **dict.fromkeys(("", ".sh", ".yaml"), "#"),
    ".css": "/*",
    ".html": "{#",
    ".lua": "--",
}
"""Suffix of files that are described by the comment at their top → how a line of it begins."""
UNDESCRIBED = ("py.typed", "README.md")


def tracked_files(*patterns: str) -> list[str]:
    """Return the paths of all files that git tracks or would add, relative to the root of the repository.

    Args:
        patterns: git pathspecs, of which each path matches at least one; without any, all files are returned.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(name for name in set(listed) if (ROOT / name).is_file())


def modules(folder: str) -> list[str]:
    """Return the paths of all files below *folder* that the page names, except for benchmarks' results and data."""
    return [
        name
        for name in tracked_files()
        if name.startswith(f"{folder}/")
        and Path(name).name not in UNDESCRIBED
        and not name.startswith(("benchmarks/results/", "benchmarks/data/"))
    ]


def purpose(name: str) -> str:
    """Return the first sentence of a file's docstring or top comment, as Markdown.

    Raises:
        ValueError: if the file has neither.
    """
    path = ROOT / name
    text = path.read_text()
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        paragraph = _top_comment(text, COMMENTS.get(path.suffix, "#"))
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(paragraph.split()))[0]
    if not sentence:
        raise ValueError(f"{name} has no docstring or comment at its top that says what it is")
    return _markdown(sentence)


def _top_comment(text: str, prefix: str) -> str:
    """Return the first paragraph of the comment at the top of a file, up to an indented command."""
    lines = []
    for line in text.splitlines():
        if line.startswith("#!") or (prefix == "--" and line.startswith("#")):
            continue
        if not line.startswith(prefix) or not line.removeprefix(prefix).strip():
            break
        text_of_line = line.removeprefix(prefix)
        if text_of_line.startswith("  "):  # an indented command
            break
        lines.append(text_of_line.strip().removesuffix("*/").removesuffix("#}").strip())
    return " ".join(lines)


def _markdown(sentence: str) -> str:
    sentence = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", sentence)
    sentence = sentence.replace("``", "`").replace("|", "\\|").rstrip(":")
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def table(folder: str) -> str:
    """Return a section for each folder below *folder*, with a line for each of its files."""
    by_folder: defaultdict[str, list[str]] = defaultdict(list)
    for name in modules(folder):
        by_folder[str(Path(name).parent)].append(name)
    sections = []
    for parent, names in sorted(by_folder.items()):
        lines = [] if parent == folder else [f"### `{parent}`", ""]
        if f"{parent}/__init__.py" in names:
            names.remove(f"{parent}/__init__.py")
            if ast.get_docstring(ast.parse((ROOT / parent / "__init__.py").read_text())):
                lines += [purpose(f"{parent}/__init__.py"), ""]
        if rows := [f"| {cell} | {purpose(name)} |" for name, cell in _cells(names)]:
            lines += ["| File | Purpose |", "|---|---|", *rows]
        sections.append("\n".join(lines).rstrip())
    return "\n\n".join(sections)


def _cells(names: list[str]) -> list[tuple[str, str]]:
    """Pair each file with its cell in the table; a C++ source shares the cell of its header."""
    cells = []
    for name in names:
        path = Path(name)
        if path.suffix == ".cpp" and f"{path.with_suffix('.hpp')}" in names:
            continue
        source = path.with_suffix(".cpp")
        together = path.suffix == ".hpp" and str(source) in names
        cells.append((name, f"`{path.name}`, `{source.name}`" if together else f"`{path.name}`"))
    return cells


def document(page: str) -> str:
    """Return the page with its marked blocks generated from the files."""
    return with_blocks(page, "scripts/code_map.py", {folder: table(folder) for folder in BLOCKS})


if __name__ == "__main__":
    PAGE.write_text(document(PAGE.read_text()))
