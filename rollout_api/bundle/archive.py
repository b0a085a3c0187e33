"""The archive of a bundle: redacted files, and a page that says what they are and what is missing."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from rollout_api.bundle.redaction import Redactor

README = "README.md"
_MAX_REASON = 500
"""Length to which the reason is cut why a file is missing."""
_MAX_MEMBER_BYTES = 256 << 20


class BundleArchive:
    """A gzip-compressed tar archive under construction. All texts and objects are redacted when they are added."""

    def __init__(self, file: IO[bytes], *, folder: str, redactor: Redactor) -> None:
        """Begin an archive.

        Args:
            file: what the archive is written to; it is not closed.
            folder: name of the folder in which all files of the archive are.
            redactor: removes secrets.
        """
        self._tar = tarfile.open(fileobj=file, mode="w:gz")  # noqa: SIM115 - close() closes it
        self._folder, self._redactor = folder, redactor
        self._time = time.time()
        self._present: list[tuple[str, str]] = []
        self._missing: list[tuple[str, str, str]] = []

    def collect(self, name: str, description: str, read: Callable[[], Any]) -> None:
        """Add a file with what *read* returns. If it fails, the page says why, and the archive has no such file.

        Args:
            name: path of the file in the archive.
            description: what the file is, as a sentence.
            read: returns a text, or an object that is written as JSON; bytes are added as they are, without redaction.
        """
        try:
            self.add(name, description, read())
        except Exception as error:
            self.note_missing(name, description, str(error) or type(error).__name__)

    def add(self, name: str, description: str, content: Any) -> None:
        """Add a file; the arguments are those of :meth:`collect`."""
        if isinstance(content, bytes):
            data = content
        elif isinstance(content, str):
            data = self._redactor.text(content).encode(errors="backslashreplace")
        else:
            data = json.dumps(self._redactor.value(content), indent=1, ensure_ascii=False, default=str).encode()
        self._write(name, data)
        self._present.append((name, description))

    def note_missing(self, name: str, description: str, reason: str) -> None:
        """Note why a file could not be collected."""
        line = " ".join(self._redactor.text(reason).split())
        self._missing.append((name, description, line[:_MAX_REASON]))

    def add_archive(self, folder: str, description: str, archive: bytes) -> None:
        """Add the files of another bundle, which are redacted already, in a folder.

        Raises:
            tarfile.TarError, OSError: if it is not an archive.
        """
        for name, data in read_archive(archive):
            self._write(f"{folder}/{name}", data)
        self._present.append((f"{folder}/{README}", description))

    def close(self, title: str, introduction: str) -> None:
        """Add the page about the archive, and end the archive.

        Args:
            title: heading of the page.
            introduction: what the page begins with.
        """
        self._write(README, self._page(title, introduction).encode())
        self._tar.close()

    def _page(self, title: str, introduction: str) -> str:
        lines = [f"# {title}", "", introduction, "", "## Files", "", "| File | Content |", "|---|---|"]
        lines += [f"| `{name}` | {_cell(description)} |" for name, description in self._present]
        if self._missing:
            lines += ["", "## What is missing", "", "| File | Content | Why it is missing |", "|---|---|---|"]
            lines += [f"| `{name}` | {_cell(text)} | {_cell(reason)} |" for name, text, reason in self._missing]
        return "\n".join(lines) + "\n"

    def _write(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{self._folder}/{name}")
        member.size, member.mtime, member.mode = len(data), int(self._time), 0o644
        self._tar.addfile(member, io.BytesIO(data))


def read_archive(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a bundle: their paths below its folder, and their contents.

    Raises:
        tarfile.TarError, OSError: if *archive* is damaged or something else.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            is_below = path and ".." not in path.split("/") and not path.startswith("/")
            content = tar.extractfile(member) if member.isfile() and is_below else None
            if content is not None and member.size <= _MAX_MEMBER_BYTES:
                yield path, content.read()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
