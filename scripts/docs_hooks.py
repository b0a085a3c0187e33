"""Hooks of MkDocs: add pages and files of other folders to the site, and draw pictures in the colors of the page.

Pages link to files of the repository relatively, as GitHub shows them. On the site, a page of another folder is one of
``PAGES``; another linked file becomes a page with its text, and data is copied. A link that is named after the file of
a page, such as ``[history.md](history.md)``, is named after the title of the page. SVGs that follow the reader's
preferred color scheme are divided into a light and a dark one, because the site has a switch of its own.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "project/readme.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security-policy.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "charts/das-rollout/README.md": "project/chart.md",
    "examples/trl_grpo/README.md": "project/trl-grpo.md",
    "examples/trl_async_grpo/README.md": "project/trl-async-grpo.md",
}
"""Page of another folder of the repository → its place on the site."""
DATA = {".json", ".svg", ".png", ".gz", ".html"}
"""Suffixes of files that are copied instead of shown as text."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".lua": "lua", ".toml": "toml", "": "bash"}

_FENCE = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_NAMED_LINK = re.compile(r"\[(?:[\w./-]+/)?[\w-]+\.md\]\(([^)\s]+\.md)(#[^)\s]*)?\)")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_SVG = re.compile(r"!\[([^\]]*)\]\(([^)\s]+\.svg)\)")
_DARK_RULES = re.compile(r"@media \(prefers-color-scheme: dark\) \{((?:[^{}]*\{[^{}]*\})*)\s*\}")


def repository_path(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    return next((path for path, place in PAGES.items() if place == uri), f"docs/{uri}")


def site_uri(path: str) -> str:
    """Return where the site has a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if Path(path).suffix in DATA else f"source/{path}.md"


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown after applying *change* to everything outside of fenced code."""
    parts = _FENCE.split(text)
    return "".join(part if index % 2 else change(part) for index, part in enumerate(parts))


def linked_paths(markdown: str, path: str) -> Iterator[str]:
    """Yield the files and folders of the repository that a page of the repository links to."""
    for link in _LINK.findall(_FENCE.sub("", markdown)):
        target = link.partition("#")[0]
        if target and ":" not in target:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def rewrite_links(markdown: str, path: str, uri: str) -> str:
    """Return a page of the repository with links to the files of the site; *uri* is the page's place on the site."""

    def rewrite(match: re.Match[str]) -> str:
        target, separator, anchor = match[1].partition("#")
        if not target or ":" in target:
            return match[1]
        wanted = site_uri(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        return posixpath.relpath(wanted, posixpath.dirname(uri)) + separator + anchor

    return outside_code(markdown, lambda text: _LINK.sub(rewrite, text))


def themed_pictures(svg: str) -> tuple[str, str] | None:
    """Return the light and the dark variant of an SVG that follows the color scheme; None if it does not."""
    if _DARK_RULES.search(svg) is None:
        return None
    return _DARK_RULES.sub("", svg), _DARK_RULES.sub(lambda match: match[1], svg)


def source_page(path: str) -> str:
    """Return a page with the text of a file, or the names of the files in a folder."""
    file = ROOT / path
    head = f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n"
    if file.is_dir():
        names = sorted(f"- `{entry.name}`" for entry in file.iterdir() if not entry.name.startswith(("_", ".")))
        return head + "\n".join(names) + "\n"
    return f"{head}~~~~{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n~~~~\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is outside of docs/, and the variants of pictures."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    linked: set[str] = set()
    for page in files.documentation_pages():
        linked.update(linked_paths(page.content_string, repository_path(page.src_uri)))
    for path in sorted(linked):
        uri = site_uri(path)
        if files.get_file_from_path(uri) is None and (ROOT / path).exists() and not path.startswith("docs/"):
            data = Path(path).suffix in DATA
            files.append(
                File.generated(config, uri, abs_src_path=str(ROOT / path))
                if data
                else File.generated(config, uri, content=source_page(path))
            )
    for picture in [file for file in files if file.src_uri.endswith(".svg")]:
        variants = themed_pictures(picture.content_string)
        if variants is not None:
            for name, content in zip(("light", "dark"), variants, strict=True):
                files.append(File.generated(config, _variant(picture.src_uri, name), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page, name pages by their titles, and show the variants of pictures."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it would have one entry
    markdown = rewrite_links(markdown, repository_path(uri), uri)

    def show(match: re.Match[str]) -> str:
        picture = posixpath.normpath(posixpath.join(posixpath.dirname(uri), match[2]))
        if files.get_file_from_path(_variant(picture, "light")) is None:
            return match[0]
        shown = (f"![{match[1]}]({_variant(match[2], name)}#only-{name})" for name in ("light", "dark"))
        return " ".join(shown)

    def name(match: re.Match[str]) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(uri), match[1])))
        title = None if target is None else _TITLE.search(target.content_string)
        return match[0] if title is None else f"[{title[1]}]({match[1]}{match[2] or ''})"

    return outside_code(markdown, lambda text: _NAMED_LINK.sub(name, _SVG.sub(show, text)))


def _variant(uri: str, name: str) -> str:
    return f"{uri.removesuffix('.svg')}.{name}.svg"
