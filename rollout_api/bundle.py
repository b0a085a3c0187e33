"""Bundles: archives with all that is known about a job, from which passwords and tokens are removed.

A page in the archive says what its files are and what is missing.
"""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple, Protocol, TypeVar

from rollout_api.redaction import Redactor

README = "README.md"
_MAX_REASON = 500
"""Maximum length of the reason why a file is missing; the rest is cut."""
_MAX_MEMBER_BYTES = 256 << 20
ARCHIVE_KEY = "bundle.tar.gz"
"""Key of the archive in the ConfigMap that the operator keeps of a failed job."""
EVENTS, PODS = "events.json", "pods"
"""Paths in a bundle."""

_CONCURRENCY = 8
"""Number of objects that are read at the same time."""
_DROPPED_METADATA = ("managedFields", "selfLink")
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_EVENT_FIELDS = ("type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime")
_Result = TypeVar("_Result")


class BundleArchive:
    """A gzip-compressed tar archive under construction. All texts and objects are redacted when they are added."""

    def __init__(self, file: IO[bytes], *, folder: str, redactor: Redactor) -> None:
        """Begin an archive.

        Args:
            file: what the archive is written to; it is not closed.
            folder: name of the folder that contains all files of the archive.
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


class ContainerLog(NamedTuple):
    """A log of a container."""

    pod: str
    container: str
    previous: bool
    """Whether it is that of the container that ran before it was restarted."""

    @property
    def path(self) -> str:
        """Path of the log in a bundle."""
        return f"logs/{self.pod}/{self.container}{'-previous' if self.previous else ''}.log"


class ClusterReader(Protocol):
    """Reads what the API server has about one job. Any exception means that something cannot be read."""

    async def events(self) -> Iterable[Mapping[str, Any]]:
        """Return the Events on the job and its pods."""

    async def pods(self) -> Iterable[Mapping[str, Any]]:
        """Return the pods of the job."""

    async def log(self, log: ContainerLog, num_logs: int) -> str:
        """Return the end of a container's log; *num_logs* logs are read together."""


@dataclass
class Evidence:
    """What was read about a job."""

    job: Mapping[str, Any]
    pods: list[Mapping[str, Any]] = field(default_factory=list)
    events: list[Mapping[str, Any]] = field(default_factory=list)
    logs: dict[str, str | bytes] = field(default_factory=dict)
    """Path in a bundle → the log; bytes are redacted already."""
    missing: dict[str, str] = field(default_factory=dict)
    """Path in a bundle → why it could not be read."""

    async def read(self, cluster: ClusterReader) -> None:
        """Read everything, several objects at the same time."""
        slots = asyncio.Semaphore(_CONCURRENCY)

        async def read(path: str, reading: Callable[[], Awaitable[_Result]]) -> _Result | None:
            try:
                async with slots:
                    return await reading()
            except Exception as error:
                self.missing[path] = str(error) or type(error).__name__
                return None

        events, pods = await asyncio.gather(read(EVENTS, cluster.events), read(PODS, cluster.pods))
        self.events, self.pods = list(events or ()), list(pods or ())
        logs = [log for pod in self.pods for log in _logs(pod)]

        async def read_log(log: ContainerLog) -> None:
            if text := await read(log.path, lambda: cluster.log(log, len(logs))):
                self.logs[log.path] = text

        await asyncio.gather(*map(read_log, logs))

    def add_to(self, archive: BundleArchive) -> None:
        """Add everything to a bundle."""
        archive.add("job.json", "The RolloutJob: its spec and its status.", _without_noise(self.job))
        if EVENTS not in self.missing:
            archive.add(EVENTS, "The Events on the job and its pods.", _shown_events(self.events))
        for pod in self.pods:
            archive.add(f"{PODS}/{pod['metadata']['name']}.json", "A pod.", _without_noise(pod))
        for path, text in self.logs.items():
            archive.add(path, "The end of a container's log.", text)
        for path, reason in self.missing.items():
            archive.note_missing(path, "", reason)


def _without_noise(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without the metadata that only concerns its management."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name not in _DROPPED_METADATA}
    if _APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != _APPLIED}
    return {**manifest, "metadata": metadata}


def _shown_events(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what matters of Events, in the order of their times."""
    entries = [
        {"object": f"{event['involvedObject'].get('kind')}/{event['involvedObject'].get('name')}"}
        | {name: event[name] for name in _EVENT_FIELDS if event.get(name) is not None}
        for event in events
    ]
    return sorted(entries, key=lambda entry: str(entry.get("lastTimestamp") or entry.get("eventTime") or ""))


def _logs(pod: Mapping[str, Any]) -> list[ContainerLog]:
    """Return the logs of a pod's containers, and those of containers that were restarted."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    found = []
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if container.get("restartCount"):
            found.append(ContainerLog(name, container["name"], True))
        if "waiting" not in container.get("state", {}):
            found.append(ContainerLog(name, container["name"], False))
    return found
